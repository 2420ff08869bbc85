"""Our models in llama.cpp itself: the same ids, the same greedy text, the same probabilities.

`pip install xllamacpp gguf` (llama.cpp, built for Python); `python -m pytest -m slow tests/contrib/test_llama_cpp.py`.
llama.cpp is asked through its own HTTP server, on an address of this machine only.

Tolerances, relative error of the perplexity: float32 weights differ by the order of sums. With 16-bit weights,
llama.cpp also rounds the activations, to 11 bits (float16) or 8 bits (bfloat16), in each product of three layers.
"""

import json
import math
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers

from checkpoints.find import find_checkpoint
from checkpoints.pretrained import load_pretrained, save_pretrained
from contrib.llama_cpp_vocab import PRE_TOKENIZERS
from data.tokenizer import encode_prompt, load_tokenizer
from generation.generate import generate
from generation.settings import Sampling
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


class LlamaCpp:
    """A model that llama.cpp has loaded: the checkpoint as a GGUF file, in `folder`; float32 cache, one thread."""

    def __init__(self, checkpoint: Path, folder: Path, dtype: str = "auto"):
        write_gguf(checkpoint, folder / "model.gguf", dtype)
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(folder / "model.gguf")
        parameters.n_ctx, parameters.n_parallel, parameters.warmup = 256, 1, False
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xllamacpp.Server(parameters)

    def ask(self, route: str, **question: object) -> dict:
        content, headers = json.dumps(question).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self.server.listening_address + route, content, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def encode(self, text: str, bos: bool = False) -> list[int]:
        return self.ask("/tokenize", content=text, add_special=bos, parse_special=False)["tokens"]


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
    command = [sys.executable, "train.py", "--out", run, *flags.split()]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return find_checkpoint(run)


@torch.no_grad()
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_trained_model_gives_the_same_ids_text_and_perplexity(trained, tmp_path, dtype):
    tokenizer, decoder = load_tokenizer(trained), load_pretrained(trained).eval()
    other = LlamaCpp(trained, tmp_path, dtype)
    for parameter in decoder.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.to(getattr(torch, dtype)).float()
    assert [other.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert other.encode("def", bos=True) == encode_prompt(tokenizer, "def")
    options = dict(sampling=Sampling(temperature=0), eos_ids=(tokenizer.eos_id,))
    # Rounding activations to bfloat16 changes some of the closest decisions.
    for prompt in () if dtype == "bfloat16" else ("", "def ", "The quick", "import os\n"):
        ids = encode_prompt(tokenizer, prompt)
        ours = generate(decoder, [ids], max_new_tokens=64, **options)
        answer = other.ask("/completion", prompt=ids, n_predict=64, temperature=0, return_tokens=True)
        assert [token for token in answer["tokens"] if token != tokenizer.eos_id] == ours.tokens[0]
        assert answer["stop_type"] == {"eos": "eos", "length": "limit"}[ours.finish_reasons[0]]
        assert answer["content"] == tokenizer.decode(ours.tokens[0])
    ids = encode_prompt(tokenizer, PASSAGE)
    expected = F.cross_entropy(decoder(torch.tensor([ids]))[0, :-1].double(), torch.tensor(ids[1:])).exp().item()
    total = 0
    for i in range(1, len(ids)):
        answer = other.ask("/completion", prompt=ids[:i], n_predict=1, temperature=0, n_probs=2000)
        likely = answer["completion_probabilities"][0]["top_logprobs"]
        total += next(token["logprob"] for token in likely if token["id"] == ids[i])
    assert math.exp(-total / (len(ids) - 1)) == pytest.approx(expected, rel=TOLERANCES[dtype])


def test_qwens_tokenizer_gives_the_same_ids_and_chat_prompt(make_decoder, qwen, qwen_folder, shared, tmp_path, capsys):
    model = shutil.copytree(qwen_folder, tmp_path / "model")
    save_pretrained(make_decoder(vocab_size=151936, attention_bias=True), model, eos_token_id=151645)
    other = LlamaCpp(model, tmp_path, "float16")
    assert "NFC" in capsys.readouterr().err
    with open(shared / "qwen2_5" / "golden_strings.inp", encoding="utf-8", newline="") as file:
        texts = TEXTS + file.read().split("\n__ggml_vocab_test__\n")
    assert [other.encode(text) for text in texts] == [qwen.encode(text) for text in texts]
    assert other.encode("hi", bos=True) == qwen.encode("hi")  # no BOS
    turns = ("user", "hi"), ("assistant", "ho"), ("user", "?")
    messages = [{"role": role, "content": content} for role, content in turns]
    template = transformers.AutoTokenizer.from_pretrained(model).apply_chat_template
    prompt = other.ask("/apply-template", messages=messages)["prompt"]
    assert prompt == template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_gives_the_same_ids(make_decoder, library_text, tmp_path, name):
    split, ignore_merges = KNOWN[name]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=ignore_merges))
    made.pre_tokenizer = split
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=3000, special_tokens=["<|end|>"], initial_alphabet=ALPHABET, show_progress=False
    )
    text = library_text[::8]
    made.train_from_iterator(text, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    save_pretrained(make_decoder(vocab_size=3000), tmp_path)
    tokenizer, other = load_tokenizer(tmp_path), LlamaCpp(tmp_path, tmp_path)
    texts = TEXTS + [passage for document in text[:20] for passage in (document[:3000], document[-500:])]
    assert [other.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]
