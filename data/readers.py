"""How one file is read: a generator for each format, which holds no more than a block of text or some rows."""

import codecs
import functools
import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path

from data.chat import plain_messages
from data.python_chat import questions_and_answers
from data.sources import TextFile
from errors import UserError, note, reading
from files import parse_object

BLOCK = 1 << 17  # characters of a text file that are read at a time, and then up to the end of a line
ROWS = 256  # rows of parquet that are decoded at a time
MESSAGES = ("messages", "conversations")  # fields of a row that is a conversation
ROW = "a row is an object with a text (--text-field names its key) or, with --init-from, with messages or conversations"
TO_UTF8 = "convert it to UTF-8, or leave it out (Chinese: iconv -f GBK -t UTF-8 OLD > NEW)"

Document = Iterable[str]  # its text in blocks, to be read at most once


def read_documents(file: TextFile) -> Iterator[Document]:
    """The documents of a file in order, one for each row; none of a text file that is left out or empty."""
    if why_left_out(file):
        note(f"skipped: {why_left_out(file)}")
    elif file.format == "text" and file.size:
        yield read_blocks(file.fetch())
    if file.format == "topics":  # the language reference as `help()` shows it
        from pydoc_data.topics import topics

        for name in sorted(topics):
            yield [topics[name]]
    for place, row in read_rows(file):
        try:
            with reading(place, ROW):
                text = text_of(parse_object(row), file.field)
        except UserError:
            if file.field not in MESSAGES:
                raise
            text = ""  # left out and counted, as where conversations are learned
        yield [text] if text else []


@functools.cache
def why_left_out(file: TextFile) -> str:
    """Why a text file of a folder or pattern is left out; empty if it is not."""
    if file.format == "text" and file.optional:
        try:
            for _ in read_blocks(file.fetch()):  # to its end, as a document that has begun cannot be left out
                pass
        except UserError as error:
            if not isinstance(error.__cause__, UnicodeError):
                raise
            return str(error)
    return ""


def read_blocks(path: Path) -> Iterator[str]:
    """A text file in blocks of complete lines, beyond which no id of our tokenizers reaches; longer lines are cut."""
    with reading(path, TO_UTF8), open(path, "rb") as file:
        encoding = "utf-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    with reading(path, TO_UTF8), open(path, encoding=encoding) as file:  # line ends as in `unix_lines`
        while block := file.read(BLOCK) + file.readline(BLOCK):
            yield block


def read_rows(file: TextFile) -> Iterator[tuple[str, bytes | dict]]:
    """The rows of a file, to pass to `parse_object`, each with its place for error messages. A text file has none."""
    if file.format in ROW_FORMATS:
        path = file.fetch()
        for row_number, row in enumerate(ROW_FORMATS[file.format](path, file.field), 1):
            if row:
                yield f"{path}, row {row_number}", row


def read_lines(path: Path, _: str) -> Iterator[bytes]:
    """The lines of a jsonl file, not decoded, because the reader of conversations skips bad ones."""
    open_file = gzip.open if path.suffix.lower() == ".gz" else open
    with reading(path), open_file(path, "rb") as lines:
        yield from (line.strip() for line in lines)


def read_parquet(path: Path, field: str) -> Iterator[dict]:
    """The rows of a parquet file. Only the columns of text and of conversations are read; the others are True."""
    from pyarrow import parquet

    # Without these two settings the whole column is read ahead into memory.
    with reading(path, ROW), parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK) as file:
        names = file.schema_arrow.names
        columns = [name for name in (field, *MESSAGES, "system") if name in names]
        for batch in file.iter_batches(batch_size=ROWS, columns=columns, use_threads=False):
            yield from (dict.fromkeys(names, True) | row for row in batch.to_pylist())


ROW_FORMATS = {"jsonl": read_lines, "parquet": read_parquet, "python-chat": lambda path, _: questions_and_answers(path)}


def text_of(row: dict, field: str) -> str:
    if field in MESSAGES and field not in row:  # a text among conversations
        field = "text"
    if field not in row:
        raise ValueError(f"no field {field!r} among {', '.join(row)}")
    text = "" if row[field] is None else row[field]
    if field in MESSAGES and isinstance(text, list):
        text = "\n".join(message["content"] for message in plain_messages(text))
    if not isinstance(text, str):
        raise ValueError(f"{field!r} is {type(text).__name__}, not text")
    text.encode("utf-8")  # JSON can have half a surrogate pair as an escape
    return unix_lines(text)


def unix_lines(text: str) -> str:
    """The text with \\n for line ends of other systems, as standard input has it."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
