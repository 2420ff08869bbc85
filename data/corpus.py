"""Where text comes from: names, files, folders and patterns become a list of files, and files a stream of documents.

A document is one text file, one row of a jsonl or parquet file, or one topic of Python's own documentation. Text is
passed on exactly as it stands (no newline translation, no stripping), in pieces that fit in memory.
"""

import difflib
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.readers import READERS
from errors import UserError

FORMATS = {  # what a file's name ends in -> how it is read
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".parquet": "parquet",
}
KINDS = " ".join(FORMATS)

# Pieces of 32k characters are encoded about twice as fast as pieces of 1M: the tokenizer's queue stays in the L2 cache.
PIECE = 1 << 15
# A line longer than this is cut inside: its text is still exact, only the ids next to the cut may differ.
LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class TextFile:
    """A file to read: where, how (a key of `READERS`), and under which field of its rows the text stands."""

    path: Path
    format: str
    field: str = "text"


@dataclass(frozen=True)
class Download:
    """Files of one dataset repository on the Hugging Face hub."""

    repository: str
    revision: str
    files: tuple[str, ...]
    field: str = "text"


DOWNLOADS = {
    # The 1.1 MB corpus is three rows there (90 %, 5 %, 5 % of one text): all three are read, as three documents.
    "shakespeare": Download(
        "karpathy/tiny_shakespeare",
        "refs/convert/parquet",
        tuple(f"default/{part}/0000.parquet" for part in ("train", "validation", "test")),
    ),
    # Its own training part (2.1 million stories, 1.9 GB); the split into train and validation is ours, as everywhere.
    "tinystories": Download(
        "roneneldan/TinyStories",
        "main",
        (
            "data/train-00000-of-00004-2d5a1467fff1081b.parquet",
            "data/train-00001-of-00004-5852b56a2bd28fd9.parquet",
            "data/train-00002-of-00004-a26307300439e943.parquet",
            "data/train-00003-of-00004-d243063613e5a057.parquet",
        ),
    ),
}
NAMES = ("python", *DOWNLOADS)

NOT_LIBRARY = frozenset(  # folders of the standard library that are tests, applications, third-party code or generated
    "test tests idle_test idlelib tkinter lib2to3 distutils site-packages dist-packages __pycache__ pydoc_data".split()
)


def resolve(sources: Iterable[str], text_field: str = "text") -> list[TextFile]:
    """The files behind names (`python`, `shakespeare`, `tinystories`), paths, folders and patterns, in that order.

    A name wins over a folder that happens to be called so; `./python` is the folder. Folders and patterns are sorted,
    hidden files and folders left out, and only files of the kinds in `FORMATS` taken. Raises `UserError` for whatever
    is not there, is empty when named alone, or holds nothing to read.
    """
    files = []
    for source in sources:
        path = Path(os.path.expanduser(source))  # leaves a ~user that there is not as it is, for the sentence below
        if source == "python":
            files += _standard_library()
        elif source in DOWNLOADS:
            files += _downloaded(source)
        elif path.is_file():
            files.append(_single(path, text_field))
        elif path.is_dir():
            files += _all_of(_walk(path), f"the folder {source} holds", text_field)
        elif glob.has_magic(source):
            found = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
            files += _all_of((match for match in found if match.is_file()), f"{source} matches", text_field)
        else:
            near = difflib.get_close_matches(source, NAMES, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"give a path, a pattern, or one of {', '.join(NAMES)}."
            raise UserError(f'no file, folder or known corpus is called "{source}"; {hint}')
    if not files:
        raise UserError(f"no text was named; give a path, a pattern, or one of {', '.join(NAMES)}.")
    return files


def stream(files: Iterable[TextFile]) -> Iterator[tuple[str, bool]]:
    """Yield (text, first): documents in order, in pieces; `first` is true where a new document begins.

    A piece of a longer document ends after a line's end that a visible character follows. No piece is empty, so an
    empty document does not appear at all. Reads a few MB ahead at most. Raises `UserError` for unreadable input.
    """
    for file in files:
        try:
            for document in READERS[file.format](file.path, file.field):
                first = True
                for text in _pieces(document):
                    yield text, first
                    first = False
        except OSError as error:
            raise UserError(f"{file.path} cannot be read: {error.strerror or error}.") from error


def fingerprint(files: Iterable[TextFile]) -> str:
    """A hash of the files' places, sizes and times of change: equal means the text need not be read again."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            status = file.path.stat()
        except OSError as error:
            raise UserError(f"{file.path} cannot be read: {error.strerror or error}.") from error
        entry = (os.path.abspath(file.path), status.st_size, status.st_mtime_ns, file.format, file.field)
        digest.update(repr(entry).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _single(path: Path, text_field: str) -> TextFile:
    format = _format(path)
    if format is None:
        raise UserError(f"{path} is of a kind that is not read here; the kinds are {KINDS}.")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty; give a file with text in it.")
    return TextFile(path, format, text_field)


def _all_of(paths: Iterable[Path], where: str, text_field: str) -> list[TextFile]:
    files = [TextFile(path, format, text_field) for path in paths if (format := _format(path))]
    if not files:
        raise UserError(f"{where} no file to read; the kinds are {KINDS}.")
    return files


def _format(path: Path) -> str | None:
    name = path.name.lower()
    return next((format for suffix, format in FORMATS.items() if name.endswith(suffix)), None)


def _walk(folder: Path, skip: frozenset[str] = frozenset({"__pycache__"})) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def _standard_library() -> list[TextFile]:
    """The running interpreter's own sources and its prose documentation: real text on every machine with Python."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = [path for path in _walk(root, NOT_LIBRARY) if path.suffix == ".py" and not _is_charmap(path)]
    if not sources:
        raise UserError(
            f"this Python keeps no sources of its standard library in {root}, and they are the default text; "
            f"name a text of your own with --data FILE (or --data shakespeare, a download of 1 MB)."
        )
    topics = root / "pydoc_data" / "topics.py"
    return [TextFile(path, "source") for path in sources] + [TextFile(topics, "topics")] * topics.is_file()


def _is_charmap(path: Path) -> bool:
    """Whether this is one of the 1 MB of generated character tables in `encodings`, which are not text by anyone."""
    return path.parent.name == "encodings" and b"decoding_table" in path.read_bytes()


def _downloaded(name: str) -> list[TextFile]:
    try:
        from huggingface_hub import hf_hub_download, logging
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise UserError(f"downloading {name} needs huggingface_hub: pip install huggingface_hub.") from error
    logging.set_verbosity_error()  # its retries are no news; their failure is, in a sentence below
    wanted = DOWNLOADS[name]
    files = []
    for file in wanted.files:
        place = dict(repo_id=wanted.repository, filename=file, revision=wanted.revision, repo_type="dataset")
        try:
            try:  # what the cache holds needs no network, so a second run starts at once
                path = hf_hub_download(**place, local_files_only=True)
            except LocalEntryNotFoundError:
                path = hf_hub_download(**place)
        except Exception as error:  # a network fails in many ways, and the hub has a class for each
            cause = error
            while cause.__cause__:
                cause = cause.__cause__
            said = str(cause).strip().split("\n")[0].rstrip(".")
            raise UserError(
                f"{file} of the dataset {wanted.repository} could not be downloaded ({type(cause).__name__}: {said}); "
                f"check the connection, or name a text of your own with --data FILE."
            ) from error
        files.append(TextFile(Path(path), "parquet", wanted.field))
    return files


def _pieces(blocks: Iterable[str]) -> Iterator[str]:
    text = ""
    for block in blocks:
        text += block
        start = 0
        while len(text) - start > LONGEST_LINE:  # so that every cut but the last few sees all it may need
            end = _cut(text, start)
            yield text[start:end]
            start = end
        text = text[start:]
    start = 0
    while start < len(text):
        end = _cut(text, start)
        yield text[start:end]
        start = end


_LINE_START = re.compile(r"(?<=\n)(?=\S)")


def _cut(text: str, start: int) -> int:
    """Where the piece that begins at `start` ends.

    After a newline our tokenizer starts afresh, since none of its pieces holds one. Tokenizers that split text by a
    pattern first (GPT, Qwen) may join a newline to the white space after it, hence the visible character that follows.
    """
    if len(text) - start <= PIECE:
        return len(text)
    end = start + PIECE
    while (end := text.rfind("\n", start, end)) > start:
        if not text[end + 1].isspace():
            return end + 1
    later = _LINE_START.search(text, start + PIECE, start + LONGEST_LINE)
    return later.start() if later else min(start + LONGEST_LINE, len(text))
