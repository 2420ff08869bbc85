"""A tokenizer in the terms of llama.cpp: texts, scores and types of its tokens, merges, and how text is split first.

llama.cpp has its own implementations of SentencePiece ("llama") and of byte-level byte-pair encoding ("gpt2"). A
tokenizer that they cannot express is refused. Where they encode only some texts differently, a note says so.
"""

import json

import sentencepiece
from gguf import GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel

from data.tokenizer import Tokenizer
from data.tokenizer_json import PIECE, last_merge, read_model
from errors import UserError, note

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # types of tokens: llama.cpp's numbers are those of SentencePiece's files
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN, LLAMA = (
    {"type": "Split", "pattern": {"Regex": WORDS % digits}, "behavior": "Isolated", "invert": False}
    for digits in (r"\p{N}", r"\p{N}{1,3}")
)
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
    try:
        content = tokenizer.fields("tokenizer.json")
        if content["model"].get("byte_fallback"):
            add_sentencepiece(writer, tokenizer, vocab_size)
        else:
            add_byte_level(writer, tokenizer, content, vocab_size)
    except ValueError as error:
        raise UserError(
            f"llama.cpp cannot give the ids of this model's tokenizer: {error}; "
            f"only byte-level tokenizer.json files, and those of a tokenizer.model that is beside them, can be written."
        ) from None


def add_tokens(
    writer: GGUFWriter, kind: str, pre_tokenizer: str, tokens: list[str], types: list[int], space_prefix: bool = False
) -> None:
    """Write the text and the type of each id, and how text is split; a space prefix is put in front of a text."""
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_add_space_prefix(space_prefix)


def add_sentencepiece(writer: GGUFWriter, tokenizer: Tokenizer, vocab_size: int) -> None:
    """A tokenizer.json that gives the ids of the tokenizer.model beside it: llama.cpp merges by that one's scores."""
    if "tokenizer.model" not in tokenizer.files:
        raise ValueError("its tokenizer.model, which has the scores of its pieces, is missing")
    model = read_model(tokenizer.files["tokenizer.model"])
    trained = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.files["tokenizer.model"])
    pieces = [(piece.piece, piece.score, piece.type) for piece in model.pieces]
    texts = [piece.lstrip("▁").replace("▁", " ") for piece, _, kind in pieces if kind == PIECE.NORMAL]
    if [ids.tolist() for ids in tokenizer.encode_batch(texts)] != trained.encode(texts):
        raise ValueError("its tokenizer.json gives other ids than its tokenizer.model")
    if tokenizer.encode(" a") != trained.encode(" a"):
        note("this tokenizer drops a space in front and llama.cpp keeps it: texts with one get other ids")
    if model.normalizer_spec.remove_extra_whitespaces:
        note("this tokenizer drops extra spaces and llama.cpp keeps them: texts with such spaces get other ids")
    pieces += [(f"[PAD{i}]", 0.0, UNUSED) for i in range(len(pieces), vocab_size)]
    for i, token in tokenizer.added_tokens.items():
        if i < vocab_size and pieces[i][2] in (PIECE.NORMAL, UNUSED):
            pieces[i] = token.content, pieces[i][1], CONTROL if token.special else USER_DEFINED
    # llama.cpp merges towards every token, SentencePiece only towards normal pieces.
    scores = {piece: score for piece, score, _ in pieces if len(piece) > 1}
    rank = {piece: i for i, piece in enumerate(sorted(scores, key=scores.__getitem__, reverse=True))}
    if reserved := [piece for piece, _, kind in pieces if kind != PIECE.NORMAL and last_merge(piece, rank)]:
        note(f"llama.cpp reads the texts {', '.join(reserved)} as those special tokens")
    texts, scores, types = (list(column) for column in zip(*pieces, strict=True))
    add_tokens(writer, "llama", "default", texts, types, model.normalizer_spec.add_dummy_prefix)
    writer.add_token_scores(scores)


def add_byte_level(writer: GGUFWriter, tokenizer: Tokenizer, content: dict, vocab_size: int) -> None:
    """A byte-level byte-pair encoding, whose way of splitting text must be one that llama.cpp knows by name."""
    model = content["model"]
    is_bpe = model.get("type") == "BPE"
    has_all_bytes = is_bpe and {*ByteLevel.alphabet()} <= {*model["vocab"]}
    if not is_bpe or (model.get("unk_token") and not has_all_bytes):
        raise ValueError("its tokenizer.json is not a byte-pair encoding, or has a token for unknown bytes")
    if any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        raise ValueError("its byte-pair encoding marks the parts of words or is random")
    pre_tokenizer = content.get("pre_tokenizer") or {}
    splits = split_steps(pre_tokenizer), bool(model.get("ignore_merges"))
    names = [name for name, expected in PRE_TOKENIZERS.items() if splits == expected]
    if not names:
        raise ValueError(f"it splits text in a way that is not known here ({json.dumps(pre_tokenizer)})")
    if not has_all_bytes:
        note("this tokenizer drops bytes without a token: next to them llama.cpp may give other ids")
    normalizer = (content.get("normalizer") or {}).get("type")
    if normalizer == "NFC":
        note("llama.cpp does not normalize text to NFC, as this tokenizer does: other texts get other ids")
    elif normalizer is not None:
        raise ValueError(f"it changes text with the normalizer {normalizer}")
    tokens, types = [f"[PAD{i}]" for i in range(vocab_size)], [UNUSED] * vocab_size
    added = {i: CONTROL if token.special else USER_DEFINED for i, token in tokenizer.added_tokens.items()}
    for token, i in tokenizer.vocabulary.items():
        if i < vocab_size:
            tokens[i], types[i] = token, added.get(i, PIECE.NORMAL)
    add_tokens(writer, "gpt2", names[0], tokens, types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])


def split_steps(pre_tokenizer: dict) -> list[dict]:
    """The steps of a pre-tokenizer in order, without what changes no token or is the default."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    plain = [("trim_offsets", True), ("trim_offsets", False), ("use_regex", True)]
    return [{key: value for key, value in step.items() if (key, value) not in plain} for step in steps]
