"""How one file is read: a function per format, each a generator of documents.

Nothing here holds more than a block, a row or, in parquet, a page, however large a document is. Each error names the
file, the row or byte, and what to do.
"""

import codecs
import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from errors import UserError
from files import json_integer

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

BLOCK = 1 << 20  # bytes read at a time
MAX_ROW = 1 << 24  # bytes of a row: a small compressed file can hold a row that fills the memory
# Of a row group's bytes, all columns, to those of its file. Natural text compresses less, and images hardly at all: a
# row of hundreds of megabytes is read if the file is as large.
MAX_RATIO, MAX_LONG_RATIO = 100, 4

Document = Iterable[str]  # its text in blocks, read from the file as one iterates: once, and only as far as needed
Documents = Iterator[Document]


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
            for number, line in enumerate(iter(lambda: lines.readline(MAX_ROW + 1), b""), 1):
                if len(line) > MAX_ROW:
                    raise _too_long(f"{path}, line {number}")
                if line.strip():
                    yield [_json_text(path, number, line, offset, field)]
                offset += len(line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is not a complete gzip file ({error}); download or compress it again.") from error


class JsonObject(tuple):
    """The pairs of a JSON object; a dict would keep the last of several with the same key, and say nothing."""


def _json_text(path: Path, number: int, line: bytes, offset: int, field: str) -> str:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line.decode("utf-8"), parse_int=json_integer, object_pairs_hook=JsonObject)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, offset + error.start) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); a .jsonl file holds one JSON object a line.") from error
    if not isinstance(row, JsonObject):
        raise UserError(f"{where} holds no JSON object; a .jsonl file holds one JSON object a line.")
    texts = [value for key, value in row if key == field]
    if any(text != texts[0] for text in texts):
        raise UserError(f"{where} has {field!r} more than once, with different values; keep one of them.")
    text = _string(where, texts[0] if texts else None, field, dict(row))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: character {error.start} of {field!r} is half a surrogate pair; fix it.") from error
    return text


def read_parquet(path: Path, field: str) -> Documents:
    """One document per row, the string in the column `field`.

    Rows are decoded one at a time: a few bytes can say that a huge value is repeated in all of them.
    """
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
            _check_sizes(path, file.metadata)
            rows = file.iter_batches(batch_size=1, columns=[field], use_threads=False)
            for number, row in enumerate(rows, 1):
                where = f"{path}, row {number}"
                try:
                    text = row.column(0)[0].as_py()
                    if isinstance(text, str) and len(text) > MAX_ROW:
                        raise _too_long(where)
                except UnicodeDecodeError as error:  # parquet says UTF-8, and not every writer checks
                    problem = f"{where}: {field!r} is not UTF-8 text at byte {error.start}"
                    raise UserError(f"{problem}; convert it to UTF-8 or leave the row out.") from error
                yield [_string(where, text, field, {field: text})]
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:  # of names, and of dates
        reason = str(error).split("\n")[0].rstrip(".")
        raise UserError(f"{path} is not a readable parquet file ({reason}); download or write it again.") from error


def _check_sizes(path: Path, footer: "FileMetaData") -> None:
    """Refuse row groups that are too large to be text.

    pyarrow decompresses a whole page at once, however large, so this comes first. Only the sizes of row groups are
    read: reading a column's from a damaged footer makes pyarrow abort the program.
    """
    size = path.stat().st_size
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        long_rows = group.total_byte_size > 4 * MAX_ROW * max(1, group.num_rows)
        ratio = MAX_LONG_RATIO if long_rows else MAX_RATIO
        if group.total_byte_size > max(4 * MAX_ROW, ratio * size):
            unpacked = f"{group.total_byte_size >> 20:,} MiB from a file of {size:,} bytes"
            problem = f"{path}: row group {number + 1} is too compressible for text ({unpacked})"
            raise UserError(f"{problem}; leave the file out, or write a file of its text column alone.")


def _string(where: str, text: object, field: str, row: dict[str, object]) -> str:
    if field not in row:
        raise _no_field(where, field, row)
    if not isinstance(text, str):
        raise UserError(f"{where}: {field!r} is {type(text).__name__}, not text; name another field with --text-field.")
    return text


def _no_field(where: str, field: str, present: Iterable[str]) -> UserError:
    names = ", ".join(list(present)[:8]) or "none"
    return UserError(f"{where} has no field {field!r}; name one with --text-field (there are: {names}).")


def _too_long(where: str) -> UserError:
    return UserError(f"{where} is longer than {MAX_ROW >> 20} MiB; cut it into several rows.")


def _not_utf8(path: Path, offset: int) -> UserError:
    return UserError(f"{path} is not UTF-8 text at byte {offset}; convert the file to UTF-8 or leave it out.")


READERS: dict[str, Callable[[Path, str], Documents]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "source": read_source,
    "topics": read_topics,
}
