"""Does a model mean the same in every program? `python -m contrib.same RUN` prints where their answers part first.

Text is text, special tokens typed in it too: `transformers` is asked with split_special_tokens, whatever its default
for the model. Conversations have none, and the markers of their template are tokens. Logits are computed in float32. A
program that refuses does not agree. Nothing is downloaded, and no code of a checkpoint is executed.
"""

import os

if __name__ == "__main__":
    from errors import run_main

    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    run_main("contrib.same")

import inspect
import json
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from contrib import programs
from contrib.programs import Questions
from errors import UserError, log, printable
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
    warnings.simplefilter("ignore", FutureWarning)  # of other programs
    is_gguf = other is not None and other.endswith(".gguf")
    if is_gguf and not Path(other).is_file():
        raise UserError(f"{other} does not exist; give a GGUF file.")
    if is_gguf and find_spec("llama_cpp") is None:
        raise UserError("llama.cpp, which reads GGUF files, is not installed: pip install llama-cpp-python gguf")
    questions = make_questions(run)
    questions.answers = dict(programs.prenorm(run, questions))
    ask_llama_cpp = partial(programs.compare_elsewhere, program="llama_cpp")
    comparisons = [partial(programs.compare, programs.transformers)] if find_spec("transformers") else []
    comparisons += [ask_llama_cpp] if find_spec("llama_cpp") else []
    comparisons += [partial(programs.compare_elsewhere, python=executable) for executable in python]
    table = dict(compare(run, questions) for compare in comparisons)
    if other is not None:
        asked = [ask_llama_cpp] if is_gguf else [partial(programs.compare, programs.prenorm), *comparisons]
        for compare in asked:
            program, cells = compare(other, questions)
            table[f"{Path(other).name} in {program}"] = cells
    if not table:
        raise UserError("no other program is installed: pip install transformers, or give --with OTHER.")
    if find_spec("llama_cpp") is None:
        log("llama.cpp, the program that GGUF files are for, is not asked: pip install llama-cpp-python gguf")
    if as_json:
        print(json.dumps(table, indent=2, ensure_ascii=False))
    else:
        for program, cells in table.items():
            print(program)
            for question, cell in cells.items():
                print(printable(f"    {question:18}{cell}"))
    return int(any(cell not in ("equal", "not asked") for cells in table.values() for cell in cells.values()))


def make_questions(run: str) -> Questions:
    checkpoint, tokenizer, _ = open_model(run)
    config = checkpoint.config
    context = config.max_position_embeddings
    length = min(max(context // 2, 2048), 4096, context)
    ids = tokenizer.encode(Path(inspect.__file__).read_text("utf-8")[: 8 * length])  # some text that every Python has
    # The first are those of a short text. An error in the rotation grows with the position.
    positions = {*range(min(16, length - 1)), *np.linspace(0, length - 2, 64, dtype=int).tolist()}
    # A sum of n products is off by about sqrt(n) roundings (Higham and Mary 2019), the seven of each layer add up in
    # quadrature, and the angle at position p is off by p roundings. Both programs round.
    products = 7 * config.num_hidden_layers * max(config.hidden_size, config.intermediate_size)
    return Questions(
        texts=[*TEXTS, "a".join(token.content for token in tokenizer.added_tokens.values())],
        conversations=CONVERSATIONS,
        ids=(ids * (length // len(ids) + 1))[:length],
        positions=sorted(positions),
        tolerances=[2 * 2.0**-24 * (products**0.5 + position) for position in sorted(positions)],
    )
