"""Conversations as rows of ids, of which the model learns what the assistant says, kept on disk between runs.

    ids        <s> <|user|> 2 + 2 ? <|end|> <|assistant|> 4 <|end|> <s> <|user|> Bye <|end|> <|assistant|> Hi <|end|>
    learned     .     .     . . . .    .          .       +    +     .     .      .     .          .       +     +
    documents   1     1     1 1 1 1    1          1       1    1     2     2      2     2          2       2     2

A row has T + 1 ids of complete conversations. CACHE/conversations/KEY.npz holds all rows and what describes them.
"""

import bisect
import contextlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from data.batches import IGNORED, Batch, windows_by_epoch
from data.chat import ChatFormat, Message, add_chat_template, plain_messages
from data.readers import MESSAGES, ROW_FORMATS, read_rows, unix_lines
from data.settings import DataSettings
from data.sources import TextFile
from data.split import VALIDATION, content_hash, split_documents
from data.tokenizer import Tokenizer
from errors import UserError, counted, note, reading
from files import digest, parse_object, replacing

SHOWN_LINES = 20
VERSION = 11  # raised when the same conversations and tokenizer would give other rows or remarks


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    ids: np.ndarray
    learned: np.ndarray  # bool: which ids the model learns


@dataclass(frozen=True)
class Conversations:
    """Conversations that can be trained on: what `corpus.Corpus` is for a text, with the same methods."""

    chat: ChatFormat
    tokenizer: Tokenizer
    description: str  # three lines to print, the first of all
    text_hash: str  # hash of the messages, in order
    prompts: list[str]  # for samples: the first question of a conversation for validation
    train: np.ndarray  # (3, rows, T + 1): ids; whether they are learned; their conversations in the row, 0: padding
    validation: np.ndarray
    validation_bytes: None = None  # no bits per byte, which would count what is not learned
    everything_bytes: None = None
    advice: tuple = ()

    def count_sequences(self, settings: DataSettings) -> int:
        """The rows of an epoch; `UserError` for a schedule that would cut them."""
        if settings.first_sequence_length not in (None, settings.sequence_length):
            fix = "use --first-sequence-length None"
            raise UserError(f"--first-sequence-length would cut conversations into parts; {fix}.")
        return self.train.shape[1]

    def batch(self, *, seed: int, first: int, size: int, sequence_length: int) -> Batch:
        """The rows from `first` on, whose length is fixed. An epoch takes each once, in an order of (seed, epoch)."""
        epochs = windows_by_epoch(self.train.shape[1], seed, first, size)
        return batch_of(self.train[:, np.concatenate([rows for rows, _ in epochs]).astype(np.int64)])

    def validation_batches(self, sequence_length: int, batch_size: int) -> Iterator[Batch]:
        return row_batches(self.validation, batch_size)

    def all_batches(self, sequence_length: int, batch_size: int) -> Iterator[Batch]:
        return row_batches(np.concatenate([self.train, self.validation], 1), batch_size)

    def show_row(self) -> str:
        """The beginning of the first row to train on, as text; `+` marks the lines that are learned."""
        ids, learned, documents = self.train[:, 0]
        lines = []
        for (document, is_learned), span in itertools.groupby(range(len(ids)), lambda i: (documents[i], learned[i])):
            if document > 0:
                text = self.tokenizer.decode(ids[[*span]], special=True)
                lines += [("+ " if is_learned else "  ") + line for line in text.split("\n")]
        return "\n".join(lines[:SHOWN_LINES])


def row_batches(rows: np.ndarray, batch_size: int) -> Iterator[Batch]:
    return (batch_of(rows[:, start : start + batch_size]) for start in range(0, rows.shape[1], batch_size))


def batch_of(rows: np.ndarray) -> Batch:
    """Rows, see `Conversations.train`, as inputs and targets; those that are not learned are `IGNORED`."""
    ids, learned, documents = rows.astype(np.int64)
    return Batch(ids[:, :-1].copy(), np.where(learned, ids, IGNORED)[:, 1:].copy(), documents[:, :-1].copy())


def find_conversations(files: Sequence[TextFile]) -> str | None:
    """The file (or python-chat) whose first readable row has messages and no text; None if it has a text."""
    for file in files:
        for _, row in read_rows(file):
            with contextlib.suppress(ValueError, RecursionError):
                row = parse_object(row)
                is_conversation = row.get(file.field) is None and any(key in row for key in MESSAGES)
                name = file.format if file.format == "python-chat" else file.name
                return name if is_conversation else None
    return None


def prepare_conversations(
    files: Sequence[TextFile], settings: DataSettings, tokenizer: Tokenizer, vocab_size: int
) -> Conversations:
    """Rows of --sequence-length + 1 ids, packed unless the cache has them."""
    tokenizer = add_chat_template(tokenizer)
    chat = ChatFormat(tokenizer)
    row_length = settings.sequence_length + 1
    split = (settings.validation_fraction, settings.validation_salt)
    folder = Path(settings.cache, "conversations")
    path = folder / f"{digest(VERSION, [*files], tokenizer.hash, tokenizer.chat_template, row_length, split)}.npz"
    with FileLock(path.with_suffix(".lock")):
        if not path.is_file():
            conversations, remarks = encode_conversations(files, chat, row_length)
            for remark in remarks:  # before packing, which may fail: they say why
                note(remark)
            fields = pack_split(conversations, settings, tokenizer.dtype)
            with replacing(path) as file:
                np.savez(file, remarks=remarks, **fields)
    with reading(path, f"delete {folder}, which is made again"), np.load(path) as stored:
        train, validation = stored["train"], stored["validation"]
        description, text_hash, question = (str(stored[name]) for name in ("description", "text_hash", "question"))
        for remark in stored["remarks"].tolist():
            note(remark)
    if max(train[0].max(), validation[0].max()) >= vocab_size:
        raise UserError("the chat template writes tokens that the model has no embeddings of; give another one.")
    return Conversations(chat, tokenizer, description, text_hash, [question], train, validation)


def pack_split(conversations: dict[int, Conversation], settings: DataSettings, dtype: np.dtype) -> dict[str, object]:
    """What is stored: conversations, by their hash, in rows for training and validation, and what describes them."""
    if len(conversations) < 2:
        few = counted(len(conversations), "different conversation")
        raise UserError(f"the files have {few}, too few to learn from; give more.")
    lengths = np.array([len(conversation.ids) for conversation in conversations.values()])
    is_held_out = split_documents(np.array([*conversations], np.uint64), lengths, settings) == VALIDATION
    if not is_held_out.any():
        is_held_out[-1] = True
    held_out = [*itertools.compress(conversations.values(), is_held_out)]
    parts = {"train": [*itertools.compress(conversations.values(), ~is_held_out)], "validation": held_out}
    rows, sizes = {}, []
    for name, chosen in parts.items():
        rows[name] = pack(chosen, settings.sequence_length + 1, dtype)
        learned = f"{rows[name][1].sum():,} tokens to learn in {counted(rows[name].shape[1], 'row')}"
        sizes.append(f"{counted(len(chosen), 'conversation')}, {learned}")
    all_of_them = f"{counted(len(conversations), 'conversation')}, hash"
    questions = [message["content"] for message in held_out[0].messages if message["role"] == "user"] or ["Hello."]
    text_hash = digest(*conversations)
    description = f"{all_of_them} {text_hash[:12]}\n  to train on {sizes[0]}\n  for validation {sizes[1]}"
    return rows | {"text_hash": text_hash, "description": description, "question": questions[0]}


def encode_conversations(
    files: Sequence[TextFile], chat: ChatFormat, row_length: int
) -> tuple[dict[int, Conversation], list[str]]:
    """The conversations of all files that can be learned from, by their hash; and what is unusual, counted."""
    conversations: dict[int, Conversation] = {}
    places = defaultdict(list)  # the files or rows that each remark is about
    spelled = Counter()  # characters without a token, and in how many conversations they are
    for file in files:
        if file.format not in ROW_FORMATS:
            places["files left out, as they are text and not rows"].append(file.name)
    rows = itertools.chain.from_iterable(map(read_rows, files))
    for place, row in tqdm(rows, "conversations", delay=2, unit="", disable=None):
        try:
            conversation, remarks = encode_conversation(parse_object(row), chat, row_length)
        except (UserError, ValueError, RecursionError) as error:  # no row of this shape, or none for this template
            skipped = "rows skipped, as each must be one object with messages that the template supports"
            places[skipped].append(f"{place}: {error!s:.200}")
            continue
        for remark in remarks:
            places[remark].append(place)
        if conversation is None:
            continue
        spelled.update(filter(chat.tokenizer.spells, {*json.dumps(conversation.messages, ensure_ascii=False)}))
        key = content_hash(json.dumps(conversation.messages))
        if key in conversations:
            places["duplicates dropped"].append(place)
        else:
            conversations[key] = conversation
    remarks = [f"{remark}: {len(rows):,} (the first: {rows[0]})" for remark, rows in places.items()]
    if spelled:
        some = "".join(character for character, _ in spelled.most_common(10))
        fix = "train a new base model on text that has them, such as these (--text-field messages or conversations)"
        remarks.append(f"{counted(len(spelled), 'character')} without a token, spelled in bytes ({some}); {fix}")
    return conversations, remarks


def encode_conversation(row: dict, chat: ChatFormat, row_length: int) -> tuple[Conversation | None, list[str]]:
    """A conversation, cut after an answer to at most `row_length` ids, None without an answer; and what is unusual."""
    messages, unused = messages_of(row)
    unused |= chat.hidden_keys(messages, answer_follows=False)
    ids, learned, not_found = chat.encode_learned(messages)
    remarks = []
    if unused:
        remarks.append(f"rows in which nothing uses the keys {', '.join(sorted(unused))}")
    if not_found:
        remarks.append("rows with answers not learned, as the template changes them when the conversation continues")
    ends_answer = learned & ~np.append(learned[1:], False)
    if (ends_answer[:-1] & (ids[1:] == chat.end_of_turn)).any():
        remarks.append("conversations whose end-of-turn token is not learned, as {% generation %} leaves it out")
    length = len(ids)
    if length > row_length:
        length = max(np.flatnonzero(ends_answer[:row_length]), default=-1) + 1
    if not learned[1:].any():
        return None, [*remarks, "conversations dropped, as they have no answer to learn"]
    if not learned[1:length].any():
        return None, [*remarks, "conversations dropped, as no answer is left to learn within --sequence-length"]
    if length < len(ids):
        remarks.append("conversations cut after the last answer that fits into --sequence-length")
    return Conversation(messages, ids[:length], learned[:length]), remarks


def messages_of(row: dict) -> tuple[list[Message], set[str]]:
    """The messages of a row, and the keys that are not used; `UserError` if they are not messages."""
    name = MESSAGES[0] if row.get(MESSAGES[0]) else MESSAGES[1]
    messages = plain_messages(row.get(name))
    used = {name, "from", "value"}
    if row.get("system") and messages[0]["role"] != "system":
        messages = plain_messages([{"role": "system", "content": row["system"]}, *messages])
        used.add("system")
    messages = [{key: unix_lines(text) for key, text in message.items()} for message in messages]
    keys = {key for fields in (row, *row[name]) for key, value in fields.items() if value not in (None, "", [], {})}
    return messages, keys - used.union(*messages)


def pack(conversations: Sequence[Conversation], row_length: int, dtype: np.dtype) -> np.ndarray:
    """All conversations in rows (see `Conversations.train`): the longest first, each where the least room is left."""
    rows: list[np.ndarray] = []  # each (3, row_length)
    free: list[tuple[int, int]] = []  # sorted: the room in a row, and its index
    for conversation in sorted(conversations, key=lambda conversation: -len(conversation.ids)):
        ids = conversation.ids
        fullest = bisect.bisect_left(free, (len(ids), 0))
        if fullest == len(free):
            free.append((row_length, len(rows)))
            rows.append(np.zeros((3, row_length), dtype))
        room, index = free.pop(fullest)
        start = row_length - room
        row = rows[index]
        row[:, start : start + len(ids)] = ids, conversation.learned, np.full(len(ids), row[2].max() + 1)
        row[1, start] = False  # no token of its conversation comes before it
        bisect.insort(free, (room - len(ids), index))
    return np.stack(rows, 1)
