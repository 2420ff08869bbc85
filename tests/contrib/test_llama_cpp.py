"""Tokenizers in llama.cpp's terms; and in llama.cpp itself, whose ids are the same.

For the latter: `pip install xllamacpp gguf` (llama.cpp, built for Python), then
`python -m pytest -m slow tests/contrib/test_llama_cpp.py`. llama.cpp is asked through its own HTTP server, on an
address of this machine only. `test_same.py` compares logits and greedy tokens with it.
"""

import json
import shutil
import unicodedata
import unittest.mock
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from checkpoints.pretrained import save_pretrained
from contrib.same import TEXTS
from data.tokenizer import load_tokenizer
from data.train_tokenizer import train_tokenizer
from errors import UserError

pytest.importorskip("gguf", reason="needs the gguf package: pip install gguf")
from contrib.gguf_file import write_gguf
from contrib.llama_cpp_vocab import PRE_TOKENIZERS, WORDS, add_vocabulary

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
ALPHABET = sorted(ByteLevel.alphabet())


class Vocabulary(dict):
    """In the place of a GGUFWriter: what a tokenizer makes it write, under the names of its methods."""

    def __init__(self, tokenizer, vocab_size: int):
        with unittest.mock.patch("contrib.llama_cpp_vocab.note") as note:
            add_vocabulary(self, tokenizer, vocab_size)
        self.notes = [call.args[0] for call in note.call_args_list]

    def __getattr__(self, name: str) -> Callable:
        return lambda value: self.update({name.removeprefix("add_"): value})


def words(regex: str, behavior: str = "isolated") -> pre_tokenizers.Sequence:
    """Split by the expression, then map bytes to characters."""
    bytes_alone = ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), behavior), bytes_alone])


def byte_level(folder: Path, pre_tokenizer, normalizer=None, alphabet=ALPHABET, ignore_merges=False, **model):
    """A byte-level tokenizer of 256 bytes, two merges, a special token and an added token that is none."""
    vocabulary = {character: i for i, character in enumerate([*alphabet, "ab", "abc"])}
    bpe = tokenizers.models.BPE(vocabulary, [("a", "b"), ("ab", "c")], ignore_merges=ignore_merges, **model)
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["<think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    return load_tokenizer(folder)


PLAIN, SINGLE_DIGITS = ByteLevel(add_prefix_space=False), pre_tokenizers.Digits(individual_digits=True)
KNOWN = {
    "qwen2": (words(WORDS % r"\p{N}"), False),
    "llama-bpe": (words(WORDS % r"\p{N}{1,3}"), True),
    "gpt-2": (PLAIN, False),
    "smollm": (pre_tokenizers.Sequence([SINGLE_DIGITS, PLAIN]), False),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_way_to_split_text_has_its_name(tmp_path, name):
    pre_tokenizer, ignore_merges = KNOWN[name]
    vocabulary = Vocabulary(byte_level(tmp_path, pre_tokenizer, ignore_merges=ignore_merges), 300)
    assert (vocabulary["tokenizer_pre"], vocabulary["token_merges"], vocabulary.notes) == (name, ["a b", "ab c"], [])
    assert vocabulary["token_types"][258:262] == [CONTROL, USER_DEFINED, UNUSED, UNUSED]


UNKNOWN = {
    "another expression": words(WORDS % r"\p{N}{1,2}"),
    "an expression that is removed": words(WORDS % r"\p{N}", behavior="removed"),
    "a space in front": ByteLevel(add_prefix_space=True),
    "groups of digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(), PLAIN]),
    "no expression": ByteLevel(add_prefix_space=False, use_regex=False),
}


@pytest.mark.parametrize("pre_tokenizer", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_an_unknown_way_to_split_text_is_refused(tmp_path, pre_tokenizer):
    with pytest.raises(UserError, match="it splits text in a way that is not known here"):
        Vocabulary(byte_level(tmp_path, pre_tokenizer), 300)


def test_other_normalizers_and_encodings_are_refused(tmp_path):
    assert "drops bytes" in Vocabulary(byte_level(tmp_path, PLAIN, alphabet=ALPHABET[1:]), 300).notes[0]
    with pytest.raises(UserError, match="normalizer Lowercase"):
        Vocabulary(byte_level(tmp_path, PLAIN, normalizers.Lowercase()), 300)
    with pytest.raises(UserError, match="unknown bytes"):
        Vocabulary(byte_level(tmp_path, PLAIN, alphabet=ALPHABET[1:], unk_token="ab"), 300)
    with pytest.raises(UserError, match="marks the parts of words or is random"):
        Vocabulary(byte_level(tmp_path, PLAIN, dropout=0.1), 300)


def test_a_sentencepiece_model_keeps_its_pieces_scores_and_types(tmp_path):
    ours = train_tokenizer(["some text  to train on, and more text"] * 9, 290)
    ours.save(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<pad>": 290}')
    vocabulary = Vocabulary(load_tokenizer(tmp_path), 300)
    processor = sentencepiece.SentencePieceProcessor(model_proto=ours.files["tokenizer.model"])
    assert (vocabulary["tokenizer_model"], vocabulary["add_space_prefix"], vocabulary.notes) == ("llama", False, [])
    pieces = [processor.id_to_piece(i) for i in range(290)]
    assert vocabulary["token_list"] == [*pieces, "<pad>"] + [f"[PAD{i}]" for i in range(291, 300)]
    assert vocabulary["token_scores"][:290] == [processor.get_score(i) for i in range(290)]
    assert vocabulary["token_types"][:8] == [2, 3, 3, 3, 3, 3, 3, 6] and {*vocabulary["token_types"][7:263]} == {6}
    assert {*vocabulary["token_types"][263:290]} == {1}
    assert vocabulary["token_types"][290:] == [USER_DEFINED] + [UNUSED] * 9
    (tmp_path / "tokenizer.model").write_bytes(train_tokenizer(["other words"] * 9, 275).files["tokenizer.model"])
    with pytest.raises(UserError, match=r"tokenizer\.json gives other ids than its tokenizer\.model"):
        Vocabulary(load_tokenizer(tmp_path), 300)


def test_a_model_that_adds_and_drops_spaces_says_so(llama):
    vocabulary = Vocabulary(llama, 512)
    assert vocabulary["add_space_prefix"]
    assert [note for note in vocabulary.notes if "drops extra spaces" in note] == vocabulary.notes != []


def test_special_tokens_that_llama_cpp_finds_in_plain_text_are_named():
    # `<s` becomes a piece, and `<s` + `>` is the text of BOS.
    tags = train_tokenizer(["<s <s <s <sp <sp ></ > >"] * 9, 273)
    assert any(note.startswith("llama.cpp reads the texts <s> as") for note in Vocabulary(tags, 273).notes)


def test_qwens_tokenizer_is_known_to_llama_cpp_with_all_its_tokens_and_merges(qwen, qwen_folder):
    vocabulary = Vocabulary(qwen, 151936)
    content = json.loads((qwen_folder / "tokenizer.json").read_text(encoding="utf-8"))
    names = ("tokenizer_model", "tokenizer_pre", "add_space_prefix")
    assert [vocabulary[name] for name in names] == ["gpt2", "qwen2", False]
    assert all(vocabulary["token_list"][i] == token for token, i in content["model"]["vocab"].items())
    assert vocabulary["token_merges"] == content["model"]["merges"]
    assert vocabulary["token_types"][:151643] == [1] * 151643
    for i, token, kind in ((151645, "<|im_end|>", CONTROL), (151657, "<tool_call>", USER_DEFINED)):
        assert (vocabulary["token_list"][i], vocabulary["token_types"][i]) == (token, kind)
    assert (vocabulary["token_list"][151665], vocabulary["token_types"][151665:]) == ("[PAD151665]", [UNUSED] * 271)
    assert [note for note in vocabulary.notes if "NFC" in note] == vocabulary.notes != []


class LlamaCpp:
    """A model that llama.cpp has loaded: the checkpoint as a GGUF file, in `folder`; float32 cache, one thread."""

    def __init__(self, checkpoint: Path, folder: Path, dtype: str = "auto"):
        xllamacpp = pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install xllamacpp")
        write_gguf(checkpoint, folder / "model.gguf", dtype)
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(folder / "model.gguf")
        parameters.n_ctx, parameters.n_parallel, parameters.warmup = 256, 1, False
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xllamacpp.Server(parameters)

    def encode(self, text: str, bos: bool = False) -> list[int]:
        question = json.dumps({"content": text, "add_special": bos, "parse_special": False}).encode()
        address, headers = f"{self.server.listening_address}/tokenize", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(address, question, headers), timeout=120) as answer:
            return json.load(answer)["tokens"]


@pytest.mark.slow
def test_qwens_tokenizer_gives_the_same_ids_in_llama_cpp(make_decoder, qwen, qwen_folder, shared, tmp_path, capsys):
    model = shutil.copytree(qwen_folder, tmp_path / "model")
    save_pretrained(make_decoder(vocab_size=151936, attention_bias=True), model, eos_token_id=151645)
    other = LlamaCpp(model, tmp_path, "float16")
    assert "NFC" in capsys.readouterr().err
    texts = [text for text in TEXTS if unicodedata.is_normalized("NFC", text)]
    texts += (shared / "qwen2_5" / "golden_strings.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    assert [other.encode(text) for text in texts] == [qwen.encode(text) for text in texts]
    assert other.encode("hi", bos=True) == qwen.encode("hi")  # no BOS


@pytest.mark.slow
@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_gives_the_same_ids_in_llama_cpp(make_decoder, library_text, tmp_path, name):
    split, ignore_merges = KNOWN[name]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=ignore_merges))
    made.pre_tokenizer = split
    made.decoder = tokenizers.decoders.ByteLevel()
    options = dict(special_tokens=["<|end|>"], initial_alphabet=ALPHABET, show_progress=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=3000, **options)
    text = library_text[::8]
    made.train_from_iterator(text, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    save_pretrained(make_decoder(vocab_size=3000), tmp_path)
    tokenizer, other = load_tokenizer(tmp_path), LlamaCpp(tmp_path, tmp_path)
    texts = TEXTS + [passage for document in text[:20] for passage in (document[:3000], document[-500:])]
    assert [other.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]
