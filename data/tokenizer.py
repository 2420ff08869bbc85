"""Text <-> ids: a SentencePiece model (trained here, or given) or a `tokenizer.json`, behind the same few methods.

`encode` is plain: no BOS or EOS is added and special tokens in the text are text. The round trip is exact for any
Unicode scalar text with one exception: U+2581 comes back as a space, because SentencePiece encodes spaces as U+2581.
"""

import contextlib
import functools
import hashlib
import io
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece
import tokenizers

from data.tokenizer_json import SPACE, UnsupportedTokenizer, read_model, tokenizer_json
from errors import UserError, read_json, usable_cores

# The files of a tokenizer's folder that are saved with a model.
FILES = (
    "tokenizer.model",
    "sentencepiece.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",  # all ids that end a text, and the sampling
)

TRAINER_OPTIONS = dict(
    model_type="bpe",
    byte_fallback=True,  # a character without a piece becomes its UTF-8 bytes, so no text is unknown
    character_coverage=0.9995,  # the rarest characters are left to the bytes
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
    minloglevel=2,
)


# Random numbers that no text contains. Digits, because templates may change letters (`upper`), but not digits.
BREAK, SECRET = (str(10**20 + secrets.randbelow(10**20)) for _ in range(2))


def break_tokens(text: str, tokens: Iterable[str]) -> str:
    """Insert a mark into each of the tokens that the text contains, so that `encode_special` takes them as plain text.

    The mark follows a token's first character. Tokens of one character cannot be broken and are left as they are.
    """
    patterns = [f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in tokens if len(token) > 1]
    return re.sub("|".join(patterns), lambda match: match[0] + BREAK, text) if patterns else text


class SentencePieceTokenizer:
    """A SentencePiece model. `bos_id` is None where the folder's configuration says that no BOS is added."""

    def __init__(self, model: bytes, *, add_bos: bool = True, files: dict[str, bytes] | None = None):
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._model = model
        self._files = files or {}  # which `save` writes
        self.vocab_size = self._processor.vocab_size()
        self._processor.id_to_piece(list(range(self.vocab_size)))  # a UnicodeDecodeError now, not in some later text
        self.bos_id = self._processor.bos_id() if add_bos and self._processor.bos_id() >= 0 else None
        self.eos_id = self._processor.eos_id()
        if self.eos_id < 0:
            raise UserError("the tokenizer.model has no end-of-sequence token (eos_id); give one that has.")
        self.hash = _hash(model, self.bos_id, self.eos_id)

    @property
    def content(self) -> bytes:
        """The bytes of the model file."""
        return self._model

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text, out_type=int)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts on all cores, without holding the GIL."""
        return self._processor.encode(list(texts), out_type=int, num_threads=usable_cores())

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; BOS, EOS and ids past the vocabulary give nothing, bytes that are no character U+FFFD."""
        return self._processor.decode([int(i) for i in ids if 0 <= i < self.vocab_size])

    @functools.cached_property
    def tokens_with_space(self) -> list[int]:
        """The ids of the tokens that begin with a space."""
        pieces = self._processor.id_to_piece(list(range(self.vocab_size)))
        return [i for i, piece in enumerate(pieces) if piece.startswith(SPACE)]

    def save(self, directory: str | Path) -> None:
        """Write files from which `AutoTokenizer` gives the same ids, or the files of the tokenizer's folder.

        A model without an equal `tokenizer.json` is written as `sentencepiece.model`, which `AutoTokenizer` refuses.
        A bare `tokenizer.model` it would convert to a tokenizer that gives other ids.
        """
        directory = Path(directory)
        write_files(self._files, directory)
        if "tokenizer.json" in self._files:
            return
        piece = self._processor.id_to_piece
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # with LlamaTokenizer the ids are others, silently
            "add_bos_token": self.bos_id is not None,
            "add_eos_token": False,
            "bos_token": piece(self.bos_id) if self.bos_id is not None else None,
            "eos_token": piece(self.eos_id),
            "unk_token": piece(self._processor.unk_id()),
            "split_special_tokens": True,  # "</s>" in a text is four characters
            "clean_up_tokenization_spaces": False,
        }
        try:
            if not read_model(self._model).add_dummy_prefix:
                config["add_prefix_space"] = False  # llama.cpp's converter reads it; a missing key means true there
            (directory / "tokenizer.json").write_text(self._tokenizer_json, encoding="utf-8")
            (directory / "tokenizer.model").write_bytes(self._model)
        except UnsupportedTokenizer:
            config["tokenizer_class"] = "SentencePieceProcessor"
            (directory / "sentencepiece.model").write_bytes(self._model)
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    @functools.cached_property
    def _tokenizer_json(self) -> str:
        return tokenizer_json(self._model, self.bos_id)


class JsonTokenizer:
    """A Hugging Face tokenizer: a `tokenizer.json` with the `tokenizer_config.json` in the same folder."""

    def __init__(self, path: Path):
        self._path, self._folder = path, path.parent
        self._files = read_files(path.parent)
        self._content = path.read_bytes()
        with self._explained():
            self._tokenizer = tokenizers.Tokenizer.from_buffer(self._content)
            self._tokenizer.encode_special_tokens = True
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        config = read_json(self._folder / "tokenizer_config.json")
        self.bos_id = self._find_bos(config)
        self.eos_id = self._find_eos(config, read_json(self._folder / "generation_config.json"))
        self.hash = _hash(self._content, self.bos_id, self.eos_id)

    @property
    def content(self) -> bytes:
        """The bytes of the tokenizer.json."""
        return self._content

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what the library raises for a tokenizer that contradicts itself into a `UserError`."""
        try:
            yield
        except BaseException as error:  # pyo3's PanicException is no Exception, and cannot be imported
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UserError(f"{self._path} does not work in the tokenizers library ({error}).") from error

    def encode(self, text: str) -> list[int]:
        with self._explained():
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts on all cores."""
        with self._explained():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens and ids past the vocabulary give nothing."""
        with self._explained():
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    @functools.cached_property
    def tokens_with_space(self) -> list[int]:
        """The ids of the tokens that begin with a space, which a vocabulary writes as another character."""
        space = "".join(map(self._tokenizer.id_to_token, self.encode(" ")))[:1]
        return [i for token, i in self._tokenizer.get_vocab().items() if space and token.startswith((space, " "))]

    @property
    def added_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """The tokens that are found in a text before the rest of it is tokenized, by id: special ones and others."""
        return self._tokenizer.get_added_tokens_decoder()

    def encode_special(self, text: str) -> list[int]:
        """Token ids of a text whose special tokens are tokens, as in the text that a chat template writes.

        Tokens that `break_tokens` has broken are plain text: the ids are those of the whole characters.
        """
        if BREAK in text or self._normalizes_tokens:
            return self._encode_broken(text)
        self._tokenizer.encode_special_tokens = False
        try:
            return self.encode(text)
        finally:
            self._tokenizer.encode_special_tokens = True

    @functools.cached_property
    def _normalizes_tokens(self) -> bool:
        """Whether text that only looks like a token, such as the same in capitals, may be taken for it."""
        fields = json.loads(self._content)
        return fields.get("normalizer") is not None and any(token.get("normalized") for token in fields["added_tokens"])

    def _encode_broken(self, text: str) -> list[int]:
        """Encode with a tokenizer whose added tokens have secret names, after renaming the whole tokens in the text.

        So the library itself finds the tokens, and splits, normalizes and merges the text between them as always.
        """
        tokenizer, names, ids = self._renamed
        whole = re.compile("|".join(re.escape(token) for token in sorted(names, key=len, reverse=True)))
        parts = whole.split(text)
        found = [names[match[0]] for match in whole.finditer(text)]
        renamed = parts[0] + "".join(name + part for name, part in zip(found, parts[1:], strict=True))
        with self._explained():
            found = tokenizer.encode(renamed.replace(BREAK, ""), add_special_tokens=False).ids
        return [ids.get(i, i) for i in found]

    @functools.cached_property
    def _renamed(self) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[int, int]]:
        """This tokenizer with other texts for its added tokens; those texts by token; its ids to those of `self`."""
        fields, names = json.loads(self._content), {}
        for index, token in enumerate(fields["added_tokens"]):
            if not token["single_word"]:  # such a token in the middle of a word is text
                names[token["content"]] = token["content"] = f"<{SECRET}|{index}>"
        fields["truncation"] = fields["padding"] = None
        with self._explained():
            tokenizer = tokenizers.Tokenizer.from_str(json.dumps(fields))
        ids = {tokenizer.token_to_id(token["content"]): token["id"] for token in fields["added_tokens"]}
        return tokenizer, names, ids

    def save(self, directory: str | Path) -> None:
        write_files(self._files, Path(directory))
        (Path(directory) / "tokenizer.json").write_bytes(self._content)

    def _find_bos(self, config: dict) -> int | None:
        """From the configuration or, if it does not say, what the post-processor puts in front of a text."""
        if "add_bos_token" in config:
            return self._id(config.get("bos_token")) if config["add_bos_token"] else None
        plain = self.encode("a")
        with self._explained():
            full = self._tokenizer.encode("a").ids
        return full[0] if full[: len(plain)] != plain else None

    def _find_eos(self, config: dict, generation: dict) -> int:
        ids = generation.get("eos_token_id")
        for eos in (self._id(config.get("eos_token")), *(ids if isinstance(ids, list) else [ids])):
            if type(eos) is int:
                return eos
        raise UserError(
            f"the tokenizer in {self._folder} names no end-of-sequence token; "
            f'its tokenizer_config.json needs an "eos_token" that the vocabulary holds.'
        )

    def _id(self, token: object) -> int | None:
        token = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.get_vocab(with_added_tokens=True).get(token) if isinstance(token, str) else None


Tokenizer = SentencePieceTokenizer | JsonTokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Open a SentencePiece model, a `tokenizer.json`, or a folder (a checkpoint, say) that holds either.

    A folder's `tokenizer.model` (or `sentencepiece.model`, see `save`) is used unless its `tokenizer.json` has more
    tokens or it is not a SentencePiece model.
    """
    path = Path(os.path.expanduser(path))  # unlike Path.expanduser it does not raise for an unknown ~user
    if path.is_file():
        return JsonTokenizer(path) if path.suffix == ".json" else _load_model(path, {}, {})
    model, json_file = path / "tokenizer.model", path / "tokenizer.json"
    if not model.is_file():
        model = path / "sentencepiece.model"
    if not path.is_dir() or not (model.is_file() or json_file.is_file()):
        raise UserError(
            f"no tokenizer at {path}; give a tokenizer.model, a tokenizer.json, or a folder with one of them."
        )
    if model.is_file():
        try:
            files = read_files(path, FILES if json_file.is_file() else ("generation_config.json",))
            tokenizer = _load_model(model, read_json(path / "tokenizer_config.json"), files)
            if "tokenizer.json" not in files or tokenizer.vocab_size >= JsonTokenizer(json_file).vocab_size:
                return tokenizer
        except UserError:
            if not json_file.is_file():
                raise
    return JsonTokenizer(json_file)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise `UserError` unless a model with `vocab_size` embeddings has one for every id of the tokenizer."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids but the model only {vocab_size:,}; "
            f"a trained model needs the tokenizer that it was trained with, "
            f"and a new one --vocab-size {tokenizer.vocab_size:,} or more."
        )


class VocabularyTooLarge(UserError):
    """The text has too few different pieces for the vocabulary; `maximum` is how many it has."""

    def __init__(self, message: str, maximum: int) -> None:
        super().__init__(message)
        self.maximum = maximum


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: str | Path) -> SentencePieceTokenizer:
    """Train a byte-pair encoding of exactly `vocab_size` pieces on the texts and write it to the file `path`.

    The same texts in the same order give the same file. No piece contains a newline or a tab: those are bytes. Raises
    `VocabularyTooLarge` where the texts do not have that many pieces.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts), model_writer=model, vocab_size=vocab_size, **TRAINER_OPTIONS
        )
    except (RuntimeError, ValueError, OSError) as error:
        if "KeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from None
        raise _training_failed(error, vocab_size) from error
    Path(path).write_bytes(model.getvalue())
    return SentencePieceTokenizer(model.getvalue())


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines that the trainer does not skip: without newline, tab and NUL, and not too long."""
    max_length = TRAINER_OPTIONS["max_sentence_length"] // 4  # a character has at most 4 bytes
    for text in texts:
        for line in re.split("[\n\t\0]+", text):
            yield from (line[start : start + max_length] for start in range(0, len(line), max_length))


def _training_failed(error: Exception, vocab_size: int) -> UserError:
    reason = str(error)
    if maximum := re.search(r"Vocabulary size too high .*?<= (\d+)", reason):
        return VocabularyTooLarge(
            f"the text is too small for a vocabulary of {vocab_size:,}; "
            f"the maximum for it is {int(maximum[1]):,}: set --vocab-size to that or less, or give more text.",
            int(maximum[1]),
        )
    if minimum := re.search(r"smaller than required_chars\. \d+ vs (\d+)", reason):
        return UserError(
            f"a vocabulary of {vocab_size:,} is too small for the characters of this text; "
            f"set --vocab-size to {int(minimum[1]):,} or more."
        )
    return UserError(f"no tokenizer could be trained on this text ({reason}); give more text.")


def _load_model(path: Path, config: dict, files: dict[str, bytes]) -> SentencePieceTokenizer:
    model = path.read_bytes()
    try:
        if not model:  # the library takes empty bytes for "no model given"
            raise RuntimeError("empty")
        return SentencePieceTokenizer(model, add_bos=config.get("add_bos_token", True), files=files)
    except (RuntimeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a SentencePiece model; give a tokenizer.model or tokenizer.json.") from error


def read_files(folder: Path, names: Iterable[str] = FILES) -> dict[str, bytes]:
    """The files of a tokenizer's folder. They are saved later, when the folder may have changed or be gone."""
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def write_files(files: dict[str, bytes], directory: Path) -> None:
    for name, content in files.items():
        (directory / name).write_bytes(content)


def _hash(content: bytes, bos_id: int | None, eos_id: int) -> str:
    """BOS and EOS belong to the hash because they are in the token stream."""
    return hashlib.blake2b(content + f"{bos_id},{eos_id}".encode(), digest_size=16).hexdigest()
