"""A SentencePiece byte-pair encoding written as a `tokenizer.json` that gives the same ids for every text.

SentencePiece merges whichever neighbours form the piece of best score, leftmost first; the `tokenizers` library merges
listed pairs by their rank, leftmost first. One pair per piece is enough to make the two the same: while a piece is
being formed, nothing outside merges with anything inside, so its last merge is always that of the piece alone.

It needs distinct scores, which BPE training gives: minus the rank. LLaMA 2 and Mistral have added runs of 2, 3, ...
spaces, all with one score. SentencePiece lets the first run grow as far as it can, so among these the longest is first.
"""

import itertools
import json

from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

SPACE = "▁"  # U+2581: how SentencePiece writes a space
PIECE = ModelProto.SentencePiece


def tokenizer_files(content: bytes, config: dict, has_template: bool = False) -> dict[str, bytes]:
    """The tokenizer_config.json, with the fields of `config`, and the tokenizer.json of a SentencePiece model."""
    model = read_model(content)
    ids = {piece.piece: i for i, piece in enumerate(model.pieces)}
    trainer = model.trainer_spec
    tokenizer = Tokenizer(BPE(ids, merges(model), unk_token=trainer.unk_piece, byte_fallback=True, fuse_unk=False))
    tokenizer.normalizer = normalizers.Sequence(_normalizers(model.normalizer_spec))
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    special = [piece.piece for piece in model.pieces if piece.type in (PIECE.UNKNOWN, PIECE.CONTROL)]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    bos = trainer.bos_piece if trainer.bos_piece in special and config.get("add_bos_token", True) else None
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, ids[bos])]
        )
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # with LlamaTokenizer the ids are others, silently
        "add_bos_token": bos is not None,
        "add_eos_token": False,
        "bos_token": bos,
        "eos_token": trainer.eos_piece if trainer.eos_piece in special else None,
        "unk_token": trainer.unk_piece,
        "split_special_tokens": not has_template,  # "</s>" in a text is four characters; in a template's it is a token
        "clean_up_tokenization_spaces": False,
    }
    if not model.normalizer_spec.add_dummy_prefix:
        fields["add_prefix_space"] = False  # llama.cpp's converter reads it; a missing key means true there
    fields |= {key: value for key, value in config.items() if value and key != "add_bos_token"}
    texts = {"tokenizer_config.json": json.dumps(fields, indent=2), "tokenizer.json": tokenizer.to_str(pretty=True)}
    return {name: text.encode() for name, text in texts.items()}


def _normalizers(spec) -> list[normalizers.Normalizer]:
    """What SentencePiece does to a text before it merges pieces, in the same order."""
    steps = []
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" +"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    return steps


def merges(model: ModelProto) -> list[tuple[str, str]]:
    """For each piece of more than one character, best score first, the one pair that forms it."""
    normal = {piece.piece: piece.score for piece in model.pieces if piece.type == PIECE.NORMAL}
    scores = {piece: score for piece, score in normal.items() if len(piece) > 1}
    ranked = sorted(scores, key=lambda piece: (-scores[piece], -len(piece)))
    for one, other in itertools.pairwise(ranked):
        are_runs = len({*one, *other}) == 1 and scores.get(one[0] * 2) == scores[one]  # of the same character
        if scores[one] == scores[other] and not are_runs:
            raise ValueError("two pieces have the same score")
    rank = {piece: i for i, piece in enumerate(ranked)}
    pairs = (last_merge(piece, rank) for piece in ranked if set(piece) <= normal.keys())
    return [pair for pair in pairs if pair]


def last_merge(piece: str, rank: dict[str, int]) -> tuple[str, str] | None:
    """The last pair that merging `piece` alone joins; None if it never becomes one symbol (then no text does)."""
    symbols = list(piece)
    while True:
        joined = [left + right for left, right in itertools.pairwise(symbols)]
        best = min(range(len(joined)), key=lambda i: rank.get(joined[i], len(rank)))  # the leftmost of equals
        if joined[best] not in rank:
            return None
        if len(symbols) == 2:
            return symbols[0], symbols[1]
        symbols[best : best + 2] = [joined[best]]


def read_model(content: bytes) -> ModelProto:
    """Read a SentencePiece model file; `ValueError` unless it is a plain BPE with byte fallback."""
    model = ModelProto.FromString(content)
    types = [piece.type for piece in model.pieces]
    if model.trainer_spec.model_type != model.trainer_spec.BPE:
        raise ValueError("it is not a byte-pair encoding")
    if not model.trainer_spec.byte_fallback or types.count(PIECE.BYTE) != 256:
        raise ValueError("it has no byte fallback")
    if model.normalizer_spec.precompiled_charsmap or model.normalizer_spec.normalization_rule_tsv:
        raise ValueError("it changes characters")
    if PIECE.USER_DEFINED in types or PIECE.UNUSED in types:
        raise ValueError("it has user-defined or unused pieces")
    return model
