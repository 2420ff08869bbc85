"""Conversations as rows of ids, of which the model learns what the assistant says, kept on disk between runs.

    ids        <s> <|user|> 2 + 2 ? <|end|> <|assistant|> 4 <|end|>   <s> <|user|> Bye <|end|> <|assistant|> ...
    learned                                               ^ ^^^^^^^
    documents    1        1 1 1 1 1       1             1 1       1     2        2   2       2             2

A row has T + 1 ids of complete conversations, packed where they fit best, and attention sees one conversation alone.
CACHE/conversations/KEY.npz holds all rows.
"""

import bisect
import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data.batches import IGNORE, Batch, permute
from data.chat import BREAK, ChatFormat, Message, learned_tokens
from data.python_chat import questions_and_answers
from data.readers import read_lines, read_table
from data.sources import TextFile
from data.split import DUPLICATE, TRAIN, VALIDATION, Split, split_documents
from data.tokenizer import Tokenizer
from data.units import DOCUMENT, WAIT, content_hash, digest
from errors import UserError, locked, replacing

VERSION = 1  # of the files; raised when the same conversations and tokenizer would give other rows
KEYS = ("messages", "conversations")  # of a row, for its messages
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's
FORMATS = ("jsonl", "parquet", "python-chat")
PARTS = ("train", "validation")
BATCH = 1000  # conversations that are encoded together

NOTES = {  # what is printed with a count and the first place
    "text": "files left out, because they are text and not rows",
    "malformed": "rows skipped, because they are no conversations",
    "silent": "rows skipped, because the assistant says nothing in them",
    "unknown": "answers not learned, because the template writes them otherwise where the conversation continues",
    "endless": "conversations whose end-of-turn token is not learned, because {% generation %} leaves it out",
    "shortened": "conversations shortened to the answers that fit into --sequence-length",
    "long": "conversations dropped, because not even one answer fits into --sequence-length",
}


class Rows(NamedTuple):
    """Packed conversations, arrays of one shape (rows, T + 1)."""

    ids: np.ndarray
    learned: np.ndarray  # bool
    documents: np.ndarray  # uint16, the number of an id's conversation in its row, 0 for padding

    def batch(self, rows: np.ndarray) -> Batch:
        """Inputs, targets and documents of some rows, int64; targets that are not learned are `IGNORE`."""
        ids, learned, documents = (array[rows] for array in self)
        targets = np.where(learned, ids.astype(np.int64), IGNORE)
        return ids[:, :-1].astype(np.int64), targets[:, 1:], documents[:, :-1].astype(np.int64)


@dataclass(frozen=True)
class Conversations:
    """Conversations that can be trained on: what `corpus.Corpus` is for a text."""

    text_hash: str  # of the messages, in order
    conversations: int  # without duplicates
    duplicates: int  # conversations equal to an earlier one, dropped
    validation_conversations: int
    question: list[Message]  # the first of them up to an answer
    chat: ChatFormat
    train: Rows
    validation: Rows

    validation_bytes = None  # a loss per byte would count what is not learned

    @property
    def tokenizer(self) -> Tokenizer:
        return self.chat.tokenizer

    @property
    def description(self) -> str:
        """Three lines to print."""
        rows, size = self.train.ids.shape
        return (
            f"{self.conversations:,} conversations ({self.duplicates:,} duplicates dropped), hash {self.text_hash[:12]}\n"
            f"  {self.train.learned.sum():,} tokens of answers to learn, in {rows:,} rows of {size - 1} tokens "
            f"({(self.train.documents > 0).mean():.1%} full)\n"
            f"  {self.validation.learned.sum():,} for validation ({self.validation_conversations:,} conversations)"
        )

    def batch(
        self, *, seed: int, step: int, batch_size: int, sequence_length: int, rank: int = 0, world_size: int = 1
    ) -> Batch:
        """This process's share of a step: an epoch takes every row once, in a random order given by seed and epoch."""
        assert sequence_length == self.train.ids.shape[1] - 1
        count, share = len(self.train.ids), batch_size // world_size
        first = step * batch_size + rank * share
        rows = []
        for epoch, group in itertools.groupby(range(first, first + share), lambda index: index // count):
            keys = np.random.SeedSequence([seed, epoch]).generate_state(4, np.uint64)
            rows.append(permute(np.array([*group]) % count, count, keys))
        return self.train.batch(np.concatenate(rows).astype(np.int64))

    def validation_batches(self, sequence_length: int, batch_size: int, rows: Rows | None = None) -> Iterator[Batch]:
        """All held-out rows, or others; all batches have one shape, and nothing is predicted in rows that fill it."""
        rows = rows or self.validation
        for start in range(0, len(rows.ids), batch_size):
            numbers = np.arange(start, start + batch_size)
            inputs, targets, documents = rows.batch(numbers % len(rows.ids))
            targets[numbers >= len(rows.ids)] = IGNORE
            yield inputs, targets, documents

    def show_row(self) -> str:
        """The first row to train on, as text; `+` marks the lines that are learned."""
        ids, learned, documents = (array[0] for array in self.train)
        runs = itertools.groupby(range(len(ids)), key=lambda i: (documents[i], "+ " if learned[i] else "  "))
        texts = [(mark, self.tokenizer.decode(ids[[*run]], special=True)) for (number, mark), run in runs if number]
        return "\n".join(mark + text.replace("\n", f"\n{mark}") for mark, text in texts)


def has_conversations(files: Sequence[TextFile]) -> bool:
    """Whether the first row of the files has messages, and not the field of a text."""
    first = next((file for file in files if file.format in FORMATS), None)
    if first is None or first.format == "python-chat":
        return first is not None
    _, row = next(read_rows(first), ("", {}))
    try:
        row = json.loads(row) if isinstance(row, bytes) else row
    except ValueError:
        return False
    return isinstance(row, dict) and first.field not in row and any(key in row for key in KEYS)


def read_rows(file: TextFile) -> Iterator[tuple[str, bytes | dict]]:
    """The rows of a file, in jsonl not yet decoded, each with its place for messages."""
    path = file.fetch()
    if file.format == "jsonl":
        rows = read_lines(path)
    elif file.format == "parquet":
        rows = enumerate(read_table(path, [*KEYS, file.field]), 1)
    else:
        rows = enumerate(questions_and_answers(path), 1)
    yield from ((f"{path}, row {number}", row) for number, row in rows)


def prepare_conversations(
    files: Sequence[TextFile], tokenizer: Tokenizer, sequence_length: int, cache_dir: Path, split: Split
) -> Conversations:
    """Rows of `sequence_length` + 1 ids, made and written unless the cache has them."""
    tokenizer = tokenizer.for_conversations()
    chat = ChatFormat(tokenizer.folder, tokenizer)
    key = digest(VERSION, [*files], tokenizer.hash, tokenizer.chat_template, sequence_length, split)
    path = cache_dir / "conversations" / f"{key}.npz"
    if not path.is_file():
        with locked(cache_dir, wait=WAIT):
            path.parent.mkdir(exist_ok=True)
            arrays = pack_conversations(files, chat, sequence_length + 1, split)
            with replacing(path) as file:
                np.savez(file, **arrays)
    with np.load(path) as arrays:
        train, validation = (Rows(*(arrays[f"{part}_{name}"] for name in Rows._fields)) for part in PARTS)
        return Conversations(chat=chat, train=train, validation=validation, **json.loads(str(arrays["facts"])))


def pack_conversations(files: Sequence[TextFile], chat: ChatFormat, size: int, split: Split) -> dict[str, object]:
    """What `prepare_conversations` writes; prints a line for each of `NOTES`."""
    notes: dict[str, list] = {}
    found = [*encode_conversations(files, chat, size, notes)]
    for kind, (count, place) in notes.items():
        print(f"{count:,} {NOTES[kind]} (the first: {place})", file=sys.stderr)
    table = np.array(
        [(content_hash(json.dumps(one.messages)), one.characters, len(one.ids)) for one in found], DOCUMENT
    )
    kinds = split_documents(table, np.zeros(len(table), np.int64), split)
    if not (kinds == VALIDATION).any():
        kinds[np.flatnonzero(kinds == TRAIN)[-1:]] = VALIDATION
    if not (kinds == TRAIN).any():
        raise UserError(f"{len(found)} conversations are too few to learn from; give two or more that differ.")
    parts = [
        [one for one, is_part in zip(found, kinds == kind, strict=True) if is_part] for kind in (TRAIN, VALIDATION)
    ]
    first = parts[1][0].messages
    answer = next(i for i, message in enumerate(first) if message["role"] == "assistant")
    facts = dict(
        text_hash=hashlib.blake2b(table["hash"][kinds != DUPLICATE].tobytes(), digest_size=16).hexdigest(),
        conversations=len(parts[0]) + len(parts[1]),
        duplicates=int((kinds == DUPLICATE).sum()),
        validation_conversations=len(parts[1]),
        question=first[:answer],
    )
    arrays = {
        f"{name}_{field}": array
        for name, part in zip(PARTS, parts, strict=True)
        for field, array in pack(part, size, chat.tokenizer.dtype)._asdict().items()
    }
    return {"facts": json.dumps(facts), **arrays}


class Encoded(NamedTuple):
    """A conversation that fits into a row."""

    messages: list[Message]
    characters: int
    ids: np.ndarray
    learned: np.ndarray  # bool


def encode_conversations(
    files: Sequence[TextFile], chat: ChatFormat, size: int, notes: dict[str, list]
) -> Iterator[Encoded]:
    """The conversations of all files that can be learned from; what is unusual goes to `notes`."""

    def note(kind: str, place: str) -> None:
        notes.setdefault(kind, [0, place])[0] += 1

    def render(rows: Iterable[tuple[str, bytes | dict]]) -> Iterator[tuple[str, list[Message], str, list]]:
        for place, row in rows:
            try:
                messages = messages_of(row)
                if all(message["role"] != "assistant" for message in messages):
                    note("silent", place)
                    continue
                text, spans, unknown = chat.render_learned(messages)
            except Exception as error:  # whatever a row of another shape, or the template for it, raises
                note("malformed", f"{place}: {error!r:.200}")
                continue
            for number in unknown:
                note("unknown", f"{place}, message {number}")
            yield place, messages, text, spans

    for file in files:
        if file.format not in FORMATS:
            note("text", file.name)
    rows = itertools.chain.from_iterable(read_rows(file) for file in files if file.format in FORMATS)
    rendered = render(tqdm(rows, "conversations", delay=2, unit=""))
    while batch := [*itertools.islice(rendered, BATCH)]:
        encodings = chat.tokenizer.encode_special_batch([text for _, _, text, _ in batch], BREAK)
        for (place, messages, text, spans), encoding in zip(batch, encodings, strict=True):
            ids, learned = np.array(encoding.ids, chat.tokenizer.dtype), learned_tokens(encoding, spans)
            last = learned & ~np.append(learned[1:], False)  # the last token of each answer
            if (last[:-1] & (ids[1:] == (chat.end_of_turn or -1))).any():
                note("endless", place)
            if len(ids) > size:
                ends = np.flatnonzero(last[:size]) + 1
                note("shortened" if len(ends) else "long", place)
                ids, learned = (array[: max(ends, default=0)] for array in (ids, learned))
            if learned[1:].any():
                yield Encoded(messages, len(text), ids, learned)


def messages_of(row: bytes | dict) -> list[Message]:
    """The messages of a row as dictionaries of role and content; raises anything if they are not that."""
    row = json.loads(row) if isinstance(row, bytes) else row
    messages = []
    for one in row["messages"] if "messages" in row else row["conversations"]:
        role, content = (one["role"], one["content"]) if "role" in one else (one["from"], one["value"])
        if not isinstance(content, str) or one.get("tool_calls"):
            raise ValueError("a message is not plain text")
        content.encode("utf-8")  # JSON can have half a surrogate pair as an escape
        messages.append({"role": ROLES.get(role, role), "content": content})
    return messages


def pack(conversations: Sequence[Encoded], size: int, dtype: np.dtype) -> Rows:
    """All conversations in rows, each complete and once."""
    places = best_fit([len(one.ids) for one in conversations], size)
    rows = Rows(*(np.zeros((len(places), size), kind) for kind in (dtype, bool, np.uint16)))
    for row, numbers in enumerate(places):
        start = 0
        for document, one in enumerate((conversations[number] for number in numbers), 1):
            here = row, slice(start, start + len(one.ids))
            rows.ids[here], rows.learned[here], rows.documents[here] = one.ids, one.learned, document
            rows.learned[row, start] = False  # nothing comes before it that could predict it
            start += len(one.ids)
    return rows


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Which of the given lengths share a row of `size`: the longest first, each where the least room is left over."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # sorted: the room in a row, and its number
    shortest = min(lengths)
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        place = bisect.bisect_left(rooms, (lengths[number], 0))
        if place == len(rooms):
            rooms.append((size, len(rows)))
            rows.append([])
        room, row = rooms.pop(place)
        rows[row].append(number)
        if room - lengths[number] >= shortest:
            bisect.insort(rooms, (room - lengths[number], row))
    return rows
