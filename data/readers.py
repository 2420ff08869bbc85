"""How one file is read: a function per format, each a generator of documents.

Nothing here holds more than a block, a row or a small batch of rows, however large a document is. Each error names the
file, the row or byte, and what to do.
"""

import codecs
import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from errors import UserError

if TYPE_CHECKING:
    from pyarrow import Scalar
    from pyarrow.parquet import ColumnChunkMetaData, ParquetFile

BLOCK = 1 << 20  # bytes read at a time
MAX_ROW = 1 << 24  # bytes of a row: a small compressed file can hold a row that fills the memory
ROWS = 16  # parquet rows decoded at a time: few, because a row may be a whole book
MAX_BATCH = 1 << 25  # bytes of a batch of parquet rows that repeat one stored value
MAX_CHUNK, MAX_RATIO = 1 << 27, 1000  # parquet text of more bytes than this never compresses better than this
DICTIONARY_PAGE = b"\x15\x04\x15"  # how the header of one begins

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


def _integer(digits: str) -> float:
    """Python refuses integers of more than 4,300 digits; no field but the text is used, so any number will do."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def _json_text(path: Path, number: int, line: bytes, offset: int, field: str) -> str:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line.decode("utf-8"), parse_int=_integer, object_pairs_hook=JsonObject)
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
    """One document per row, the string in the column `field`; rows are decoded a few at a time.

    A page is decompressed whole, because pyarrow can do no other: about 1 MB in most files, at most `MAX_CHUNK` in a
    small one. The limits trust the sizes and encodings in the file's footer: one that lies can still take a few GB.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"reading {path} needs pyarrow: pip install pyarrow.") from error
    try:
        # Without these two settings the whole column is read ahead into memory.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK) as file:
            for number, value in enumerate(_parquet_values(path, file, field), 1):
                where = f"{path}, row {number}"
                try:
                    text = value.as_py()
                    if text is not None and len(text) > MAX_ROW:
                        raise _too_long(where)
                except UnicodeDecodeError as error:  # parquet says UTF-8, and not every writer checks
                    problem = f"{where}: {field!r} is not UTF-8 text at byte {error.start}"
                    raise UserError(f"{problem}; convert it to UTF-8 or leave the row out.") from error
                yield [_string(where, text, field, {field: text})]
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # UnicodeDecodeError: names of columns
        reason = str(error).split("\n")[0].rstrip(".")
        raise UserError(f"{path} is not a readable parquet file ({reason}); download or write it again.") from error


def _parquet_values(path: Path, file: "ParquetFile", field: str) -> Iterator["Scalar"]:
    column = _text_column(path, file, field)
    with open(path, "rb") as pages:
        for group in range(file.metadata.num_row_groups):
            chunk = file.metadata.row_group(group).column(column)
            rows = _batch_size(f"{path}, row group {group + 1}", pages, chunk)
            for batch in file.iter_batches(rows, row_groups=[group], columns=[field], use_threads=False):
                yield from batch.column(0)


def _text_column(path: Path, file: "ParquetFile", field: str) -> int:
    """The index of the column among those stored (a nested one is stored as several)."""
    from pyarrow import types

    schema, stored = file.schema_arrow, file.metadata.schema
    if field not in schema.names:
        raise _no_field(str(path), field, schema.names)
    leaves = [index for index in range(len(stored)) if stored.column(index).path == field]
    if schema.names.count(field) > 1 or len(leaves) > 1:
        raise UserError(f"{path} has more than one column {field!r}; write it again with one of them.")
    type = schema.field(field).type
    type = getattr(type, "storage_type", type)
    text = type.value_type if types.is_dictionary(type) else type
    if not (types.is_string(text) or types.is_large_string(text) or types.is_string_view(text)):
        raise UserError(f"{path}: the column {field!r} is {type}, not text; name another one with --text-field.")
    return leaves[0]


def _batch_size(where: str, pages: BinaryIO, chunk: "ColumnChunkMetaData") -> int:
    """How many rows of a column chunk may be decoded at a time, from the sizes that stand before the data."""
    size = chunk.total_uncompressed_size
    if size > max(1, chunk.num_values) * 4 * MAX_ROW:  # 4: headers of pages may repeat values as statistics
        raise _too_long(f"{where}: a row")
    if size > max(MAX_CHUNK, MAX_RATIO * chunk.total_compressed_size):
        packed = f"{chunk.total_compressed_size:,} bytes that unpack to {size >> 20:,} MiB"
        raise UserError(f"{where} is no text: {packed}; leave the file out, or write it in smaller row groups.")
    if ROWS * size <= MAX_BATCH:
        return ROWS
    pages.seek(max(0, min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)))
    repeated = _dictionary_size(pages.read(8))
    if repeated is None:
        if not chunk.has_dictionary_page and "DELTA_BYTE_ARRAY" not in chunk.encodings:
            return ROWS
        repeated = size
    return min(ROWS, max(1, MAX_BATCH // max(1, repeated)))


def _dictionary_size(header: bytes) -> int | None:
    """Uncompressed bytes of a dictionary page, from the start of its header; None for another page.

    The header is in Thrift's compact protocol: tag and type of the page, then tag and size, 7 bits a byte.
    """
    if header[:3] != DICTIONARY_PAGE:
        return None
    size = 0
    for place, byte in enumerate(header[3:8]):
        size |= (byte & 127) << 7 * place
        if byte < 128:  # the last one
            break
    return size >> 1  # the lowest bit is the sign


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
