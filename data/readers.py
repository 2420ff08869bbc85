"""How one file is read: a function per format, each a generator of documents.

Nothing here holds more than a block, a row or, in parquet, a page and some rows, however large a file is. Each error
names the file, the row or byte, and what to do.
"""

import codecs
import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from errors import UserError

BLOCK = 1 << 20  # bytes read at a time
ROWS = 64  # of parquet, decoded at a time; books of a megabyte each still fit in memory

Document = Iterable[str]  # its text in blocks, read from the file as one iterates: once, and only as far as needed
Documents = Iterator[Document | None]  # None: a row whose text is null


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the operating system's errors into a `UserError` that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error


def read_text(path: Path, field: str) -> Documents:
    """One document, the whole file."""
    yield _blocks(path)


def _blocks(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0  # of the first byte not yet decoded
    with reading(path), open(path, "rb") as file:
        while True:
            block = file.read(BLOCK)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset - pending + error.start) from error
            offset += len(block)
            yield text
            if not block:
                return


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
    offset = 0
    try:
        with open_file(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _json_document(path, number, line, offset, field)
                offset += len(line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is not a complete gzip file ({error}); download or compress it again.") from error


def _json_document(path: Path, number: int, line: bytes, offset: int, field: str) -> Document | None:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(path, offset + error.start) from error
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}); a .jsonl file holds one JSON object a line.") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} holds no JSON object; a .jsonl file holds one JSON object a line.")
    if field not in row:
        raise _no_field(where, field, row)
    return _document(where, row[field], field)


def read_parquet(path: Path, field: str) -> Documents:
    """One document per row, the string in the column `field`."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"reading {path} needs pyarrow: pip install pyarrow.") from error
    try:
        # Without these two settings the whole column is read ahead into memory.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK) as file:
            if field not in file.schema_arrow.names:
                raise _no_field(str(path), field, file.schema_arrow.names)
            if file.schema_arrow.names.count(field) > 1:
                raise UserError(f"{path} has more than one column {field!r}; write it again with one of them.")
            batches = file.iter_batches(batch_size=ROWS, columns=[field], use_threads=False)
            for number, value in enumerate((value for batch in batches for value in batch.column(0)), 1):
                where = f"{path}, row {number}"
                try:
                    text = value.as_py()
                except UnicodeDecodeError as error:  # parquet says UTF-8, and not every writer checks
                    problem = f"{where}: {field!r} is not UTF-8 text at byte {error.start}"
                    raise UserError(f"{problem}; convert it to UTF-8 or leave the row out.") from error
                yield _document(where, text, field)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:  # of names, and of dates
        reason = str(error).split("\n")[0].rstrip(".")
        raise UserError(f"{path} is not a readable parquet file ({reason}); download or write it again.") from error


def _document(where: str, text: object, field: str) -> Document | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise UserError(f"{where}: {field!r} is {type(text).__name__}, not text; name another field with --text-field.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can have half a pair as an escape
        raise UserError(f"{where}: character {error.start} of {field!r} is half a surrogate pair; fix it.") from error
    return [text]


def _no_field(where: str, field: str, present: Iterable[str]) -> UserError:
    names = ", ".join(list(present)[:8]) or "none"
    return UserError(f"{where} has no field {field!r}; name one with --text-field (there are: {names}).")


def _not_utf8(path: Path, offset: int) -> UserError:
    return UserError(f"{path} is not UTF-8 text at byte {offset}; convert the file to UTF-8 or leave it out.")


READERS: dict[str, Callable[[Path, str], Documents]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "source": read_source,
    "topics": read_topics,
}
