"""Does a model mean the same in every program? `python -m contrib.same RUN` prints where their answers part first.

Text is text, special tokens typed in it too: `transformers` is asked with split_special_tokens, whatever its default
for the model. Conversations have none, and the markers of their template are tokens. Logits are computed in float32. A
program that refuses does not agree. Nothing is downloaded, and no code of a checkpoint is executed.
"""

import importlib.util
import inspect
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from contrib.programs import REFUSALS, Answers, open_programs
from errors import UserError, exit_on_user_error, log, printable
from flags import call_with_flags
from generation.load import open_model

TEXTS = ["", " ", "  ", " lead", "trail ", "two  spaces", "\t", "\ta\tb", "\n\n", "a\r\nb\n", " " * 33, "\0a", "\x7f"]
TEXTS += ["0", "12 345", "1234567890", "3.14e-10", "²½", "I'm you're WE'LL", "x = {'a': [1]}  # y", "camelCase_snake"]
TEXTS += ["中文", "日本語のテキスト", "한국어", "a 中文 b", "😀", "👩‍👩‍👧 family", "e\u0301 or é", "ก็", "नमस्ते", "\xa0b"]
TEXTS += ["مرحبا", "Привет", "\u200b\ufeff", "\U0010ffff", "▁x", "<s>a</s>", "<|im_start|>a", "ab 1\n" * 1000]
SYSTEM = {"role": "system", "content": "Be brief. 简短"}
USER = {"role": "user", "content": "Why\tis\n\n2 + 2 = 4?  "}
ANSWER = {"role": "assistant", "content": "It is 😀.\n"}
CONVERSATIONS = [[USER], [SYSTEM, USER], [USER, ANSWER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER, USER], [SYSTEM]]


def main(
    run: Annotated[str, tyro.conf.arg(metavar="RUN"), tyro.conf.Positional],
    other: Annotated[str | None, tyro.conf.arg(name="with", metavar="OTHER")] = None,
    python: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Ask every installed program what a model means. Exit status 0 only if all agree with prenorm.

    Args:
        run: A run folder, a checkpoint or an adapter, as for generate.py.
        other: What should be the same model: such a directory, or a GGUF file.
        python: Another Python with transformers, such as version 4. Repeat the flag for several.
        as_json: Print a JSON object instead of a table.
    """
    questions = make_questions(run)
    ours, *programs = open_programs(run, questions, python)
    reference = dict(ours)
    columns = [compare(program, reference, questions) for program in programs]
    if other is not None:
        prefix = f"{Path(other).name} in "
        others = open_programs(other, questions, python)
        columns += [compare(program, reference, questions, prefix) for program in others]
    if not columns:
        raise UserError("no other program is installed: pip install transformers, or give --with OTHER.")
    if importlib.util.find_spec("llama_cpp") is None:
        log("llama.cpp, the program that GGUF files are for, is not asked: pip install llama-cpp-python gguf")
    table = {cells.pop("program"): cells for cells in columns}
    if as_json:
        print(json.dumps(table, indent=2, ensure_ascii=False))
    else:
        rows = [["", *table]]
        rows += [[name, *(cells[name] for cells in table.values())] for name in ("opens", *reference)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print(printable("  ".join(map(str.ljust, row, widths)).rstrip()))
    return int(any(cell not in ("equal", "not asked") for cells in table.values() for cell in cells.values()))


def make_questions(run: str) -> dict:
    """What every program is asked; texts and conversations for its tokenizer, ids for its network."""
    checkpoint, tokenizer, ends = open_model(run)
    config = checkpoint.config
    context = config.max_position_embeddings
    length = min(max(context // 2, 2048), 4096, context)
    ids = tokenizer.encode(Path(inspect.__file__).read_text("utf-8")[: 8 * length])  # some text that every Python has
    # The first are those of a short text. An error in the rotation grows with the position.
    positions = np.unique([*range(min(16, length - 1)), *np.linspace(0, length - 2, 64, dtype=int)])
    # A sum of n products is off by about sqrt(n) roundings (Higham and Mary 2019), the seven of each layer add up in
    # quadrature, and the angle at position p is off by p roundings. Both programs round.
    products = 7 * config.num_hidden_layers * max(config.hidden_size, config.intermediate_size)
    return {
        "texts": [*TEXTS, "a".join(token.content for token in tokenizer.added_tokens.values())],
        "conversations": CONVERSATIONS,
        "EOS": sorted(ends),
        "ids": (ids * (length // len(ids) + 1))[:length],
        "positions": positions,
        "tolerances": 2 * 2.0**-24 * (products**0.5 + positions),
    }


def compare(program: Answers, reference: dict, questions: dict, prefix: str = "") -> dict[str, str]:
    """The column of a program: for each question "equal", "refused", or where its answer parts from the reference."""
    tolerances = questions["tolerances"] * np.linalg.norm(reference["logits"], axis=1)
    # Each error is at most sqrt(2) of its logits', and independent: that of the mean is the root mean square / sqrt(n).
    loss_tolerance = np.sqrt(2 * np.mean(np.square(tolerances)) / len(tolerances))
    cells = {"program": prefix + program.__name__, "opens": "equal", **dict.fromkeys(reference, "refused")}
    try:
        for name, answer in program:
            if name == "program":
                cells[name] = prefix + answer
            elif name == "logits":
                cells[name] = logits_difference(questions["positions"], tolerances, reference[name], answer)
            elif name == "loss per token":
                is_equal = abs(answer - reference[name]) <= loss_tolerance
                cells[name] = "equal" if is_equal else difference(reference[name], answer)
            else:
                cells[name] = "not asked" if answer is None else difference(reference[name], answer)
    except Exception as error:
        word = "refused" if isinstance(error, (UserError, *REFUSALS)) else f"crashed: {type(error).__name__}"
        cells["opens"] = f"{word}: {str(error).partition(chr(10))[0]:.120}"
    return cells


def logits_difference(positions: list[int], tolerances: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> str:
    """Where logits (P, V) part first, or "equal"."""
    if ours.shape != theirs.shape:
        return f"ours {ours.shape[1]} logits, theirs {theirs.shape[1]}"
    different = ~(np.linalg.norm(theirs - ours, axis=1) <= tolerances)
    if not different.any():
        return "equal"
    i = different.argmax()  # the first
    token = np.abs(theirs[i] - ours[i]).argmax()
    return f"position {positions[i]}, token {token}: ours {ours[i, token]:.5g}, theirs {theirs[i, token]:.5g}"


def difference(ours: object, theirs: object) -> str:
    """Where two answers part first, with both sides; or "equal"."""
    if ours == theirs:
        return "equal"
    if isinstance(ours, dict) and isinstance(theirs, dict):
        key = next(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
        return f"{key!r:.24} {difference(ours.get(key, 'refused'), theirs.get(key, 'refused'))}"
    if type(ours) is type(theirs) and isinstance(ours, str | list):
        start = len(os.path.commonprefix([ours, theirs]))  # noqa: RUF071 - no paths
        return f"from {start}: ours {ours[start:]!r:.24}, theirs {theirs[start:]!r:.24}"
    return f"ours {ours!s:.24}, theirs {theirs!s:.24}"


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"  # a model of the Hub must be in its cache
    os.environ["TQDM_DISABLE"] = "1"  # bars of other programs
    warnings.simplefilter("ignore", FutureWarning)  # of other programs
    with exit_on_user_error():
        sys.exit(call_with_flags(main, prog="python -m contrib.same"))
