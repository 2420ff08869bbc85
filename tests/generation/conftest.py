"""A tiny random model, tokenizers of each kind that a stream must support, and models with a chat template."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

import kernels
from checkpoints.find import find_files
from checkpoints.pretrained import save_pretrained
from data.chat import ChatFormat
from data.tokenizer import Tokenizer, load_tokenizer
from data.train_tokenizer import train_tokenizer
from generation import cli
from generation.generate import generate
from generation.settings import Settings
from model.config import ModelConfig
from model.decoder import Decoder
from tests.data.conftest import llama, qwen, qwen_folder  # noqa: F401 - fixtures

TEXT = [f"def add_{name}(x, y):\n    return x + y  # {name} ☺ é 漢字\n" for name in "abcdefghijklmnop" * 8]
LIMIT = 48


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    """Random weights, large enough that the most likely token changes from step to step."""
    shape = dict(vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    return Decoder(ModelConfig(**shape, max_position_embeddings=LIMIT, initializer_range=0.5), seed=3).eval()


@pytest.fixture
def few_programs(monkeypatch):
    """Programs of more rows: the interpreter takes as long for one of 4 rows, whose results are the same."""
    choose = kernels.decode.product_geometry
    monkeypatch.setattr(kernels.decode, "product_geometry", lambda rows, width: choose(rows, width) | {"ROWS": 128})


def generate_all(*arguments, **options) -> tuple[list[list[int]], list[str]]:
    """The new tokens of each prompt, without EOS, and why each ends."""
    tokens, ends = {}, {}
    for sequence, token, end, *_ in generate(*arguments, **options):
        tokens.setdefault(sequence, []).extend([] if end == "eos" else [token])
        ends[sequence] = end
    return [*tokens.values()], [*ends.values()]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A tokenizer that this project trains: SentencePiece BPE with byte fallback."""
    return train_tokenizer(TEXT, 300)


@pytest.fixture
def output(capsys) -> Callable[..., tuple[str, list[str]]]:
    """What generate.py prints: all text, and the lines of its log."""

    def run(directory: Path, prompts: Sequence[str] = ("x",), **settings) -> tuple[str, list[str]]:
        tokenizer = load_tokenizer(find_files(directory, settings.get("adapter")).tokenizer)
        cli.run(Settings(device="cpu", **settings), directory, tokenizer, prompts)
        text, log = capsys.readouterr()
        return text, log.splitlines()

    return run


CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
INST = """\
{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content, messages[1:] %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate,\n but message ' ~ loop.index ~ ' does not') }}
    {%- elif message.role == 'user' %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.first and system else '') + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """Like Qwen's: special tokens outside of the vocabulary, and tags that are added but not special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def prefix_space_tokenizer() -> tokenizers.Tokenizer:
    """Like LLaMA 2's: special tokens in the vocabulary, and a space in front of every text between them."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special + byte_pieces, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = fields["added_tokens"][:3]
    return tokenizers.Tokenizer.from_str(json.dumps(fields))


# As transformers writes a token with options into tokenizer_config.json.
ADDED = {"__type": "AddedToken", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
KINDS_OF_CHAT = {
    "chatml": (byte_level_tokenizer, CHATML, {"eos_token": "<|endoftext|>", "pad_token": None}),
    "inst": (prefix_space_tokenizer, INST, {"bos_token": "<s>", "eos_token": {**ADDED, "content": "</s>"}}),
}


def write_chat_model(directory: Path, kind: str, context: int = 256) -> Path:
    """A random model with a tokenizer and a chat template, as a downloaded instruct model has them."""
    make_tokenizer, template, special = KINDS_OF_CHAT[kind]
    tokenizer = make_tokenizer()
    vocab = tokenizer.get_vocab_size()
    shape = dict(vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    decoder = Decoder(ModelConfig(**shape, max_position_embeddings=context, initializer_range=0.5), seed=3)
    eos = special["eos_token"]["content"] if kind == "inst" else special["eos_token"]
    save_pretrained(decoder, directory, bos_token_id=None, eos_token_id=tokenizer.token_to_id(eos))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, **special}
    config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def chat_format(directory: Path, system: str | None = None) -> ChatFormat:
    return ChatFormat(load_tokenizer(directory), system)


@pytest.fixture(scope="session", params=list(KINDS_OF_CHAT))
def chat_model(request, tmp_path_factory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def chatml_model(tmp_path_factory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chatml"), "chatml")
