"""The tokenizer of a text: a byte-pair encoding that SentencePiece trains on a sample, in CACHE/tokenizers/KEY/."""

import contextlib
import dataclasses
import io
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from data.readers import BLOCK, read_documents
from data.settings import DataSettings
from data.sources import TextFile
from data.special_tokens import TURNS
from data.split import MAX_VALIDATION, content_hash, may_be_held_out
from data.tokenizer import Tokenizer, load_tokenizer
from data.tokenizer_json import read_model, tokenizer_files
from errors import UserError, note, reading
from files import digest

VERSION = 10  # raised when the same text would give another tokenizer
# Characters. A tokenizer of Python sources: 3.47 bytes per token from 3 MB, 3.54 from 8 MB, in 3 s on two cores.
SAMPLE_SIZE = 10_000_000
SMALL = 1_000_000  # characters of a sample that has a piece for each character, and one more for every 256 of the text
TRAINER_OPTIONS = dict(
    model_type="bpe",
    byte_fallback=True,  # a character without a piece becomes its UTF-8 bytes, so no text is unknown
    character_coverage=0.9995,  # the rarest characters are left to the bytes
    required_chars="▁",  # a space, which would come back as ▁ where a text has few
    normalization_rule_name="identity",
    add_dummy_prefix=False,
    remove_extra_whitespaces=False,
    allow_whitespace_only_pieces=True,  # indentation: one id for a run of spaces
    split_by_unicode_script=False,  # pieces such as "(self" and "):": 7 % more bytes per token on Python sources
    max_sentence_length=1 << 16,  # bytes; longer lines would be left out, so they are cut
    unk_id=0,
    bos_id=1,
    eos_id=2,
    pad_id=-1,
    control_symbols=[*TURNS],
    hard_vocab_limit=False,  # a small text has fewer pieces
    minloglevel=2,
)


def trained_tokenizer(files: list[TextFile], settings: DataSettings, vocab_size: int) -> Tokenizer:
    """A tokenizer that is trained on a sample of the files, unless the cache has it, complete."""
    split = (settings.validation_fraction, settings.validation_salt)
    key = digest(VERSION, SMALL, vocab_size, split, sorted(TRAINER_OPTIONS.items()), files)
    folder = Path(settings.cache, "tokenizers", key)
    with FileLock(folder / ".lock"):
        with contextlib.suppress(UserError), reading(folder):
            tokenizer = load_tokenizer(folder / "tokenizer.json")  # the last file that is saved
            read_model(tokenizer.files["tokenizer.model"])  # it goes into every checkpoint
            return tokenizer
        print("training a tokenizer (once) ...", file=sys.stderr, flush=True)
        everything = dataclasses.replace(settings, validation_fraction=0)  # where all documents may be for validation
        sample = sample_text(files, settings) or sample_text(files, everything)
        if any("▁" in block for block in sample):
            note("this text has the character ▁ (U+2581): it becomes a space")
        tokenizer = train_tokenizer(sample, vocab_size)
        tokenizer.save(folder)
        return tokenizer


def sample_text(files: list[TextFile], settings: DataSettings) -> list[str]:
    """At most `SAMPLE_SIZE` characters in random blocks, those with the smallest hashes; none is for validation."""
    sample: list[tuple[int, str]] = []  # hashes and blocks
    size, limit = 0, 1 << 64
    documents = itertools.chain.from_iterable(map(read_documents, files))
    for document in tqdm(documents, "reading", unit=" documents", delay=2, disable=None):
        blocks = iter(document)
        beginning = [*itertools.islice(blocks, 1 + 2 * MAX_VALIDATION // BLOCK)]
        # A longer document is never held out (see `split_documents`): the hash of its beginning does not matter.
        if may_be_held_out(np.array([content_hash("".join(beginning))], np.uint64), settings)[0]:
            continue
        for block in itertools.chain(beginning, blocks):
            key = content_hash(block)
            if key < limit:
                sample.append((key, block))
                size += len(block)
            while size > SAMPLE_SIZE:
                limit = limit * 9 // 10
                sample = [(key, block) for key, block in sample if key < limit]
                size = sum(len(block) for _, block in sample)
    return [block for _, block in sample]


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a byte-pair encoding of at most `vocab_size` pieces. None has a newline or a tab: those are bytes."""
    import sentencepiece

    if not any(texts):
        raise UserError("there is no text in the files that were named; give files that contain text.")
    model = io.BytesIO()
    options = TRAINER_OPTIONS | {"vocab_size": vocab_size}
    size = sum(map(len, texts))
    if size < SMALL:  # 300: bytes and special tokens
        pieces = 300 + len(set().union(*texts)) + size // 256
        options |= {"vocab_size": min(vocab_size, pieces), "character_coverage": 1.0}
    try:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines(texts), model_writer=model, **options)
    except (RuntimeError, ValueError, OSError) as error:
        too_small = re.search(r"smaller than required_chars. \d+ vs (\d+)", str(error))
        most = (vocab_size - 270) // 2  # characters, as many as longer pieces; 270 are bytes and special tokens
        characters = Counter(itertools.chain.from_iterable(texts))
        if too_small and 0 < most < len(characters):
            note(f"rare characters are spelled in bytes, as --vocab-size is {vocab_size} and they need {too_small[1]}")
            left_out = {ord(character): "\n" for character, _ in characters.most_common()[most:]}
            return train_tokenizer([text.translate(left_out) for text in texts], vocab_size)
        if too_small:
            raise UserError(f"--vocab-size {vocab_size}: this text needs {too_small[1]} or more.") from None
        raise UserError(f"no tokenizer could be trained on this text ({error}); give more text.") from None
    content = model.getvalue()
    return Tokenizer({"tokenizer.model": content} | tokenizer_files(content, {}), Path())


def lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines that the trainer does not skip: without newline, tab and NUL, and not too long. No piece spans two: Chinese
    punctuation is a piece of its own, so that a prompt can end before it."""
    max_length = TRAINER_OPTIONS["max_sentence_length"] // 4  # a character has at most 4 bytes
    for text in texts:
        for line in re.split("[\n\t\0]+|(?=[，。；：、！？])|(?<=[，。；：、！？])", text):
            yield from (line[start : start + max_length] for start in range(0, len(line), max_length))
