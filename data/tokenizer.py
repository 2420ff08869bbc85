"""Text <-> ids: a `tokenizer.json`, which the tokenizers library runs. SentencePiece only trains.

With a tokenizer that is trained here the round trip is exact for any text without U+2581, SentencePiece's space.
"""

import functools
import hashlib
import itertools
import json
import re
import secrets
import threading
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, normalizers
from tokenizers.pre_tokenizers import ByteLevel

from data.special_tokens import NAMED, add_tokens, find_bos, find_eos
from errors import UserError, reading
from files import parse_object, read_json, replacing

# What is saved with a model. llama.cpp needs the scores in tokenizer.model; generation_config.json has all EOS ids.
FILES = ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
FILES += ("generation_config.json", "added_tokens.json", "tokenizer.json")
# What is kept of a tokenizer_config.json beside a tokenizer.model.
CONFIG_FIELDS = (*NAMED, "add_bos_token", "chat_template", "added_tokens_decoder")
CONFIG_FIELDS += ("additional_special_tokens", "extra_special_tokens")
# How byte-level vocabularies write each byte: as Latin-1 has it, or, what cannot be printed, as U+0100 on, in order.
ALPHABET = sorted(ByteLevel.alphabet())
PRINTABLE = [ord(character) for character in ALPHABET if ord(character) < 256]
BYTES = dict(zip(ALPHABET, PRINTABLE + sorted({*range(256)} - {*PRINTABLE}), strict=True))
# A random number that no text contains. Digits, because chat templates may change letters (`upper`), but not digits.
BREAK = str(10**20 + secrets.randbelow(10**20))


class Tokenizer:
    """A tokenizer of Hugging Face's format. `bos_id` is None where its configuration says that no BOS is added."""

    def __init__(self, files: dict[str, bytes], folder: Path):
        """files: a tokenizer.json and what lies beside it, by name; folder: of the files, for messages."""
        self.files = files
        self.folder = folder
        with reading(folder / "tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode("utf-8-sig"))
            self._tokenizer.encode_special_tokens = True
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        self._lock = threading.Lock()  # held while the tokenizer encodes: `encode_special` changes it meanwhile
        with reading(folder / "tokenizer_config.json"):
            config = self.fields("tokenizer_config.json")
            old = self.fields("special_tokens_map.json"), self.fields("added_tokens.json")
            self.config, self.special_tokens = add_tokens(self._tokenizer, config, *old)
            if self.config != config:  # it had tokens that tokenizer.json lacked
                self.files = files | {"tokenizer_config.json": json.dumps(self.config).encode()}
                self.files["tokenizer.json"] = self._tokenizer.to_str().encode()
            self.bos_id = find_bos(self._tokenizer, self.config, self.special_tokens)
            self.eos_id = find_eos(self._tokenizer, self.special_tokens, self.fields("generation_config.json"))
        self.vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)  # the id of each token
        self.vocab_size = max(self.vocabulary.values()) + 1
        self.dtype = np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")  # holds every id
        self.document_start = self.eos_id if self.bos_id is None else self.bos_id  # the id that begins a document
        # BOS and EOS belong to the hash because they are in the token stream.
        content = self.files["tokenizer.json"] + f"{self.bos_id},{self.eos_id}".encode()
        self.hash = hashlib.blake2b(content, digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of plain text: no BOS or EOS is added, and special tokens in the text are text."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[array]:
        """Encode many texts on all cores."""
        with reading(self.folder / "tokenizer.json"), self._lock:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [array("I", encoding.ids) for encoding in encodings]

    def encode_special(self, text: str) -> tokenizers.Encoding:
        """Encode a text whose special tokens are tokens, as in the text that a chat template writes. `BREAK` is removed
        once they are found: what it breaks is plain text. Offsets count its characters, too."""
        with reading(self.folder / "tokenizer.json"), self._lock:
            normalizer = self._tokenizer.normalizer
            steps = [normalizers.Replace(BREAK, "")] + ([] if normalizer is None else [normalizer])
            self._tokenizer.normalizer = normalizers.Sequence(steps)
            self._tokenizer.encode_special_tokens = False
            try:
                return self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
            finally:
                self._tokenizer.normalizer = normalizer
                self._tokenizer.encode_special_tokens = True

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of ids, without unknown ones and, unless `special`, special ones. Each byte that is part of no character
        becomes U+FFFD; the library would replace all bytes around it, too."""
        valid = []
        for is_byte, group in itertools.groupby(map(int, ids), lambda i: i in self._byte_values):
            if is_byte:
                text = bytes(self._byte_values[i] for i in group).decode("utf-8", "surrogateescape")
                values = re.sub("[\udc80-\udcff]", "\ufffd", text).encode()
                group = [self._tokenizer.token_to_id(f"<0x{value:02X}>") for value in values]
            valid += group
        with reading(self.folder / "tokenizer.json"):
            return self._tokenizer.decode(valid, skip_special_tokens=not special)

    @functools.cached_property
    def _byte_values(self) -> dict[int, int]:
        """The bytes that tokens such as <0x0A> stand for, by id; empty where there are no such tokens."""
        ids = [self._tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256)]
        return {} if None in ids else dict(zip(ids, range(256), strict=True))

    def spells(self, character: str) -> bool:
        """Whether a character has no token, so that those of its bytes stand for it."""
        return character >= "\x80" and character not in self.vocabulary and bool(self._byte_values)

    @functools.cached_property
    def lead_bytes(self) -> list[int]:
        """The tokens that begin a character without a token: the first bytes of more than one."""
        return [token for token, value in self._byte_values.items() if value >= 0xC0]

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for, special ones too: its text in UTF-8, or bytes that are no character alone."""
        if token in self._byte_values:  # <0x0A>
            return bytes([self._byte_values[token]])
        text = self.decode([*self.encode("a"), token], special=True)[1:]  # at the start, a space might be dropped
        name = self._tokenizer.id_to_token(token)
        if "\ufffd" in text and BYTES.keys() >= {*name}:  # "ä½" of a byte-level vocabulary: E4 BD
            return bytes(BYTES[character] for character in name)
        return text.encode()

    @functools.cached_property
    def tokens_with_space(self) -> list[int]:
        """The ids of the tokens that begin with a space, which a vocabulary writes as another character."""
        text = "".join(map(self._tokenizer.id_to_token, self.encode("a a")))
        marks = tuple(mark for mark in ("▁", "Ġ", " ") if mark in text)
        return [i for token, i in self.vocabulary.items() if token.startswith(marks)]

    @property
    def added_tokens(self) -> dict[int, AddedToken]:
        """The tokens that are found in a text before the rest of it is tokenized, by id: special ones and others."""
        return self._tokenizer.get_added_tokens_decoder()

    def fields(self, name: str) -> dict:
        with reading(self.folder / name):
            return parse_object(self.files.get(name, b"{}"))

    @property
    def chat_template(self) -> str | None:
        """The source of its chat template, None if there is none; a model may have more, for tools and documents."""
        if "chat_template.jinja" in self.files:
            with reading(self.folder / "chat_template.jinja"):
                return self.files["chat_template.jinja"].decode("utf-8-sig")
        with reading(self.folder / "tokenizer_config.json"):
            template = self.config.get("chat_template")
            if not isinstance(template, str | None):
                template = {one["name"]: one["template"] for one in template}["default"]
            return template

    def save(self, directory: str | Path) -> None:
        """Write the files, from which `AutoTokenizer` gives the same ids; tokenizer.json is the last of them."""
        for name in [*(self.files.keys() - {"tokenizer.json"}), "tokenizer.json"]:
            with replacing(Path(directory) / name) as file:
                file.write(self.files[name])


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Open a `tokenizer.json`, a SentencePiece model, or a folder (such as a checkpoint) with one of them or both."""
    path = Path(path).expanduser()
    if path.is_dir():
        path /= "tokenizer.json" if (path / "tokenizer.json").is_file() else "tokenizer.model"
    if not path.is_file():
        fix = "give a tokenizer.model, a tokenizer.json, or a folder with one, such as runs/NAME/best"
        raise UserError(f"there is no {path}; {fix}.")
    beside = [path.parent / name for name in FILES if name != path.name]
    files = {file.name: file.read_bytes() for file in (*beside, path) if file.is_file()}
    content = files.pop(path.name)
    if path.suffix == ".json":
        return Tokenizer(files | {"tokenizer.json": content}, path.parent)
    from data.tokenizer_json import tokenizer_files

    files = files if path.name == "tokenizer.model" else {}
    config = read_json(path.parent / "tokenizer_config.json") if files else {}
    with reading(path, "give a tokenizer.json, or a byte-pair encoding with byte fallback that leaves text as it is"):
        kept = {key: config[key] for key in CONFIG_FIELDS if key in config}
        made = tokenizer_files(content, kept, "chat_template.jinja" in files or bool(kept.get("chat_template")))
    return Tokenizer(files | {"tokenizer.model": content} | made, path.parent)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The prompt's token ids after what precedes them in training: BOS or, if there are none, the EOS before."""
    if tokens_after(tokenizer, prompt):  # then the space is part of the next token
        prompt = prompt[:-1]
    ids = tokenizer.encode(prompt)
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *ids]
    return ids or [tokenizer.eos_id]


def tokens_after(tokenizer: Tokenizer, prompt: str) -> list[int] | None:
    """The ids that may follow a prompt, None for all. A space at its end is part of the next word's token."""
    return tokenizer.tokens_with_space if prompt.endswith(" ") else None


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """`UserError` unless `vocab_size` embeddings suffice for BOS, EOS and all ids of text; a <pad> may lie beyond."""
    special = {i for i, token in tokenizer.added_tokens.items() if token.special}
    needed = 1 + max({*tokenizer.vocabulary.values()} - special | {tokenizer.eos_id, tokenizer.document_start})
    if needed > vocab_size:
        fix = "give the tokenizer, or the adapter, of this model"
        raise UserError(f"the tokenizer has {needed:,} ids but the model only {vocab_size:,}; {fix}.")
