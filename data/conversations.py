"""Conversations as rows of ids, of which the model learns what the assistant says, kept on disk between runs.

    ids        <s> <|user|> 2 + 2 ? <|end|> <|assistant|> 4 <|end|> <s> <|user|> Bye <|end|> <|assistant|> Hi <|end|>
    learned     .     .     . . . .    .          .       +    +     .     .      .     .          .       +     +
    documents   1     1     1 1 1 1    1          1       1    1     2     2      2     2          2       2     2

A row has T + 1 ids of complete conversations. CACHE/conversations/KEY.npy holds all rows, KEY.json what is known.
"""

import bisect
import contextlib
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from data.batches import IGNORED, Batch, draw
from data.chat import ChatFormat, Message, plain_messages
from data.readers import MESSAGES, decode, read_rows
from data.sources import TextFile
from data.split import VALIDATION, Split, split_documents
from data.tokenizer import Tokenizer
from data.units import DOCUMENT, content_hash, digest
from errors import UserError, reading
from files import replace_text, replacing

VERSION = 4  # version of the files; raised when the same conversations and tokenizer would give other rows
Encoded = tuple[list[Message], np.ndarray, np.ndarray]  # a conversation, its ids and which of them are learned


@dataclass(frozen=True)
class Conversations:
    """Conversations that can be trained on: what `corpus.Corpus` is for a text."""

    description: str  # two lines to print
    text_hash: str  # hash of the messages, in order
    question: list[Message]  # a conversation for validation, up to its first answer
    chat: ChatFormat
    tokenizer: Tokenizer
    train: np.ndarray  # (3, rows, T + 1): ids; whether they are learned; their conversations in the row, 0: padding
    validation: np.ndarray
    validation_bytes = None  # bits per byte would count what is not learned

    def batch(self, seed: int, first: int, size: int, **_: int) -> Batch:
        """The rows from `first` on. An epoch takes every row once, in an order given by (seed, epoch)."""
        drawn = draw(self.train.shape[1], seed, first, size)
        return batch_of(self.train[:, np.concatenate([numbers for numbers, _ in drawn]).astype(np.int64)])

    def validation_batches(self, _: int, batch_size: int) -> Iterator[Batch]:
        for start in range(0, self.validation.shape[1], batch_size):
            yield batch_of(self.validation[:, start : start + batch_size])

    def show_row(self) -> str:
        """The first row to train on, as text; `+` marks the lines that are learned."""
        ids, learned, documents = self.train[:, 0]
        lines = []
        for (number, is_learned), run in itertools.groupby(range(len(ids)), lambda i: (documents[i], learned[i])):
            if number > 0:
                text = self.tokenizer.decode(ids[list(run)], special=True)
                lines += [("+ " if is_learned else "  ") + line for line in text.split("\n")]
        return "\n".join(lines)


def batch_of(rows: np.ndarray) -> Batch:
    """Inputs, targets and documents, int64; targets that are not learned are `IGNORED`."""
    ids, learned, documents = rows.astype(np.int64)
    return ids[:, :-1], np.where(learned, ids, IGNORED)[:, 1:], documents[:, :-1]


def find_conversations(files: Sequence[TextFile]) -> str | None:
    """The file of the first readable row, if that has messages and no text."""
    for file in files:
        for _, row in read_rows(file):
            with contextlib.suppress(ValueError, RecursionError):
                row = decode(row)
                found = row.get(file.field) is None and any(key in row for key in MESSAGES)
                return file.name if found else None
    return None


def prepare_conversations(
    files: Sequence[TextFile], tokenizer: Tokenizer, sequence_length: int, cache_dir: Path, split: Split
) -> Conversations:
    """Rows of `sequence_length` + 1 ids, packed unless the cache has them."""
    tokenizer = tokenizer.for_conversations()
    chat, size = ChatFormat(tokenizer), sequence_length + 1
    key = digest(VERSION, [*files], tokenizer.hash, tokenizer.chat_template, size, split)
    facts = cache_dir / "conversations" / f"{key}.json"  # the last file that is written
    facts.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(facts.with_suffix(".lock")):
        if not (facts.is_file() and facts.with_suffix(".npy").is_file()):
            write_rows(facts, encode_conversations(files, chat, size), size, tokenizer, split)
    with reading(facts.with_suffix(""), f"delete {facts.parent}, which is made anew"):
        known = json.loads(facts.read_bytes())
        rows, count = np.load(facts.with_suffix(".npy"), mmap_mode="r"), known.pop("train_rows")
        train, validation = rows[:, :count], rows[:, count:]
    return Conversations(**known, chat=chat, tokenizer=tokenizer, train=train, validation=validation)


def write_rows(facts: Path, found: dict[int, Encoded], size: int, tokenizer: Tokenizer, split: Split) -> None:
    """Divide and pack conversations, and write them with what is known of them."""
    if len(found) < 2:
        raise UserError(f"{len(found)} different conversations are too few to learn from; give more.")
    table = np.array([(hash, len(ids), len(ids)) for hash, (_, ids, _) in found.items()], DOCUMENT)
    is_held_out = split_documents(table, split) == VALIDATION
    if not is_held_out.any():
        is_held_out[-1] = True
    train = [one for one, held_out in zip(found.values(), is_held_out, strict=True) if not held_out]
    validation = [one for one, held_out in zip(found.values(), is_held_out, strict=True) if held_out]
    arrays, texts = [], []
    for part in (train, validation):
        rows = pack(part, size, tokenizer.dtype)
        texts.append(f"{len(part):,} conversations, {rows[1].sum():,} tokens to learn in {rows.shape[1]:,} rows")
        arrays.append(rows)
    with replacing(facts.with_suffix(".npy")) as file:
        np.save(file, np.concatenate(arrays, 1))
    text_hash = digest(*found)
    asked = itertools.takewhile(lambda message: message["role"] != "assistant", validation[0][0])
    description = f"{texts[0]}, hash {text_hash[:12]}\n  for validation {texts[1]}"
    question = list(asked) or [{"role": "user", "content": "Hello."}]
    values = dict(description=description, text_hash=text_hash, question=question, train_rows=arrays[0].shape[1])
    replace_text(facts, json.dumps(values))


def encode_conversations(files: Sequence[TextFile], chat: ChatFormat, size: int) -> dict[int, Encoded]:
    """The conversations of all files that can be learned from, by their hash; what is unusual is printed, counted."""
    found: dict[int, Encoded] = {}
    notes = defaultdict(list)  # what is unusual -> where
    for file in files:
        if file.format in ("text", "topics"):
            notes["files left out: they are text, not rows"].append(file.name)
    rows = itertools.chain.from_iterable(map(read_rows, files))
    for place, row in tqdm(rows, "conversations", delay=2, unit="", disable=None):
        try:
            messages, unused = messages_of(decode(row))
            unused |= chat.find_left_out(messages, answer_follows=False)
            ids, learned, unknown = chat.encode_learned(messages)
        except Exception as error:  # whatever a row of another shape, or the template for it, raises
            unfit = "rows skipped: each must be one object, with messages that the template supports"
            notes[unfit].append(f"{place}: {error!s:.200}")
            continue
        if unused:
            notes[f"rows in which nothing uses these keys: {', '.join(sorted(unused))}"].append(place)
        for number in unknown:
            later = "answers not learned: the template changes them when the conversation continues"
            notes[later].append(f"{place}, message {number}")
        last = learned & ~np.append(learned[1:], False)  # the last token of each answer
        if (last[:-1] & (ids[1:] == chat.end_of_turn)).any():
            notes["conversations whose end-of-turn token is not learned: {% generation %} leaves it out"].append(place)
        length = len(ids)
        if length > size:
            notes["conversations cut after the last answer that fits into --sequence-length"].append(place)
            length = max(np.flatnonzero(last[:size]), default=-1) + 1
        if learned[1:length].any():  # the first of equal conversations is kept
            found.setdefault(content_hash(json.dumps(messages)), (messages, ids[:length], learned[:length]))
        else:
            notes["conversations dropped: no answer is left to learn"].append(place)
    for text, places in notes.items():
        print(f"{len(places):,} {text} (the first: {places[0]})", file=sys.stderr)
    return found


def messages_of(row: dict) -> tuple[list[Message], set[str]]:
    """The messages of a row, and the keys that are not used; `UserError` if they are not messages."""
    name = MESSAGES[0] if row.get(MESSAGES[0]) else MESSAGES[1]
    messages, used = plain_messages(row.get(name)), {name, "from", "value"}
    if row.get("system") and messages[0]["role"] != "system":
        messages = plain_messages([{"role": "system", "content": row["system"]}, *messages])
        used.add("system")
    given = {key for one in (row, *row[name]) for key in one if one[key] not in (None, "", [], {})}
    return messages, given - used.union(*messages)


def pack(conversations: Sequence[Encoded], size: int, dtype: np.dtype) -> np.ndarray:
    """All conversations in rows (see `Conversations.train`): the longest first, each where the least room is left."""
    rows: list[np.ndarray] = []  # each (3, size)
    free: list[tuple[int, int]] = []  # sorted: the room in a row, and its number
    for _, ids, learned in sorted(conversations, key=lambda one: -len(one[1])):
        place = bisect.bisect_left(free, (len(ids), 0))
        if place == len(free):
            free.append((size, len(rows)))
            rows.append(np.zeros((3, size), dtype))
        room, number = free.pop(place)
        start, row = size - room, rows[number]
        row[:, start : start + len(ids)] = ids, learned, np.full(len(ids), row[2].max() + 1)
        row[1, start] = False  # no token of its conversation comes before it
        bisect.insort(free, (room - len(ids), number))
    return np.stack(rows, 1)
