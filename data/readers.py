"""How one file is read: a function per format, each a generator of documents.

Nothing here holds more than a block, a row or, in parquet, a page and some rows, however large a file is. Each error
names the file or the row, and what to do.
"""

import contextlib
import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from errors import UserError, reading

BLOCK = 1 << 20  # characters read at a time
ROWS = 64  # of parquet, decoded at a time; books of a megabyte each still fit in memory

Document = Iterable[str]  # its text in blocks, read from the file as one iterates: once, and only as far as needed
Documents = Iterator[Document | None]  # None: a row whose text is null


def read_text(path: Path, field: str) -> Documents:
    """One document, the whole file."""
    yield _blocks(path)


def _blocks(path: Path) -> Iterator[str]:
    fix = "make it readable, convert it to UTF-8, or leave it out"
    with reading(path, fix), open(path, encoding="utf-8", newline="") as file:
        while block := file.read(BLOCK):
            yield block


def read_source(path: Path, field: str) -> Documents:
    """One file of the standard library. The few that another encoding declares (PEP 263) are left out."""
    with contextlib.suppress(UnicodeDecodeError):
        yield [path.read_bytes().decode("utf-8")]


def read_topics(path: Path, field: str) -> Documents:
    """The language reference as `help()` shows it: one document per topic."""
    from pydoc_data.topics import topics

    yield from ([topics[name]] for name in sorted(topics))


def read_jsonl(path: Path, field: str) -> Documents:
    """One document per line, an object whose `field` is the text; blank lines are skipped."""
    open_file = gzip.open if path.suffix.lower() == ".gz" else open
    with reading(path), open_file(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number}"
            if line.strip():
                with reading(where, "a .jsonl file holds one JSON object a line, in UTF-8"):
                    row = json.loads(line.decode("utf-8"))
                    if field not in row:
                        raise _no_field(where, field, row)
                    document = _document(where, row[field], field)
                yield document


def read_parquet(path: Path, field: str) -> Documents:
    """One document per row, the string in the column `field`."""
    from pyarrow import parquet

    # Without these two settings the whole column is read ahead into memory.
    with reading(path), parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK) as file:
        if field not in file.schema_arrow.names:
            raise _no_field(str(path), field, file.schema_arrow.names)
        batches = file.iter_batches(batch_size=ROWS, columns=[field], use_threads=False)
        for number, value in enumerate((value for batch in batches for value in batch.column(0)), 1):
            yield _document(f"{path}, row {number}", value.as_py(), field)


def _document(where: str, text: object, field: str) -> Document | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise UserError(f"{where}: {field!r} is {type(text).__name__}, not text; name another field with --text-field.")
    text.encode("utf-8")  # JSON can have half a surrogate pair as an escape
    return [text]


def _no_field(where: str, field: str, present: Iterable[str]) -> UserError:
    names = ", ".join(list(present)[:8]) or "none"
    return UserError(f"{where} has no field {field!r}; name one with --text-field (there are: {names}).")


READERS: dict[str, Callable[[Path, str], Documents]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "source": read_source,
    "topics": read_topics,
}
