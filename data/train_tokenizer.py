"""Training of a tokenizer: a byte-pair encoding of SentencePiece with byte fallback."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from data.tokenizer import TURNS, Tokenizer, load_tokenizer
from errors import UserError

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


def train_tokenizer(texts: Sequence[str], vocab_size: int, path: str | Path) -> Tokenizer:
    """Train a byte-pair encoding of `vocab_size` pieces, or of all that the texts have; write it to the file `path`.

    The same texts in the same order give the same file. No piece contains a newline or a tab: those are bytes.
    """
    import sentencepiece

    model, options = io.BytesIO(), TRAINER_OPTIONS | {"vocab_size": vocab_size}
    try:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines(texts), model_writer=model, **options)
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"no tokenizer could be trained on this text ({error}); give more text.") from None
    Path(path).write_bytes(model.getvalue())
    return load_tokenizer(path)


def lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines that the trainer does not skip: without newline, tab and NUL, and not too long."""
    max_length = TRAINER_OPTIONS["max_sentence_length"] // 4  # a character has at most 4 bytes
    for text in texts:
        for line in re.split("[\n\t\0]+", text):
            yield from (line[start : start + max_length] for start in range(0, len(line), max_length))
