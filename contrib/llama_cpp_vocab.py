"""A tokenizer in the terms of llama.cpp: texts, scores and types of its tokens, merges, and how text is split first.

llama.cpp has its own implementations of SentencePiece ("llama") and of byte-level byte-pair encoding ("gpt2"). A
tokenizer that they cannot express is refused. Where they encode only some texts differently, a note says so.
"""

import json

import sentencepiece
from gguf import GGUFWriter, TokenType
from tokenizers.pre_tokenizers import ByteLevel

from data.tokenizer import Tokenizer
from data.tokenizer_json import PIECE, last_merge, read_model
from errors import UserError, note

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
QWEN = SPLIT | {"pattern": {"Regex": WORDS % r"\p{N}"}}  # each digit alone
LLAMA = SPLIT | {"pattern": {"Regex": WORDS % r"\p{N}{1,3}"}}
GPT2 = {"type": "ByteLevel", "add_prefix_space": False}  # with an expression of its own
BYTES = GPT2 | {"use_regex": False}
# How byte-level tokenizers split text before merging, by llama.cpp's name of it: the steps of tokenizer.json, and
# ignore_merges: a part of the text that is a token is that token, whatever the merges say.
PRE_TOKENIZERS = {
    "qwen2": ([QWEN, BYTES], False),
    "llama-bpe": ([LLAMA, BYTES], True),
    "gpt-2": ([GPT2], False),
    "smollm": ([{"type": "Digits", "individual_digits": True}, GPT2], False),
}


def add_vocabulary(writer: GGUFWriter, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Write a tokenizer for a model with `vocab_size` embeddings; `UserError` when llama.cpp cannot express it."""
    token_by_id = {i: token for token, i in tokenizer.vocabulary.items()}
    tokens = [token_by_id.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    types = [TokenType.NORMAL if i in token_by_id else TokenType.UNUSED for i in range(vocab_size)]
    for i, token in tokenizer.added_tokens.items():
        if i < vocab_size:
            types[i] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    content = tokenizer.fields("tokenizer.json")
    try:
        if content["model"].get("byte_fallback"):
            add_sentencepiece(writer, tokenizer, tokens, types)
        else:
            add_byte_level(writer, content)
    except ValueError as error:
        fix = "only byte-level tokenizer.json files, and those of a tokenizer.model beside them, can be written"
        raise UserError(f"llama.cpp cannot give the ids of this model's tokenizer: {error}; {fix}.") from None
    writer.add_token_list(tokens)
    writer.add_token_types(types)


def add_sentencepiece(writer: GGUFWriter, tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Write the scores of tokenizer.model, by which llama.cpp merges; tokenizer.json has to give the same ids.

    Sets the types of the unknown, control and byte tokens, which only tokenizer.model has.
    """
    if "tokenizer.model" not in tokenizer.files:
        raise ValueError("its tokenizer.model, which has the scores of its pieces, is missing")
    model = read_model(tokenizer.files["tokenizer.model"])
    trained = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.files["tokenizer.model"])
    pieces = model.pieces[: len(tokens)]
    texts = [piece.piece.lstrip("▁").replace("▁", " ") for piece in pieces if piece.type == PIECE.NORMAL]
    if [ids.tolist() for ids in tokenizer.encode_batch(texts)] != trained.encode(texts):
        raise ValueError("its tokenizer.json gives other ids than its tokenizer.model")
    if tokenizer.encode(" a") != trained.encode(" a"):
        note("this tokenizer drops a space in front and llama.cpp keeps it: texts with one get other ids")
    if model.normalizer_spec.remove_extra_whitespaces:
        note("this tokenizer drops extra spaces and llama.cpp keeps them: texts with such spaces get other ids")
    for i, piece in enumerate(pieces):
        if piece.type != PIECE.NORMAL:
            types[i] = piece.type  # SentencePiece's number of a type is llama.cpp's
    scores = [piece.score for piece in pieces] + [0.0] * (len(tokens) - len(pieces))
    # llama.cpp merges towards every token, SentencePiece only towards normal pieces.
    ids_by_score = sorted(range(len(tokens)), key=scores.__getitem__, reverse=True)
    rank = {tokens[i]: place for place, i in enumerate(ids_by_score) if len(tokens[i]) > 1}
    special = [token for token, kind in zip(tokens, types, strict=True) if kind != TokenType.NORMAL]
    if merged := [token for token in special if last_merge(token, rank)]:
        note(f"llama.cpp reads the texts {', '.join(merged)} as those special tokens")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_add_space_prefix(model.normalizer_spec.add_dummy_prefix)
    writer.add_token_scores(scores)


def add_byte_level(writer: GGUFWriter, content: dict) -> None:
    """Write the merges of a tokenizer.json, and llama.cpp's name of the way in which it splits text."""
    model = content["model"]
    is_bpe = model.get("type") == "BPE"
    has_all_bytes = is_bpe and {*ByteLevel.alphabet()} <= {*model["vocab"]}
    if not is_bpe or (model.get("unk_token") and not has_all_bytes):
        raise ValueError("its tokenizer.json is not a byte-pair encoding, or has a token for unknown bytes")
    if any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        raise ValueError("its byte-pair encoding marks the parts of words or is random")
    pre_tokenizer = content.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    for step in steps:
        step.pop("trim_offsets", None)  # offsets do not count here
        if step.get("use_regex"):
            del step["use_regex"]  # the default
    way_to_split = (steps, bool(model.get("ignore_merges")))
    names = [name for name, known_way in PRE_TOKENIZERS.items() if known_way == way_to_split]
    if not names:
        raise ValueError(f"it splits text in a way that is not known here ({json.dumps(pre_tokenizer)})")
    if not has_all_bytes:
        note("this tokenizer drops bytes without a token: next to them llama.cpp may give other ids")
    normalizer = (content.get("normalizer") or {}).get("type")
    if normalizer == "NFC":
        note("llama.cpp does not normalize text to NFC, as this tokenizer does: other texts get other ids")
    elif normalizer is not None:
        raise ValueError(f"it changes text with the normalizer {normalizer}")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(names[0])
    writer.add_add_space_prefix(False)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
