"""The tokenizer of a text: a byte-pair encoding that SentencePiece trains on a sample, in CACHE/tokenizers/KEY/."""

import contextlib
import io
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock

from data.readers import BLOCK, read_documents
from data.settings import DataSettings
from data.sources import TextFile
from data.special_tokens import TURNS
from data.split import MAX_VALIDATION, may_be_held_out
from data.tokenizer import Tokenizer, load_tokenizer
from data.tokenizer_json import read_model, tokenizer_files
from data.tokens import VERSION, content_hash, digest
from errors import UserError, reading

# Text to train a tokenizer on. Python sources: 3.47 bytes per token from 3 MB, 3.54 from 8 MB, in 3 s on two cores.
TOKENIZER_BYTES = 10_000_000
SAMPLE_BYTES = 64_000  # bytes of a larger text that are read in one place
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
    key = digest(VERSION, vocab_size, split, sorted(TRAINER_OPTIONS.items()), files)
    folder = Path(settings.cache, "tokenizers", key)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        with contextlib.suppress(UserError), reading(folder):
            tokenizer = load_tokenizer(folder / "tokenizer.json")  # the last file that is saved
            read_model(tokenizer.files["tokenizer.model"])  # it goes into every checkpoint
            return tokenizer
        print(f"training a tokenizer of {vocab_size:,} pieces (once) ...", file=sys.stderr, flush=True)
        tokenizer = train_tokenizer(sample_text(files, settings), vocab_size)
        tokenizer.save(folder)
        return tokenizer


def sample_text(files: list[TextFile], settings: DataSettings) -> list[str]:
    """About `TOKENIZER_BYTES` of text from places all over the files, without documents that may be for validation."""
    texts, due = [], 0.0
    fraction = TOKENIZER_BYTES / max(1, sum(file.size for file in files))
    for file in files:
        due += fraction * file.size  # what the sample lacks up to here
        if due < SAMPLE_BYTES and fraction < 1:
            continue
        for document in read_documents(file):
            # A longer document is never held out (see `split_documents`): the hash of its beginning does not matter.
            texts.append("".join(itertools.islice(document, 1 + 2 * MAX_VALIDATION // BLOCK)))
            due -= len(texts[-1])
            if due <= 0:
                break
    held_out = may_be_held_out(np.array([content_hash(text) for text in texts], np.uint64), settings)
    return [text for text, is_held_out in zip(texts, held_out, strict=True) if not is_held_out] or texts


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train a byte-pair encoding of at most `vocab_size` pieces. None has a newline or a tab: those are bytes."""
    import sentencepiece

    if not any(texts):
        raise UserError("there is no text in the files that were named; give files that contain text.")
    model, options = io.BytesIO(), TRAINER_OPTIONS | {"vocab_size": vocab_size}
    try:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines(texts), model_writer=model, **options)
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"no tokenizer could be trained on this text ({error}); give more text.") from None
    content = model.getvalue()
    return Tokenizer({"tokenizer.model": content} | tokenizer_files(content, {}), Path())


def lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines that the trainer does not skip: without newline, tab and NUL, and not too long."""
    max_length = TRAINER_OPTIONS["max_sentence_length"] // 4  # a character has at most 4 bytes
    for text in texts:
        for line in re.split("[\n\t\0]+", text):
            yield from (line[start : start + max_length] for start in range(0, len(line), max_length))
