"""What `--data` names, as a list of files; a file of the Hugging Face Hub is downloaded when its turn comes."""

import contextlib
import dataclasses
import glob
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from data.settings import DataSettings
from errors import UserError, counted, note
from files import read_json, replace_text

# What a file's name ends in -> how it is read.
FORMATS = {".txt": "text", ".md": "text", ".py": "text", ".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".parquet": "parquet"}
HUB_TEXTS = {  # name -> data set, its revision, what the names of its files begin with
    "shakespeare": ("karpathy/tiny_shakespeare", "refs/convert/parquet", "default/"),
    "tinystories": ("roneneldan/TinyStories", "main", "data/train-"),
}
# Folders of the standard library that are tests, applications, third-party code or generated.
EXCLUDED = "test tests idle_test idlelib tkinter lib2to3 distutils site-packages dist-packages pydoc_data".split()


@dataclass(frozen=True)
class TextFile:
    """A file as it was when it was listed."""

    name: str  # absolute path, or path in the data set
    format: str  # a value of `FORMATS`, "topics" or "python-chat"
    field: str  # the field of each row that holds the text
    size: int  # bytes
    version: int | str  # time of the last change in nanoseconds, or commit of the data set
    dataset: str | None = None  # on the Hub
    optional: bool = False  # found in a folder or by a pattern: left out where it is not text

    def fetch(self) -> Path:
        if self.dataset is None:
            return Path(self.name)
        from huggingface_hub import hf_hub_download

        with reading_hub(f"{self.name} of hub:{self.dataset}"):
            return Path(hf_hub_download(self.dataset, self.name, revision=self.version, repo_type="dataset"))


def resolve(settings: DataSettings) -> list[TextFile]:
    """The files that --data names, in that order."""
    return [file for name in settings.data for file in find_files(name, settings)]


def find_files(name: str, settings: DataSettings) -> list[TextFile]:
    """The files of a known text, of a data set, or of a path or pattern; a known text wins over a folder called so."""
    path = os.path.expanduser(name)
    if name == "python":
        files = standard_library()
    elif name == "python-chat":
        files = [dataclasses.replace(file, format=name) for file in standard_library() if file.format == "text"]
    elif name in HUB_TEXTS:
        files = hub_files(*HUB_TEXTS[name], settings)
    elif name.startswith("hub:"):  # hub:OWNER/NAME[/FOLDER]
        parts = name.removeprefix("hub:").rstrip("/").split("/")
        files = hub_files("/".join(parts[:2]), "main", "".join(f"{folder}/" for folder in parts[2:]), settings)
    elif os.path.isfile(path):
        files = text_files([path], settings.text_field, optional=False)
        note_empty(files)
    elif os.path.isdir(path) or glob.has_magic(path):
        paths = list(visible_files(path)) if os.path.isdir(path) else sorted(glob.glob(path, recursive=True))
        files = text_files(paths, settings.text_field)
        note_left_out(name, paths)
        note_empty(files)
    else:
        choices = f"a path, a pattern, hub:OWNER/NAME, or one of python, python-chat, {', '.join(HUB_TEXTS)}"
        raise UserError(f'no file, folder or known text is called "{name}"; give --data {choices}.')
    if not files:
        formats = f"the formats are {' '.join(FORMATS)} (jsonl: one JSON object a line)"
        raise UserError(f"{name} names no file to read; {formats}.")
    return files


def text_files(paths: Iterable[str | Path], text_field: str, optional: bool = True) -> list[TextFile]:
    """The paths that are files of known formats, not pipes or folders."""
    files = []
    for path in paths:
        format = find_format(path)
        if format is not None and os.path.isfile(path):
            name = os.path.abspath(path)
            status = os.stat(path)
            files.append(TextFile(name, format, text_field, status.st_size, status.st_mtime_ns, optional=optional))
    return files


def note_left_out(name: str, paths: Iterable[str]) -> None:
    """Say how many files, by suffix, and folders of the paths are not read."""
    others = [path for path in paths if os.path.isfile(path) and not find_format(path)]
    left_out = Counter(Path(path).suffix or "without a suffix" for path in others)
    if "**" not in name:  # which matches the files in folders, too
        left_out += Counter("folder" for path in paths if os.path.isdir(path))
    if left_out:
        counts = ", ".join(f"{count} {suffix}" for suffix, count in left_out.most_common(8))
        folders = ", and name folders in --data" if "folder" in left_out else ""
        note(f"left out of {name}: {counts}; export what should be read as .txt{folders}")


def note_empty(files: Iterable[TextFile]) -> None:
    empty = [file.name for file in files if not file.size]
    if empty:
        note(f"{counted(len(empty), 'file')} without text (the first: {empty[0]})")


def find_format(path: str | Path) -> str | None:
    """How a file is read, by its name; None if it is not."""
    name = str(path).lower()
    return next((format for suffix, format in FORMATS.items() if name.endswith(suffix)), None)


def visible_files(folder: str | Path, excluded: Iterable[str] = (), note_links: bool = True) -> Iterator[str]:
    """The files in a folder and the folders in it, sorted, without hidden ones; links to folders are not followed."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in excluded and not name.startswith("."))
        for name in folders:
            if note_links and os.path.islink(os.path.join(parent, name)):
                note(f"skipped: {os.path.join(parent, name)} is a link to a folder; name it in --data too")
        yield from (os.path.join(parent, name) for name in sorted(names) if not name.startswith("."))


def standard_library() -> list[TextFile]:
    """The running interpreter's own sources and its prose documentation: real text on every machine with Python."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [Path(path) for path in visible_files(root, EXCLUDED, note_links=False) if path.endswith(".py")]
    # 1 MB of `encodings` is generated character tables.
    tables = {path for path in paths if path.parent.name == "encodings" and b"decoding_table" in path.read_bytes()}
    files = text_files((path for path in paths if path not in tables), "text")
    topics = text_files([root / "pydoc_data" / "topics.py"], "text", optional=False)
    return files + [dataclasses.replace(file, format="topics") for file in topics]


def hub_files(dataset: str, revision: str, start: str, settings: DataSettings) -> list[TextFile]:
    """The files of a data set whose paths begin with `start`. The list is kept: a resumed run reads the same commit."""
    list_file = Path(settings.cache, "hub", f"{dataset}@{revision}.json".replace("/", "--"))
    if not list_file.is_file():
        from huggingface_hub import HfApi

        with reading_hub(f"hub:{dataset}"):
            info = HfApi().dataset_info(dataset, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size for file in info.siblings}
        replace_text(list_file, json.dumps({"commit": info.sha, "sizes": sizes}))
    listed = read_json(list_file)
    return [
        TextFile(path, find_format(path), settings.text_field, size, listed["commit"], dataset)
        for path, size in sorted(listed["sizes"].items())
        # `start` may be a file's path, too, with a slash behind it.
        if f"{path}/".startswith(start) and find_format(path) and not path.endswith((".md", ".py"))
    ]


@contextlib.contextmanager
def reading_hub(what: str) -> Iterator[None]:
    """Read from the Hub in this block: an error of its library, often a paragraph, becomes a short `UserError`."""
    try:
        yield
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"HTTP {status}" if status else getattr(error, "strerror", None) or type(error).__name__
        fix = "check the connection and the name, or give a text of your own with --data FILE"
        raise UserError(f"{what} cannot be downloaded ({reason}); {fix}.") from error
