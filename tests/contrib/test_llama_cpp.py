"""Tokenizers in llama.cpp itself: the same ids. `test_same.py` compares logits and greedy tokens with it.

`pip install xllamacpp gguf` (llama.cpp, built for Python); `python -m pytest -m slow tests/contrib/test_llama_cpp.py`.
llama.cpp is asked through its own HTTP server, on an address of this machine only.
"""

import json
import shutil
import unicodedata
import urllib.request
from pathlib import Path

import pytest
import tokenizers

from checkpoints.pretrained import save_pretrained
from contrib.llama_cpp_vocab import PRE_TOKENIZERS
from contrib.same import TEXTS
from data.tokenizer import load_tokenizer
from tests.contrib.test_llama_cpp_vocab import ALPHABET, KNOWN

xllamacpp = pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install xllamacpp")
pytest.importorskip("gguf", reason="writing GGUF files needs the gguf package: pip install gguf")
from contrib.gguf_file import write_gguf  # noqa: E402 - it imports gguf

pytestmark = pytest.mark.slow


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
