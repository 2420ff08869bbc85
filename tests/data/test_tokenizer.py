"""Text to ids and back: exactly, and with the same ids wherever a tokenizer goes."""

import json
import random
import shutil
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contrib.llama_cpp_vocab import llama_cpp_vocabulary
from data.tokenizer import (
    JsonTokenizer,
    SentencePieceTokenizer,
    VocabularyTooLarge,
    check_vocabulary,
    load_tokenizer,
    train_tokenizer,
)
from data.tokenizer_json import NORMAL, Model, UnsupportedTokenizer, merges, read_model, tokenizer_json
from errors import UserError

# Every Unicode scalar value but U+2581, and the texts that tokenizers often get wrong.
SCALARS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"))
TRAPS = st.sampled_from(
    "\n|\r\n|\t|\0| |  |             |    def |\xa0|\u2028|\ufeff|\u200b|\ufffd|e\u0301|é|😀|👩‍👩‍👧|"
    "</s>|<s>|<unk>|<0x0A>|====|----|#########|__|self.|return|12".split("|")
)
TEXTS = st.lists(st.one_of(SCALARS, TRAPS), max_size=30).map("".join)


@settings(max_examples=400, deadline=None)
@given(text=TEXTS)
@example(text="\0\t \r\n\x7f\x80\U0010ffff\ud7ff\ue000\ufffe")
def test_the_round_trip_is_exact_for_any_text(ours, text):
    ids = ours.encode(text)
    assert ours.decode(ids) == text
    assert all(type(i) is int and 2 < i < ours.vocab_size for i in ids), "no BOS, EOS or unknown, whatever the text"


def test_u2581_comes_back_as_a_space(ours):
    assert ours.decode(ours.encode("a▁b")) == "a b"


def test_documents_of_the_default_corpus_come_back(ours, library_text):
    some = library_text[1::3]
    assert [ours.decode(ids) for ids in ours.encode_batch(some)] == some


def test_a_batch_is_each_text_alone(ours, llama, qwen):
    texts = ["", "one", "two  words", "\n", "ü" * 50]
    for tokenizer in (ours, llama, qwen):
        assert [list(ids) for ids in tokenizer.encode_batch(texts)] == [tokenizer.encode(text) for text in texts]


def test_newlines_and_tabs_are_bytes_and_never_part_of_a_piece(ours):
    assert len(ours.encode("\n")) == len(ours.encode("\t")) == 1
    assert ours.encode("a\n\n\tb") == ours.encode("a") + ours.encode("\n") * 2 + ours.encode("\t") + ours.encode("b")


def test_runs_of_spaces_are_short(ours):
    assert len(ours.encode(" " * 8)) == 1


def test_decoding_leaves_out_special_tokens_and_unknown_ids(ours):
    assert ours.decode([ours.bos_id, *ours.encode("text"), 10**6, -1, ours.eos_id]) == "text"


def test_training_gives_the_vocabulary_that_was_asked_for_and_the_same_file_each_time(tmp_path, library_text):
    made = [train_tokenizer(library_text[:40], 700, tmp_path / str(i)) for i in range(2)]
    assert made[0].vocab_size == 700
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    assert made[0].hash == made[1].hash == load_tokenizer(tmp_path / "0").hash
    assert (made[0].bos_id, made[0].eos_id) == (1, 2)


def test_training_takes_tabs_long_lines_and_nul_characters(tmp_path):
    text = "\t".join(["abracadabra"] * 20_000) + "\n" + "simsalabim " * 20_000 + "\0" + "hocuspocus " * 20_000
    tokenizer = train_tokenizer([text], 310, tmp_path / "t.model")
    for word in ("abracadabra", "simsalabim", "hocuspocus"):
        assert len(tokenizer.encode(word)) <= 2, "the line was not left out"


def test_a_text_too_small_for_the_vocabulary_says_how_large_it_can_be(tmp_path):
    with pytest.raises(VocabularyTooLarge, match="too small for a vocabulary of 4,096") as caught:
        train_tokenizer(["a small text, so small"], 4096, tmp_path / "t.model")
    largest = caught.value.maximum
    assert train_tokenizer(["a small text, so small"], largest, tmp_path / "t.model").vocab_size == largest
    with pytest.raises(UserError):
        train_tokenizer(["a small text, so small"], largest + 1, tmp_path / "t.model")
    with pytest.raises(UserError, match=r"too small for the characters .*; set --vocab-size to \d+ or more"):
        train_tokenizer(["a small text, so small"], 100, tmp_path / "t.model")
    with pytest.raises(UserError, match="give more text"):
        train_tokenizer(["\n\n"], 4096, tmp_path / "t.model")


def test_training_prints_nothing(tmp_path, library_text, capfd):
    train_tokenizer(library_text[:40], 700, tmp_path / "t.model")
    assert capfd.readouterr() == ("", "")


# The same ids in Hugging Face's libraries


@pytest.fixture(scope="module")
def saved(ours, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    ours.save(folder)
    return folder


@pytest.fixture(scope="module")
def fast(saved) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


@settings(max_examples=400, deadline=None)
@given(text=TEXTS)
def test_tokenizer_json_gives_the_same_ids_and_text_for_any_text(ours, fast, text):
    encoded = fast.encode(text).ids
    assert encoded == [ours.bos_id, *ours.encode(text)]
    assert fast.decode(encoded) == text


def test_tokenizer_json_gives_the_same_ids_for_real_text_and_runs_of_characters(ours, fast, library_text):
    for text in library_text[::4]:
        assert fast.encode(text).ids[1:] == ours.encode(text)
    for length in range(1, 101):
        for run in (" ", "\n", "=", "-", "a", "ab", "\t", "é", "  x"):
            assert fast.encode(run * length).ids[1:] == ours.encode(run * length), (run, length)


def test_tokenizer_json_gives_the_same_ids_where_pieces_overlap(ours, fast):
    pieces = [piece.replace("▁", " ") for piece, _, kind in read_model(ours._model).pieces if kind == NORMAL]
    generator = random.Random(0)
    for _ in range(5000):
        chosen = generator.choices(pieces, k=generator.randint(2, 6))
        # overlap: the end of one piece is the start of the next, which is where merges compete
        text = "".join(one[: generator.randint(1, len(one))] for one in chosen) * generator.randint(1, 4)
        assert fast.encode(text).ids[1:] == ours.encode(text), text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", min_size=2, max_size=5), min_size=1, max_size=12, unique=True), st.data())
def test_one_pair_per_piece_is_enough_for_any_ranking_of_pieces(ranked, draw):
    """Against a plain definition of SentencePiece's rule, with vocabularies that no training would give."""
    rank = {piece: i for i, piece in enumerate(ranked)}
    pieces = [("a", 0.0, NORMAL), ("b", 0.0, NORMAL)] + [(piece, -float(i + 1), NORMAL) for piece, i in rank.items()]
    pairs = merges(Model(pieces, False, False))
    vocabulary = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    merged = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
    text = draw.draw(st.text("ab", min_size=1, max_size=24))
    symbols = list(text)
    while found := [(rank[a + b], i) for i, (a, b) in enumerate(zip(symbols, symbols[1:])) if a + b in rank]:  # noqa: B905, RUF007
        i = min(found)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    assert merged.encode(text).tokens == symbols


@pytest.mark.parametrize("model_type", [None, "llama", "qwen3", "stablelm"])
def test_autotokenizer_gives_the_same_ids_in_every_family(ours, saved, tmp_path, model_type):
    ours.save(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (auto.bos_token_id, auto.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert auto.add_prefix_space is False  # what llama.cpp's converter reads
    texts = ["", "a", " a", "</s><s><unk>", "<0x0A>\n", "\t\tif x:\r\n", "Grüße 😀", "a .  b , c n't", " " * 33, "\0"]
    for text in texts:
        assert auto(text).input_ids == [ours.bos_id, *ours.encode(text)], text
        assert auto.decode(ours.encode(text)) == text


def test_that_no_space_is_added_is_written_only_where_it_is_true(saved, llama, tmp_path):
    assert json.loads((saved / "tokenizer_config.json").read_text())["add_prefix_space"] is False
    llama.save(tmp_path)
    assert "add_prefix_space" not in json.loads((tmp_path / "tokenizer_config.json").read_text())


def test_a_saved_tokenizer_loads_as_the_same_tokenizer_and_saves_the_same_files(ours, saved, tmp_path):
    again = load_tokenizer(saved)
    assert isinstance(again, SentencePieceTokenizer)
    assert (again.hash, again.bos_id, again.eos_id) == (ours.hash, ours.bos_id, ours.eos_id)
    again.save(tmp_path)
    names = {"tokenizer.model", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all((tmp_path / name).read_bytes() == (saved / name).read_bytes() for name in names)
    again.save(saved)  # onto itself: nothing is lost
    assert load_tokenizer(saved).hash == ours.hash


# Tokenizers that were given


LLAMA_TEXTS = st.lists(st.one_of(SCALARS, TRAPS, st.sampled_from(["Once upon", "the ", "▁"])), max_size=20).map("".join)


def test_a_bare_model_has_bos_and_drops_the_space_in_front_only_at_the_start(llama):
    assert (llama.vocab_size, llama.bos_id, llama.eos_id) == (512, 1, 2)
    ids = llama.encode("Once upon a time")
    assert llama.decode(ids) == llama.decode([llama.bos_id, *ids]) == "Once upon a time"
    assert llama.decode(ids + ids) == "Once upon a time Once upon a time"


@settings(max_examples=300, deadline=None)
@given(text=LLAMA_TEXTS)
def test_a_bare_model_is_saved_with_a_tokenizer_json_of_equal_ids(llama, text):
    fast = tokenizers.Tokenizer.from_str(llama._tokenizer_json)
    fast.encode_special_tokens = True
    ids = llama.encode(text)
    assert fast.encode(text).ids == [llama.bos_id, *ids]
    if "▁" not in text:
        assert fast.decode(ids) == llama.decode(ids)


def unigram_model(path: Path) -> Path:
    import sentencepiece

    words = ["the quick brown fox", "jumps over the lazy dog", "and runs away"] * 50
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(words), model_writer=file, vocab_size=32, model_type="unigram", minloglevel=2
        )
    return path


def test_a_model_without_an_equal_tokenizer_json_is_refused_by_transformers(tmp_path):
    unigram = load_tokenizer(unigram_model(tmp_path / "unigram.model"))
    with pytest.raises(UnsupportedTokenizer):
        tokenizer_json((tmp_path / "unigram.model").read_bytes(), 1)
    (tmp_path / "out").mkdir()
    unigram.save(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert load_tokenizer(tmp_path / "out").encode("the lazy fox") == unigram.encode("the lazy fox")
    with pytest.raises(ValueError, match="Couldn't instantiate"):
        transformers.AutoTokenizer.from_pretrained(tmp_path / "out")


def test_qwen_gives_the_golden_ids(qwen, shared):
    with open(shared / "qwen2_5" / "golden_strings.inp", encoding="utf-8", newline="") as file:
        strings = file.read().split("\n__ggml_vocab_test__\n")
    with open(shared / "qwen2_5" / "golden_ids.out", encoding="utf-8") as file:
        expected = [[int(one) for one in line.split()] for line in file.read().split("\n")]
    assert len(strings) == len(expected) == 47
    for text, ids in zip(strings, expected, strict=True):
        assert qwen.encode(text) == ids, text
        assert qwen.decode(ids) == text


def test_qwen_has_no_bos_and_its_own_eos_and_special_tokens_are_text(qwen):
    assert qwen.bos_id is None
    assert qwen.eos_id == 151645
    assert qwen.eos_id not in qwen.encode("<|im_end|>") and qwen.decode(qwen.encode("<|im_end|>")) == "<|im_end|>"
    assert qwen.vocab_size == 151665


def test_qwens_tokenizer_is_known_to_llama_cpp_with_all_its_tokens_and_merges(qwen, qwen_folder):
    found = llama_cpp_vocabulary(qwen, 151936)
    content = json.loads((qwen_folder / "tokenizer.json").read_text(encoding="utf-8"))
    assert (found.kind, found.pre_tokenizer, found.add_space_prefix) == ("gpt2", "qwen2", False)
    assert len(found.tokens) == len(found.types) == 151936
    assert all(found.tokens[i] == token for token, i in content["model"]["vocab"].items())
    assert found.merges == content["model"]["merges"]
    assert (found.tokens[151645], found.types[151645]) == ("<|im_end|>", 3)
    assert (found.tokens[151657], found.types[151657]) == ("<tool_call>", 4)
    assert found.types[:151643] == [1] * 151643
    assert (found.tokens[151665], found.types[151665:]) == ("[PAD151665]", [5] * 271)
    assert [note for note in found.notes if "NFC" in note] == found.notes != []


def test_a_given_folder_is_saved_by_copying_its_files(qwen, qwen_folder, tmp_path):
    qwen.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in qwen_folder.iterdir()}
    assert load_tokenizer(tmp_path).hash == qwen.hash


def edited(saved: Path, folder: Path, generation: dict | None = None, **changes) -> Path:
    """A folder with our tokenizer.json alone and another configuration."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((saved / "tokenizer.json").read_bytes())
    config = json.loads((saved / "tokenizer_config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_bos_follows_the_configuration_and_then_the_post_processor(saved, tmp_path):
    assert load_tokenizer(edited(saved, tmp_path / "a", add_bos_token=False)).bos_id is None
    assert load_tokenizer(edited(saved, tmp_path / "b", add_bos_token=True)).bos_id == 1
    assert load_tokenizer(edited(saved, tmp_path / "c", add_bos_token=...)).bos_id == 1
    changed = load_tokenizer(edited(saved, tmp_path / "d", add_bos_token=True, bos_token={"content": "<unk>"}))
    assert changed.bos_id == 0
    plain = edited(saved, tmp_path / "e", add_bos_token=...)
    content = json.loads((plain / "tokenizer.json").read_text(encoding="utf-8")) | {"post_processor": None}
    (plain / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert load_tokenizer(plain).bos_id is None


def test_eos_follows_the_tokenizer_configuration_and_then_the_generation_configuration(saved, tmp_path):
    assert load_tokenizer(edited(saved, tmp_path / "a", eos_token={"content": "<unk>"})).eos_id == 0
    assert load_tokenizer(edited(saved, tmp_path / "b", {"eos_token_id": [7, 8]}, eos_token=None)).eos_id == 7
    with pytest.raises(UserError, match="eos_token"):
        load_tokenizer(edited(saved, tmp_path / "c", eos_token=None))


def test_a_folder_with_more_tokens_in_its_json_is_read_from_there(saved, tmp_path):
    folder = edited(saved, tmp_path / "more")
    (folder / "tokenizer.model").write_bytes((saved / "tokenizer.model").read_bytes())
    assert isinstance(load_tokenizer(folder), SentencePieceTokenizer)
    more = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    more.add_tokens(["<extra>"])
    more.save(str(folder / "tokenizer.json"))
    assert isinstance(load_tokenizer(folder), JsonTokenizer)
    (folder / "tokenizer.model").write_bytes(b"not a model of SentencePiece")
    assert isinstance(load_tokenizer(folder), JsonTokenizer)


def test_files_that_are_no_tokenizers_are_named(tmp_path):
    for name, content in (("a.model", b"nothing"), ("b.json", b"{}"), ("c.model", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            load_tokenizer(tmp_path / name)
    for path in (tmp_path, tmp_path / "missing", "~nobody-of-this-name/x"):
        with pytest.raises(UserError, match="no tokenizer at"):
            load_tokenizer(path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["[]", "{"])
def test_a_configuration_that_is_no_json_object_is_named(saved, tmp_path, name, content):
    folder = edited(saved, tmp_path / "broken")
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=f"{name} is not readable JSON"):
        load_tokenizer(folder)


@pytest.mark.parametrize("kind", ["sentencepiece", "json"])
def test_a_tokenizer_is_saved_as_it_was_opened_although_its_folder_is_gone(saved, tmp_path, kind):
    folder = Path(shutil.copytree(saved, tmp_path / "before"))
    if kind == "json":
        (folder / "tokenizer.model").unlink()
    expected = {path.name: path.read_bytes() for path in folder.iterdir()}
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, JsonTokenizer) == (kind == "json")
    shutil.rmtree(folder)
    (tmp_path / "after").mkdir()
    tokenizer.save(tmp_path / "after")
    assert {path.name: path.read_bytes() for path in (tmp_path / "after").iterdir()} == expected


BROKEN = {
    "an unknown token that is not in the vocabulary": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"},
    "no tokens": {"type": "BPE", "vocab": {}, "merges": []},
    "a prefix longer than its tokens": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": ["a b"],
        "continuing_subword_prefix": "long prefix",
    },
}


@pytest.mark.parametrize("model", BROKEN.values(), ids=BROKEN.keys())
def test_a_tokenizer_that_contradicts_itself_is_one_line(saved, tmp_path, model):
    """The library raises plain Exception, or even a panic of Rust's, which is no Exception."""
    folder = edited(saved, tmp_path / "broken")
    fields = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    fields |= {"model": model, "added_tokens": [], "post_processor": None, "decoder": None, "normalizer": None}
    (folder / "tokenizer.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(UserError, match=r"does not work in the tokenizers library|names no end-of-sequence"):
        load_tokenizer(folder).encode("xyz")


def test_ctrl_c_while_a_tokenizer_is_trained_is_ctrl_c(tmp_path):
    def texts():
        yield "some text " * 100
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(texts(), 300, tmp_path / "tokenizer.model")


def test_a_sentencepiece_model_with_pieces_that_are_not_utf8_is_refused_when_it_is_opened(ours, tmp_path):
    piece = ours._processor.id_to_piece(400).encode("utf-8")
    (tmp_path / "tokenizer.model").write_bytes(ours.content.replace(piece, b"\xf4" * len(piece)))
    with pytest.raises(UserError, match=r"tokenizer\.model is not a SentencePiece model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("eos", [True, 5, 1.5, [1], {"content": 5}, "no such token"])
def test_an_eos_token_that_is_no_token_of_the_vocabulary_is_named(saved, tmp_path, eos):
    folder = edited(saved, tmp_path / "broken", eos_token=eos)
    (folder / "generation_config.json").write_text('{"eos_token_id": ["x", null]}')
    with pytest.raises(UserError, match="names no end-of-sequence token"):
        JsonTokenizer(folder / "tokenizer.json")


def test_a_vocabulary_that_does_not_fit_the_model_is_refused(ours):
    check_vocabulary(ours, 2000)
    check_vocabulary(ours, 2048)
    advice = "trained model needs the tokenizer .* a new one --vocab-size 2,000 or more"
    with pytest.raises(UserError, match=f"2,000 ids but the model only 1,999; .*{advice}"):
        check_vocabulary(ours, 1999)
