"""Where text comes from: names, files, folders and patterns become a list of files, and files become documents.

A document is one text file, one row of a jsonl or parquet file, or one topic of Python's own documentation. Text is
never changed (no newline translation, no stripping), and a document is never held in memory: see `readers.Document`.
"""

import difflib
import glob
import hashlib
import itertools
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from data.readers import READERS, Document
from errors import UserError, reading

FORMATS = {  # what a file's name ends in -> how it is read
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".parquet": "parquet",
}
SUFFIXES = " ".join(FORMATS)


@dataclass(frozen=True)
class TextFile:
    path: Path
    format: str  # a key of `READERS`
    field: str = "text"  # of each row, which holds the text
    optional: bool = False  # found in a folder or by a pattern: left out where it is not text


@dataclass(frozen=True)
class Download:
    """Files of one dataset repository on the Hugging Face hub."""

    repository: str
    revision: str
    files: tuple[str, ...]


DOWNLOADS = {
    # The 1.1 MB corpus is three rows there (90 %, 5 %, 5 % of one text): all three are read, as three documents.
    "shakespeare": Download(
        "karpathy/tiny_shakespeare",
        "refs/convert/parquet",
        tuple(f"default/{part}/0000.parquet" for part in ("train", "validation", "test")),
    ),
    # Its training part only (2.1 million stories, 1.9 GB), which is split into train and validation here.
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
CHOICES = f"a path, a pattern, or one of {', '.join(NAMES)}"

EXCLUDED = frozenset(  # folders of the standard library that are tests, applications, third-party code or generated
    "test tests idle_test idlelib tkinter lib2to3 distutils site-packages dist-packages __pycache__ pydoc_data".split()
)


def resolve(sources: Iterable[str], text_field: str = "text") -> list[TextFile]:
    """The files behind names (`python`, `shakespeare`, `tinystories`), paths, folders and patterns, in that order.

    A name wins over a folder of the same name; `./python` is the folder. Folders and patterns are sorted, hidden files
    and folders left out, and only files with a suffix in `FORMATS` taken. Raises `UserError` for a source that does
    not exist, a single file that is empty, and a folder or pattern without files to read.
    """
    files = []
    for source in sources:
        path = Path(os.path.expanduser(source))  # unlike Path.expanduser it does not raise for an unknown ~user
        if source == "python":
            files += _standard_library()
        elif source in DOWNLOADS:
            files += _download(source)
        elif _is_file(path):
            files.append(_text_file(path, text_field))
        elif path.is_dir():
            files += _text_files(_visible_files(path), f"the folder {source} holds", text_field)
        elif glob.has_magic(source):
            files += _text_files(sorted(_matches(path)), f"{source} matches", text_field)
        else:
            similar = difflib.get_close_matches(source, NAMES, n=1)
            hint = f'did you mean "{similar[0]}"?' if similar else f"give {CHOICES}."
            raise UserError(f'no file, folder or known corpus is called "{source}"; {hint}')
    if not files:
        raise UserError(f"no text was named; give {CHOICES}.")
    return files


def read_documents(files: Iterable[TextFile], *, report: bool = False) -> Iterator[Document]:
    """Yield the documents in order, each to be read at most once; documents without text are left out.

    With `report`, a line on standard error says how many rows of a file are left out because their text is null.
    Raises `UserError` for unreadable input, here or while a document is read.
    """
    for file in files:
        nulls = 0
        with reading(file.path):
            for document in READERS[file.format](file.path, file.field):
                nulls += document is None
                blocks = (block for block in document or () if block)
                if first := next(blocks, ""):
                    yield itertools.chain([first], blocks)
        if nulls and report:
            tqdm.write(f"skipped {nulls:,} rows of {file.path} whose {file.field!r} is null", file=sys.stderr)


def drop_non_utf8(files: Iterable[TextFile]) -> list[TextFile]:
    """Leave out the files of folders and patterns that are not UTF-8 text, and name them on standard error."""
    kept, skipped = [], []
    for file in files:
        try:
            if file.optional and file.format == "text":
                for document in READERS["text"](file.path, file.field):
                    for _ in document:
                        pass
            kept.append(file)
        except UserError as error:
            skipped.append(str(error))
    for reason in skipped[:5]:
        print(f"skipped: {reason}", file=sys.stderr)
    if skipped:
        print(f"skipped {len(skipped):,} of {len(kept) + len(skipped):,} files", file=sys.stderr)
    if not kept:
        raise UserError(f"no file is UTF-8 text: {skipped[0]}")
    return kept


def status_of(file: TextFile) -> os.stat_result:
    """Its size and times; `UserError` if it is not there."""
    with reading(file.path):
        return file.path.stat()


def fingerprint(files: Iterable[TextFile]) -> str:
    """A hash of the files' paths, sizes and times: the same hash means the same text, without reading it.

    `st_ctime` is among the times because an edit can keep the size and set the modification time back. It also changes
    when a file is only copied, renamed or given other permissions; the text is then read again, and found prepared.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        status = status_of(file)
        times = (status.st_mtime_ns, status.st_ctime_ns)  # on Windows the second is the time of creation
        entry = (os.path.abspath(file.path), status.st_size, times, file.format, file.field)
        digest.update(repr(entry).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _text_file(path: Path, text_field: str) -> TextFile:
    format = _find_format(path)
    if format is None:
        raise UserError(f"{path} has a format that is not supported; the formats are {SUFFIXES}.")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty; give a file with text in it.")
    return TextFile(path, format, text_field)


def _text_files(paths: Iterable[Path], where: str, text_field: str) -> list[TextFile]:
    files = [
        TextFile(path, format, text_field, optional=True)
        for path in paths
        if (format := _find_format(path)) and _is_file(path)  # no folders, pipes and devices
    ]
    if not files:
        raise UserError(f"{where} no file to read; the formats are {SUFFIXES}.")
    return files


def _find_format(path: Path) -> str | None:
    name = path.name.lower()
    return next((format for suffix, format in FORMATS.items() if name.endswith(suffix)), None)


def _is_file(path: Path) -> bool:
    with reading(path):  # Path.is_file raises where the folder may not be entered
        return path.is_file()


def _visible_files(folder: Path, excluded: frozenset[str] = frozenset({"__pycache__"})) -> Iterator[Path]:
    for parent, names in _visible_folders(folder, excluded):
        yield from (parent / name for name in sorted(names) if not name.startswith("."))


def _visible_folders(folder: Path, excluded: frozenset[str] = frozenset()) -> Iterator[tuple[Path, list[str]]]:
    """The folder and those in it, each with the names of its files; links to folders are not followed."""

    def refuse(error: OSError) -> None:  # os.walk leaves the folder out otherwise
        fix = "make it readable or name other folders"
        raise UserError(f"the folder {error.filename} cannot be read ({error.strerror}); {fix}.")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if name not in excluded and not name.startswith("."))
        yield Path(parent), names


def _matches(pattern: Path) -> set[Path]:
    """What a pattern matches, `**` any number of folders: unlike glob's it follows no links, which can be circles."""
    if "**" not in pattern.parts:
        return {Path(match) for match in glob.glob(str(pattern))}
    place = pattern.parts.index("**")
    rest = list(itertools.dropwhile(lambda part: part == "**", pattern.parts[place:])) or ["*"]
    parents = (match for match in glob.glob(str(Path(*pattern.parts[:place]))) if os.path.isdir(match))
    folders = (folder for parent in parents for folder, _ in _visible_folders(Path(parent)))
    return {match for folder in folders for match in _matches(Path(glob.escape(str(folder)), *rest))}


def _standard_library() -> list[TextFile]:
    """The running interpreter's own sources and its prose documentation: real text on every machine with Python."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = [
        path
        for path in (_visible_files(root, EXCLUDED) if root.is_dir() else ())
        if path.suffix == ".py"
        # 1 MB of `encodings` is generated character tables
        and not (path.parent.name == "encodings" and b"decoding_table" in path.read_bytes())
    ]
    if not sources:
        raise UserError(
            f"this Python keeps no sources of its standard library in {root}, and they are the default text; "
            f"name your own text with --data FILE (or --data shakespeare, a download of 1 MB)."
        )
    topics = root / "pydoc_data" / "topics.py"
    return [TextFile(path, "source") for path in sources] + [TextFile(topics, "topics")] * topics.is_file()


def _download(name: str) -> list[TextFile]:
    from huggingface_hub import hf_hub_download, logging
    from huggingface_hub.errors import LocalEntryNotFoundError

    logging.set_verbosity_error()  # no warnings about retries; if all of them fail, the error below says so
    dataset = DOWNLOADS[name]
    files = []
    for file in dataset.files:
        location = dict(repo_id=dataset.repository, filename=file, revision=dataset.revision, repo_type="dataset")
        try:
            try:  # what the cache holds needs no network, so a second run starts at once
                path = hf_hub_download(**location, local_files_only=True)
            except LocalEntryNotFoundError:
                path = hf_hub_download(**location)
        except Exception as error:  # a network fails in many ways, and the hub has a class for each
            cause = error
            while cause.__cause__:
                cause = cause.__cause__
            reason = str(cause).strip().split("\n")[0].rstrip(".")
            raise UserError(
                f"{file} of the dataset {dataset.repository} could not be downloaded "
                f"({type(cause).__name__}: {reason}); check the connection or name your own text with --data FILE."
            ) from error
        files.append(TextFile(Path(path), "parquet"))
    return files
