"""Text to ids and back: exactly, and with the same ids wherever a tokenizer goes."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from data.tokenizer import check_vocabulary, load_tokenizer
from data.tokenizer_json import PIECE, merges
from data.train_tokenizer import train_tokenizer
from errors import UserError
from tests.conftest import edit_json

# Every Unicode scalar value but U+2581, and the texts that tokenizers often get wrong.
SCALARS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"))
TRAPS = st.sampled_from(
    "\n|\r\n|\t|\0| |  |             |    def |\xa0|\u2028|\ufeff|\u200b|\ufffd|e\u0301|é|😀|👩‍👩‍👧|"
    "</s>|<s>|<unk>|<0x0A>|====|----|#########|__|self.|return|12".split("|")
)
TEXTS = st.lists(st.one_of(SCALARS, TRAPS, st.sampled_from(["Once upon", "the ", "▁"])), max_size=20).map("".join)


def test_training_prints_nothing_and_gives_the_same_file_each_time(tmp_path, library_text, capfd):
    made = [train_tokenizer(library_text[:40], 700) for _ in range(2)]
    made[0].save(tmp_path)
    assert made[0].files == made[1].files == load_tokenizer(tmp_path).files
    assert made[0].hash == made[1].hash == load_tokenizer(tmp_path / "tokenizer.model").hash
    assert (made[0].vocab_size, made[0].bos_id, made[0].eos_id) == (700, 1, 2) and capfd.readouterr() == ("", "")


def test_training_takes_tabs_long_lines_and_nul_characters():
    text = "\t".join(["abracadabra"] * 20_000) + "\n" + "simsalabim " * 20_000 + "\0" + "hocuspocus " * 20_000
    tokenizer = train_tokenizer([text], 310)
    for word in ("abracadabra", "simsalabim", "hocuspocus"):
        assert len(tokenizer.encode(word)) <= 2, "the line was not left out"


def test_tokens_for_conversations_are_reserved_and_never_come_from_text(ours):
    tokens = [ours.added_tokens[i].content for i in range(7)]
    assert tokens == ["<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    assert all(token.special for token in ours.added_tokens.values())
    text = "<|user|>Hi<|end|>"
    assert min(ours.encode(text)) > 6 and ours.encode_special(text).ids[::6] == [4]
    assert ours.decode([ours.bos_id, *ours.encode("text"), 10**6, ours.eos_id]) == "text"


def test_typed_tokens_stay_text_while_another_thread_reads_special_tokens(ours):
    text = "<|end|> typed " * 200
    expected = ours.encode(text), ours.encode_special(text).ids
    with ThreadPoolExecutor() as pool:
        special = [pool.submit(ours.encode_special, text) for _ in range(50)]
        plain = [pool.submit(ours.encode, text) for _ in range(50)]
    assert all(one.result() == expected[0] for one in plain) and expected[0] != expected[1]
    assert all(one.result().ids == expected[1] for one in special)


def processor(tokenizer) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=tokenizer.files["tokenizer.model"])


@settings(max_examples=400, deadline=None)
@given(text=TEXTS)
@example(text="\0\t \r\n\x7f\x80\U0010ffff\ud7ff\ue000\ufffe")
@example(text=Path(__file__).read_text(encoding="utf-8").replace("▁", ""))
@pytest.mark.parametrize("kind", ["ours", "llama"])
def test_ids_and_texts_are_those_of_sentencepiece_for_any_text_and_ours_come_back_exactly(kind, text, request):
    tokenizer = request.getfixturevalue(kind)
    trained = processor(tokenizer)
    ids = tokenizer.encode(text)
    assert ids == trained.encode(text)
    if kind == "ours":
        assert tokenizer.decode(ids) == text.replace("▁", " ")
        assert all(type(i) is int and 6 < i < tokenizer.vocab_size for i in ids), "no special token, whatever the text"
    if kind == "ours" or "▁" not in text:  # llama's decoding drops more than one space in front, if there is one
        assert tokenizer.decode(ids) == trained.decode(ids)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(1, 300), max_size=20))
def test_bytes_that_are_no_character_do_not_change_the_text_around_them(ours, ids):
    assert ours.decode(ids) == processor(ours).decode(ids)


@settings(max_examples=600, deadline=None)
@given(st.lists(st.text("ab", min_size=2, max_size=5), max_size=12, unique=True), st.sets(st.integers(3, 9)), st.data())
def test_one_pair_per_piece_is_enough_for_any_ranking_of_pieces(ranked, tied, draw):
    """Against a plain definition of SentencePiece's rule, with vocabularies that no training would give: runs of "a"
    may share one score, as the runs of spaces of LLaMA 2 do."""
    scores = {"a": 0.0, "b": 0.0} | {piece: -float(i + 1) for i, piece in enumerate(ranked)}
    scores |= dict.fromkeys(["a" * size for size in {2} | tied], draw.draw(st.sampled_from([-0.5, -3.5, -99.0])))
    model = ModelProto(pieces=[PIECE(piece=piece, score=score, type=PIECE.NORMAL) for piece, score in scores.items()])
    vocabulary = {piece: i for i, piece in enumerate(scores)}
    merged = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges(model)))
    text = draw.draw(st.text(st.sampled_from("aaab"), min_size=1, max_size=40))
    symbols = list(text)
    while pairs := [(-scores[a + b], i) for i, (a, b) in enumerate(zip(symbols, symbols[1:])) if a + b in scores]:  # noqa: B905, RUF007
        i = min(pairs)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    assert merged.encode(text).tokens == symbols


@pytest.mark.parametrize("tied", [("ab", "ba"), ("aa", "bb"), ("aa", "aab"), ("aaa", "aaaa")])
def test_pieces_of_the_same_score_that_are_no_runs_of_two_and_more_are_refused(tied):
    pieces = [PIECE(piece=piece, score=-1.0 * (len(piece) > 1), type=PIECE.NORMAL) for piece in ("a", "b", *tied)]
    with pytest.raises(ValueError, match="the same score"):
        merges(ModelProto(pieces=pieces))


@pytest.mark.parametrize("name", ["ours", "llama", "qwen"])
def test_a_saved_tokenizer_loads_as_the_same_tokenizer_and_saves_the_same_files(name, tmp_path, request):
    tokenizer, folders = request.getfixturevalue(name), [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        tokenizer.save(folder)
        again = load_tokenizer(folder)
        assert (again.hash, again.bos_id, again.eos_id) == (tokenizer.hash, tokenizer.bos_id, tokenizer.eos_id)
        tokenizer = again
    one, two = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert one == two and {"tokenizer.json", "tokenizer_config.json"} <= set(one)


def test_a_folder_with_a_model_alone_keeps_its_configuration_and_its_chat_template(llama, tmp_path):
    assert (llama.vocab_size, llama.bos_id, llama.eos_id) == (512, 1, 2)
    (tmp_path / "tokenizer.model").write_bytes(llama.files["tokenizer.model"])
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false, "chat_template": "x"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_id is None and tokenizer.config["chat_template"] == "x" and tokenizer.eos_id == 2
    assert llama.config["split_special_tokens"] and not tokenizer.config["split_special_tokens"]  # <s> of a template
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).hash == tokenizer.hash and (tmp_path / "tokenizer.json").is_file()


def test_qwen_gives_the_golden_ids_and_its_special_tokens_are_text(qwen, shared):
    assert (qwen.bos_id, qwen.eos_id, qwen.vocab_size) == (None, 151645, 151665)
    assert qwen.eos_id not in qwen.encode("<|im_end|>")
    strings = (shared / "qwen2_5" / "golden_strings.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = (shared / "qwen2_5" / "golden_ids.out").read_text().split("\n")
    assert len(strings) == len(lines) == 47
    for text, line in zip(strings, lines, strict=True):
        assert qwen.encode(text) == [int(one) for one in line.split()] and qwen.decode(qwen.encode(text)) == text


def edited(tokenizer, folder: Path, generation: dict | None = None, **changes) -> Path:
    """A folder with a tokenizer.json alone and another configuration."""
    folder.mkdir()
    tokenizer.save(folder)
    (folder / "tokenizer.model").unlink()
    without = tuple(key for key, value in changes.items() if value is ...)
    given = {key: value for key, value in changes.items() if value is not ...}
    edit_json(folder / "tokenizer_config.json", without=without, **given)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_bos_and_eos_follow_the_configuration_then_the_post_processor_and_the_generation_configuration(ours, tmp_path):
    cases = [
        ({"add_bos_token": False}, None, (None, 2)),
        ({"add_bos_token": ...}, None, (1, 2)),
        ({"add_bos_token": True, "bos_token": {"content": "<unk>"}}, None, (0, 2)),
        ({"eos_token": {"content": "<unk>"}}, None, (1, 0)),
        ({"eos_token": None}, {"eos_token_id": [7, 8]}, (1, 7)),
    ]
    for number, (changes, generation, expected) in enumerate(cases):
        tokenizer = load_tokenizer(edited(ours, tmp_path / str(number), generation, **changes))
        assert (tokenizer.bos_id, tokenizer.eos_id) == expected
    with pytest.raises(UserError, match="eos_token"):
        load_tokenizer(edited(ours, tmp_path / "without", eos_token=None))
    plain = edited(ours, tmp_path / "plain", add_bos_token=...)
    content = json.loads((plain / "tokenizer.json").read_text(encoding="utf-8")) | {"post_processor": None}
    (plain / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8-sig")  # as some editors write it
    assert load_tokenizer(plain).bos_id is None


@pytest.mark.parametrize("seed", range(8))
def test_tokens_of_the_configuration_get_the_ids_that_autotokenizer_gives_them(ours, tmp_path, seed):
    draw, texts = random.Random(seed), ["<a>", "<|b|>", "<|im_end|>", "<pad>", "self", "</s>"]
    ids = dict(zip(draw.sample(texts, 3), draw.sample(range(1998, 2009), 3), strict=True))
    changes = {"pad_token": draw.choice(texts), "additional_special_tokens": draw.sample(texts, 2)}
    listed = {i: {"content": text, "lstrip": draw.random() < 0.5, "normalized": True} for text, i in ids.items()}
    given = edited(ours, tmp_path / "given", **changes, **({"added_tokens_decoder": listed} if seed % 2 else {}))
    (given / "added_tokens.json").write_text(json.dumps(ids))
    (given / "special_tokens_map.json").write_text(json.dumps({"eos_token": draw.choice(texts)}))
    load_tokenizer(given).save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    theirs, again = map(transformers.AutoTokenizer.from_pretrained, (given, tmp_path))
    of_transformers = [(one.get_vocab(), one.eos_token_id) for one in (theirs, again)]
    assert of_transformers == [(loaded.vocabulary, loaded.eos_id)] * 2
    text = "".join(draw.choices([*texts, " ", "def "], k=40))
    assert loaded.encode_special(text).ids == again(text, split_special_tokens=False).input_ids[1:]


@pytest.mark.parametrize("normalizer", ["", "CAAAAKRUTr27FjNvYWJjAA=="])  # the second panics on texts alone
def test_a_panic_of_the_library_is_one_line(ours, tmp_path, normalizer):
    path = edited(ours, tmp_path / "given") / "tokenizer.json"
    edit_json(path, normalizer={"type": "Precompiled", "precompiled_charsmap": normalizer})
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(path).encode_batch(["some text"])


def test_files_that_are_no_tokenizers_or_of_another_kind_are_named(ours, tmp_path):
    folder = edited(ours, tmp_path / "broken")
    (folder / "tokenizer_config.json").write_text("{")
    for name, content in (("a.model", b"nothing"), ("b.json", b"{}"), ("c.model", b"")):
        (tmp_path / name).write_bytes(content)
    words, unigram = iter(["the quick brown fox", "and runs away"] * 50), dict(model_type="unigram", vocab_size=25)
    prefix = str(tmp_path / "d")
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=words, model_prefix=prefix, minloglevel=2, **unigram)
    for path in ("a.model", "b.json", "c.model", "broken"):
        with pytest.raises(UserError, match=r"(\.model|tokenizer\.json|tokenizer_config\.json) cannot be read"):
            load_tokenizer(tmp_path / path)
    with pytest.raises(UserError, match=r"d\.model cannot be read \(it is not a byte-pair encoding\); give a"):
        load_tokenizer(tmp_path / "d.model")


def test_a_vocabulary_that_does_not_fit_the_model_is_refused(ours, tmp_path):
    check_vocabulary(ours, 2000)
    with pytest.raises(UserError, match="2,000 ids but the model only 1,999"):
        check_vocabulary(ours, 1999)
    check_vocabulary(load_tokenizer(edited(ours, tmp_path / "a", pad_token="<pad>")), 2000)  # text never gives it
    with pytest.raises(UserError, match="2,001 ids"):
        check_vocabulary(load_tokenizer(edited(ours, tmp_path / "b", eos_token="<end>")), 2000)


def test_rare_characters_of_a_text_with_too_many_for_the_vocabulary_are_bytes():
    often, rare = "今天天气很好", "".join(map(chr, range(0x4E00, 0x4E00 + 900)))
    tokenizer = train_tokenizer([often] * 99 + [rare], 800)
    assert tokenizer.vocab_size <= 800 and {*often} < tokenizer.vocabulary.keys()
    assert tokenizer.config["add_prefix_space"] is False and tokenizer.decode(tokenizer.encode(rare)) == rare
    assert sum(map(tokenizer.spells, rare)) > 600 and not any(map(tokenizer.spells, often + "abc"))


def test_of_a_small_text_every_character_has_a_piece_and_few_other_pieces_are_made(library_text):
    text = "".join(library_text)[:100_000] + "什么？"
    tokenizer = train_tokenizer([text], 4096)
    assert {*text} - {*" \n\t"} < tokenizer.vocabulary.keys() and tokenizer.vocab_size < 900


def test_a_space_stays_a_space_where_the_text_has_few_or_none():
    for text in ("今天天气很好我们去公园玩", "😀🎉🚀✨", "x=y;a[0]=f(b,c)\t{}\n", "abcd" * 1000 + " "):
        texts = [text[i % 7 :] * 40 + str(i) for i in range(50)]
        tokenizer = train_tokenizer(texts, 300)
        for again in (texts[0], "a b", " hello  world ", "今 天\n  x", "😀 😀"):
            assert tokenizer.decode(tokenizer.encode(again)) == again
