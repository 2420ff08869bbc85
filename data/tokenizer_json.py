"""A SentencePiece byte-pair encoding written as a `tokenizer.json` that gives the same ids for every text.

SentencePiece merges whichever neighbours form the piece of best score, leftmost first; the `tokenizers` library merges
listed pairs by their rank, leftmost first. One pair per piece is enough to make the two the same:

    While a piece P is being formed, neighbours outside its span never merge with anything inside, so the merges inside
    are those that P alone would see, in the same order. The last of them is therefore always the same pair, whatever
    the text around. Listing exactly that pair, in the order of scores, leaves the best merge at each step unchanged.

It needs distinct scores, which BPE training gives: minus the rank.
"""

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

SPACE = "▁"  # U+2581: how SentencePiece writes a space
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # types of pieces in SentencePiece's model file
TYPE_BPE = 2


class UnsupportedTokenizer(Exception):
    """No `tokenizer.json` of this construction gives the same ids as the model."""


@dataclass(frozen=True)
class Model:
    """The part of a SentencePiece model file that decides the ids."""

    pieces: list[tuple[str, float, int]]  # (text, score, type), by id
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def tokenizer_json(model: bytes, bos_id: int | None) -> str:
    """The JSON text; its post-processor puts BOS in front if an id is given. Raises `UnsupportedTokenizer`."""
    parsed = read_model(model)
    vocabulary = {piece: i for i, (piece, _, _) in enumerate(parsed.pieces)}
    unknown = next(piece for piece, _, kind in parsed.pieces if kind == UNKNOWN)
    tokenizer = Tokenizer(BPE(vocabulary, merges(parsed), unk_token=unknown, byte_fallback=True, fuse_unk=False))
    tokenizer.normalizer = normalizers.Sequence(_normalizers(parsed))
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(decoding + [decoders.Strip(" ", 1, 0)] * parsed.add_dummy_prefix)
    special = [piece for piece, _, kind in parsed.pieces if kind in (UNKNOWN, CONTROL)]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    if bos_id is not None:
        bos = parsed.pieces[bos_id][0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
        )
    return tokenizer.to_str(pretty=True)


def _normalizers(model: Model) -> list[normalizers.Normalizer]:
    """What SentencePiece does to a text before it merges pieces, in the same order."""
    steps = []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" +"), " ")]
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    if model.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    return steps


def merges(model: Model) -> list[tuple[str, str]]:
    """For each piece of more than one character, best score first, the one pair that forms it."""
    scores = {piece: score for piece, score, kind in model.pieces if kind == NORMAL and len(piece) > 1}
    if len(set(scores.values())) < len(scores):
        raise UnsupportedTokenizer("two pieces have the same score")
    ranked = sorted(scores, key=scores.__getitem__, reverse=True)
    rank = {piece: i for i, piece in enumerate(ranked)}
    known = {piece for piece, _, kind in model.pieces if kind == NORMAL}
    pairs = ((piece, last_merge(piece, rank)) for piece in ranked if set(piece) <= known)
    return [pair for _, pair in pairs if pair]


def last_merge(piece: str, rank: dict[str, int]) -> tuple[str, str] | None:
    """The last pair that merging `piece` alone joins; None if it never becomes one symbol (then no text does)."""
    symbols = list(piece)
    while len(symbols) > 1:
        joined = [left + right for left, right in itertools.pairwise(symbols)]
        best = min(range(len(joined)), key=lambda i: rank.get(joined[i], len(rank)))  # the leftmost of equals
        if joined[best] not in rank:
            return None
        if len(symbols) == 2:
            return symbols[0], symbols[1]
        symbols[best : best + 2] = [joined[best]]
    return None


def read_model(model: bytes) -> Model:
    """Read a SentencePiece model file. Raises `UnsupportedTokenizer` unless it is a plain BPE with byte fallback.

    The file is a protocol buffer; field numbers are those of `sentencepiece_model.proto`, and an absent field has the
    default given there.
    """
    pieces, trainer, normalizer = [], {}, {}
    for number, value in _fields(model):
        if number == 1:
            piece = dict(_fields(value))
            score = struct.unpack("<f", piece.get(2, b"\0\0\0\0"))[0]
            pieces.append((piece[1].decode("utf-8"), score, piece.get(3, NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
        elif number == 5 and dict(_fields(value)).get(2):
            raise UnsupportedTokenizer("it changes text when decoding")
    kinds = {kind for _, _, kind in pieces}
    plain = {
        "it is not a byte-pair encoding": trainer.get(3, 1) == TYPE_BPE,
        "it has no byte fallback": bool(trainer.get(35)) and sum(kind == BYTE for *_, kind in pieces) == 256,
        "it marks spaces at the end of words": not trainer.get(24),
        "it changes characters": not normalizer.get(2) and not normalizer.get(6),
        "it leaves spaces as they are": bool(normalizer.get(5, 1)),
        "it has user-defined or unused pieces": kinds <= {NORMAL, UNKNOWN, CONTROL, BYTE},
    }
    for reason, holds in plain.items():
        if not holds:
            raise UnsupportedTokenizer(reason)
    return Model(pieces, bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1)))


def _fields(buffer: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The (number, value) pairs of a protocol-buffer message: integers for varints, bytes for the rest."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = buffer[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while position < len(buffer):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(wire) or varint()
        yield number, buffer[position : position + size]
        position += size
