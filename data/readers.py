"""How one file is read: a function per format, each a generator of documents.

Nothing here holds more than a block, a row or, in parquet, some rows. Text is never changed (no
newline translation, no stripping). Each error names the file or the row, and what to do.
"""

import gzip
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from data.sources import TextFile
from errors import UserError, reading

BLOCK = 1 << 17  # characters of a text file that are read at a time, and then up to the end of a line
ROWS = 256  # of parquet, decoded at a time

Document = Iterable[str]  # its text in blocks, not empty, to be read at most once


def read_documents(file: TextFile, skipped: list[str]) -> Iterator[Document]:
    """The documents of a file in order: the text of a text file, or that of each row.

    What is left out is appended to `skipped`: files of folders and patterns that are not UTF-8, rows without text.
    """
    path = file.fetch()
    match file.format:
        case "text":
            yield from read_text(path, file.optional, skipped)
        case "topics":
            from pydoc_data.topics import topics  # the language reference as `help()` shows it

            yield from ([topics[name]] for name in sorted(topics))
        case "jsonl":
            yield from read_rows(jsonl_rows(path, file.field), path, file.field, skipped)
        case "parquet":
            yield from read_rows(parquet_rows(path, file.field), path, file.field, skipped)


def read_text(path: Path, optional: bool, skipped: list[str]) -> Iterator[Document]:
    """One document, the whole file."""
    blocks = read_blocks(path)
    try:
        if first := next(blocks, ""):
            yield itertools.chain([first], blocks)
    except UserError as error:
        if not optional:
            raise
        skipped.append(str(error))


def read_blocks(path: Path) -> Iterator[str]:
    """A text file, block by block; only a line that is longer than a block is cut inside.

    Blocks are encoded one by one. With our own tokenizers, no id reaches beyond a line, so these are the ids of the
    document; with others the ids next to the end of a block may differ.
    """
    fix = "make it readable, convert it to UTF-8, or leave it out"
    with reading(path, fix), open(path, encoding="utf-8", newline="") as file:
        while block := file.read(BLOCK) + file.readline(BLOCK):
            yield block


def read_rows(rows: Iterator[tuple[int, object]], path: Path, field: str, skipped: list[str]) -> Iterator[Document]:
    """One document per row whose text is not empty; `rows` are their numbers and texts."""
    nulls = 0
    for number, text in rows:
        if text is None:
            nulls += 1
        elif not isinstance(text, str):
            kind = type(text).__name__
            raise UserError(f"{path}, row {number}: {field!r} is {kind}, not text; name another with --text-field.")
        elif text:
            yield [text]
    if nulls:
        skipped.append(f"{nulls:,} rows of {path} whose {field!r} is null")


def jsonl_rows(path: Path, field: str) -> Iterator[tuple[int, object]]:
    """The value of `field` in each line, a JSON object; blank lines are skipped."""
    open_file = gzip.open if path.name.lower().endswith(".gz") else open
    number = 0
    with reading(path), open_file(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            with reading(f"{path}, line {number}", "a .jsonl file holds one JSON object a line, in UTF-8"):
                row = json.loads(line)
                if field not in row:
                    raise no_field(f"{path}, line {number}", field, row)
                text = row[field]
                str(text).encode("utf-8")  # JSON can have half a surrogate pair as an escape
            yield number, text


def parquet_rows(path: Path, field: str) -> Iterator[tuple[int, object]]:
    """The value of the column `field` in each row."""
    from pyarrow import parquet

    number = 0
    # Without these two settings the whole column is read ahead into memory.
    with reading(path), parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK) as file:
        if field not in file.schema_arrow.names:
            raise no_field(str(path), field, file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=ROWS, columns=[field], use_threads=False):
            yield from enumerate(batch.column(0).to_pylist(), number + 1)
            number += len(batch)


def no_field(where: str, field: str, present: Iterable[str]) -> UserError:
    """The error for a row or file without the column that holds text."""
    names = ", ".join(list(present)[:8]) or "none"
    return UserError(f"{where} has no field {field!r}; name one with --text-field (there are: {names}).")
