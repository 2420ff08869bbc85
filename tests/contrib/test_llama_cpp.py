"""Our models in llama.cpp itself: the same ids, the same greedy text, the same probabilities.

`pip install xllamacpp gguf` (llama.cpp, built for Python); `python -m pytest -m slow tests/contrib/test_llama_cpp.py`.
llama.cpp is asked through its own HTTP server, on an address of this machine only.

Tolerances, relative error of the perplexity: float32 weights differ by the order of sums. With 16-bit weights,
llama.cpp also rounds the activations, to 11 bits (float16) or 8 bits (bfloat16), in each product of three layers.
"""

import json
import math
import shutil
import unicodedata
import urllib.request
from pathlib import Path

import pytest
import tokenizers
import torch
import torch.nn.functional as F

from checkpoints.pretrained import load_pretrained, save_pretrained
from contrib.llama_cpp_vocab import PRE_TOKENIZERS
from contrib.same import TEXTS
from data.tokenizer import encode_prompt, load_tokenizer
from generation.generate import generate
from generation.settings import Sampling
from tests.contrib.test_llama_cpp_vocab import ALPHABET, KNOWN

xllamacpp = pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install xllamacpp")
pytest.importorskip("gguf", reason="writing GGUF files needs the gguf package: pip install gguf")
from contrib.gguf_file import write_gguf  # noqa: E402 - it imports gguf
from tests.contrib.test_gguf import CASES  # noqa: E402

pytestmark = pytest.mark.slow

TOLERANCES = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 3e-3}
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


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def model(request, make_decoder, ours, tmp_path) -> Path:
    """A random model with grouped queries, and a tokenizer that this project has trained on much text."""
    decoder = make_decoder(vocab_size=2000, max_position_embeddings=256, **request.param)
    (decoder.lm_head or decoder.embed_tokens).weight.data[:7] *= 0.2  # special tokens: no text ends
    save_pretrained(decoder, tmp_path / "model", bos_token_id=ours.bos_id, eos_token_id=ours.eos_id)
    ours.save(tmp_path / "model")
    return tmp_path / "model"


@torch.no_grad()
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_model_gives_the_same_ids_text_and_perplexity(model, tmp_path, dtype):
    tokenizer, decoder = load_tokenizer(model), load_pretrained(model).eval()
    other = LlamaCpp(model, tmp_path, dtype)
    for parameter in decoder.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.to(getattr(torch, dtype)).float()
    assert [other.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert other.encode("def", bos=True) == encode_prompt(tokenizer, "def")
    if dtype == "float32":  # rounding activations changes some of the closest decisions
        for prompt in ("", "def ", "The quick", "import os\n"):
            ids = encode_prompt(tokenizer, prompt)
            new_tokens = generate(decoder, [ids], max_new_tokens=64, sampling=Sampling(temperature=0))
            tokens = [token.id for token in new_tokens]
            answer = other.ask("/completion", prompt=ids, n_predict=64, temperature=0, return_tokens=True)
            assert answer["tokens"] == tokens and answer["content"] == tokenizer.decode(tokens)
    ids = encode_prompt(tokenizer, PASSAGE)
    expected = F.cross_entropy(decoder(torch.tensor([ids]))[0, :-1].double(), torch.tensor(ids[1:])).exp().item()
    total = 0
    for i in range(1, len(ids)):
        answer = other.ask("/completion", prompt=ids[:i], n_predict=1, temperature=0, n_probs=2000)
        likely = answer["completion_probabilities"][0]["top_logprobs"]
        total += next(token["logprob"] for token in likely if token["id"] == ids[i])
    assert math.exp(-total / (len(ids) - 1)) == pytest.approx(expected, rel=TOLERANCES[dtype])


def test_qwens_tokenizer_gives_the_same_ids(make_decoder, qwen, qwen_folder, shared, tmp_path, capsys):
    model = shutil.copytree(qwen_folder, tmp_path / "model")
    save_pretrained(make_decoder(vocab_size=151936, attention_bias=True), model, eos_token_id=151645)
    other = LlamaCpp(model, tmp_path, "float16")
    assert "NFC" in capsys.readouterr().err
    texts = [text for text in TEXTS if unicodedata.is_normalized("NFC", text)]
    texts += (shared / "qwen2_5" / "golden_strings.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    assert [other.encode(text) for text in texts] == [qwen.encode(text) for text in texts]
    assert other.encode("hi", bos=True) == qwen.encode("hi")  # no BOS


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
