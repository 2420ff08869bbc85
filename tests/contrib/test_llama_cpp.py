"""Our models in llama.cpp itself: the same ids, the same greedy text, the same probabilities.

`pip install xllamacpp gguf` (llama.cpp, built for Python); `python -m pytest -m slow tests/contrib/test_llama_cpp.py`.
llama.cpp is asked through its own HTTP server, on an address of this machine only.

Tolerances, relative error of the perplexity: float32 weights differ by the order of sums. With 16-bit weights,
llama.cpp also rounds the activations, to 11 bits (float16) or 8 bits (bfloat16), in each product of three layers.
"""

import json
import math
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from checkpoints.find import find_checkpoint
from checkpoints.pretrained import load_pretrained, save_pretrained
from contrib.llama_cpp_vocab import PRE_TOKENIZERS
from data.readers import read_documents
from data.sources import resolve
from data.tokenizer import Tokenizer, load_tokenizer
from generation.generate import encode_prompt, generate
from generation.settings import Sampling
from model.decoder import Decoder
from tests.contrib.test_llama_cpp_vocab import ALPHABET, KNOWN

xllamacpp = pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install xllamacpp")
pytest.importorskip("gguf", reason="writing GGUF files needs the gguf package: pip install gguf")
from contrib.gguf import write_gguf  # noqa: E402 - it imports gguf

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TOLERANCES = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 3e-3}
TEXTS = [
    *("", " ", "  ", "   x", " leading", "two  spaces", "trailing ", "a\tb\n\tc\n\n  d", "\t\t\t", " " * 33, "\n" * 7),
    *("def f(x):\n    return x  # comment\n", "if x == 1:\r\n\treturn\r\n", "self.assertEqual(a, b)", "====----====="),
    *("😀", "👩‍👩‍👧 family", "</s>", "<s>hello</s>", "<unk>", "<0x0A>", "a</s>b", "<|im_start|>user\nhi<|im_end|>"),
    *("Grüße aus Köln", "Привет, мир", "日本語のテキスト", "مرحبا بالعالم", "नमस्ते", "한국어", "mixed 中文 and English"),
    *("\0", "a\0b", "\x01\x02\x7f\x80", "\u200b\ufeff", "é", "\u2028\u2029", "\xa0nbsp", "𝒳𝓎", "\U0010ffff", "\ufffd"),
    *("100000", "3.14159e-10", "1234567890 12 345", "#" * 40, "x" * 100, "I'm you're WE'LL it's", "「quoted」, ok"),
    *("http://example.com/?q=1&b=%20", "CamelCaseIdentifier_with_snake", "▁underscore▁", "Once upon a time, a girl."),
]
PASSAGE = (
    "class Reader:\n    def read(self, size=-1):\n        return self.stream.read(size)\n\nOnce upon a time, a boy"
)


@dataclass
class LlamaCpp:
    """A model that llama.cpp has loaded from a GGUF file: float32 cache, one thread."""

    server: object

    def ask(self, route: str, **question: object) -> dict:
        content = json.dumps(question).encode()
        request = urllib.request.Request(
            self.server.listening_address + route, content, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def encode(self, text: str, bos: bool = False) -> list[int]:
        return self.ask("/tokenize", content=text, add_special=bos, parse_special=False)["tokens"]

    def greedy(self, ids: list[int], count: int) -> dict:
        return self.ask("/completion", prompt=ids, n_predict=count, temperature=0, return_tokens=True)

    def log_probabilities(self, ids: list[int], vocab_size: int) -> dict[int, float]:
        """Of the tokens that may follow the ids."""
        answer = self.ask("/completion", prompt=ids, n_predict=1, temperature=0, n_probs=vocab_size)
        return {token["id"]: token["logprob"] for token in answer["completion_probabilities"][0]["top_logprobs"]}


@pytest.fixture
def open_in_llama_cpp(tmp_path) -> Callable[..., LlamaCpp]:
    """Write a checkpoint as a GGUF file and load that."""

    def open_(checkpoint: Path, dtype: str | None = None) -> LlamaCpp:
        write_gguf(checkpoint, tmp_path / "model.gguf", dtype)
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(tmp_path / "model.gguf")
        parameters.n_ctx, parameters.n_parallel, parameters.warmup = 256, 1, False
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return LlamaCpp(xllamacpp.Server(parameters))

    return open_


TRAINED = {
    "llama, wide heads": "--norm rms --head-dim 48",
    "llama, tied, qkv biases": "--norm rms --tie-word-embeddings --attention-bias",
    "qwen3, tied, qkv biases": "--norm rms --qk-norm --tie-word-embeddings --attention-bias",
    "stablelm": "--norm layer",
    "stablelm, tied, qkv biases, no norm bias": "--norm layer --no-norm-bias --tie-word-embeddings --attention-bias",
}


@pytest.fixture(scope="module", params=TRAINED)
def trained(request, tmp_path_factory) -> Path:
    """The best checkpoint of a short run of train.py, with grouped queries: its logits have no ties."""
    run = tmp_path_factory.mktemp("runs") / "run"
    flags = "--hidden-size 128 --intermediate-size 320 --num-hidden-layers 3 --vocab-size 2000 --sequence-length 128"
    flags += " --batch-size 8 --steps 60 --warmup-steps 10 --evaluate-every 60 " + TRAINED[request.param]
    subprocess.run(
        [sys.executable, "train.py", "--out", run, *flags.split()], cwd=ROOT, check=True, capture_output=True
    )
    return find_checkpoint(run)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_trained_model_gives_the_same_ids_text_and_perplexity(trained, open_in_llama_cpp, dtype):
    tokenizer, decoder = load_tokenizer(trained), load_rounded(trained, dtype)
    other = open_in_llama_cpp(trained, dtype)
    assert [other.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert other.encode("def", bos=True) == encode_prompt(tokenizer, "def")
    for prompt in ("", "def ", "The quick", "import os\n"):
        ids = encode_prompt(tokenizer, prompt)
        tokens, finished = greedy(decoder, tokenizer, ids, 64)
        answer = other.greedy(ids, 64)
        if dtype != "bfloat16":  # its rounding of activations changes some of the closest decisions
            assert [token for token in answer["tokens"] if token != tokenizer.eos_id] == tokens
            assert answer["stop_type"] == {"eos": "eos", "length": "limit"}[finished]
            assert answer["content"] == tokenizer.decode(tokens)
    ids = encode_prompt(tokenizer, PASSAGE)
    ours = log_probabilities(decoder, ids)
    theirs = [other.log_probabilities(ids[:i], 2000)[ids[i]] for i in range(1, len(ids))]
    perplexity = [math.exp(-sum(values) / len(values)) for values in (ours, theirs)]
    assert perplexity[1] == pytest.approx(perplexity[0], rel=TOLERANCES[dtype])


def load_rounded(checkpoint: Path, dtype: str) -> Decoder:
    """The decoder in float32, its matrices rounded to `dtype`."""
    decoder = load_pretrained(checkpoint).float().eval()
    for parameter in decoder.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.to(getattr(torch, dtype)).float()
    return decoder


def greedy(decoder: Decoder, tokenizer: Tokenizer, ids: list[int], count: int) -> tuple[list[int], str]:
    sampling = Sampling(temperature=0)
    result = generate(decoder, [ids], max_new_tokens=count, sampling=sampling, eos_ids=(tokenizer.eos_id,))
    return result.tokens[0], result.finish_reasons[0]


@torch.no_grad()
def log_probabilities(decoder: Decoder, ids: list[int]) -> list[float]:
    """Of each of the ids but the first."""
    chosen = decoder(torch.tensor([ids]))[0, :-1].double().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
    return chosen[:, 0].tolist()


def library_text() -> list[str]:
    files = resolve(["python"], "text", Path())
    return ["".join(document) for file in files for document in read_documents(file)]


def test_qwens_tokenizer_gives_the_same_ids_and_chat_prompt(make_decoder, open_in_llama_cpp, shared, tmp_path, capsys):
    import gzip

    (tmp_path / "tokenizer.json").write_bytes(gzip.decompress((shared / "qwen2_5/tokenizer.json.gz").read_bytes()))
    (tmp_path / "tokenizer_config.json").write_bytes((shared / "qwen2_5/tokenizer_config.json").read_bytes())
    decoder = make_decoder(vocab_size=151936, attention_bias=True)
    save_pretrained(decoder, tmp_path, eos_token_id=151645)
    tokenizer, other = load_tokenizer(tmp_path), open_in_llama_cpp(tmp_path, "float16")
    assert "NFC" in capsys.readouterr().err
    with open(shared / "qwen2_5" / "golden_strings.inp", encoding="utf-8", newline="") as file:
        texts = TEXTS + file.read().split("\n__ggml_vocab_test__\n")
    assert [other.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]
    assert other.encode("hi", bos=True) == tokenizer.encode("hi")  # no BOS
    turns = ("user", "hi"), ("assistant", "ho"), ("user", "?")
    messages = [{"role": role, "content": content} for role, content in turns]
    template = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template
    prompt = other.ask("/apply-template", messages=messages)["prompt"]
    assert prompt == template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", PRE_TOKENIZERS.values())
def test_every_pre_tokenizer_gives_the_same_ids(make_decoder, open_in_llama_cpp, tmp_path, name):
    split, ignore_merges = KNOWN[name]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=ignore_merges))
    made.pre_tokenizer = split
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=3000, special_tokens=["<|end|>"], initial_alphabet=ALPHABET, show_progress=False
    )
    text = library_text()[::8]
    made.train_from_iterator(text, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    save_pretrained(make_decoder(vocab_size=3000), tmp_path)
    tokenizer, other = load_tokenizer(tmp_path), open_in_llama_cpp(tmp_path)
    texts = TEXTS + [part for document in text[:20] for part in (document[:3000], document[-500:])]
    assert [other.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]
