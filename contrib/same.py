"""Does a model mean the same in every program? `python -m contrib.same RUN` prints where their answers part first.

Text is text, special tokens typed in it too: `transformers` is asked with split_special_tokens, whatever its default
for the model. Conversations have none, and the markers of their template are tokens. Logits are computed in float32. A
program that refuses does not agree. Nothing is downloaded, and no code of a checkpoint is executed.
"""

import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro

from checkpoints.find import find_adapter, find_checkpoint
from checkpoints.pretrained import load_pretrained
from contrib.programs import ask, llama_cpp, model_answers, text_answers, transformers
from data.chat import BREAK, ChatFormat
from data.tokenizer import Tokenizer
from errors import UserError, exit_on_user_error, printable
from flags import call_with_flags
from generation.load import merge, open_model, tokenizer_directory
from generation.settings import Sampling, recommended_sampling

TEXTS = ["", " ", "  ", " lead", "trail ", "two  spaces", "\t", "\ta\tb", "\n\n", "a\r\nb\n", " " * 33, "\0a", "\x7f"]
TEXTS += ["0", "12 345", "1234567890", "3.14e-10", "²½", "I'm you're WE'LL", "x = {'a': [1]}  # y", "camelCase_snake"]
TEXTS += ["中文", "日本語のテキスト", "한국어", "a 中文 b", "😀", "👩‍👩‍👧 family", "e\u0301 or é", "ก็", "नमस्ते", "\xa0b"]
TEXTS += ["مرحبا", "Привет", "\u200b\ufeff", "\U0010ffff", "▁x", "<s>a</s>", "<|im_start|>a", "ab 1\n" * 1000]
USER, SYSTEM, ANSWER = ("user", "Why\tis\n\n2 + 2 = 4?  "), ("system", "Be brief. 简短"), ("assistant", "It is 😀.\n")
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
    missing = next((name for name in python if shutil.which(name) is None), None)
    if missing is not None:
        raise UserError(f"--python {missing} is no program; give the Python of an environment with transformers.")
    checkpoint, tokenizer, ends = open_model(find_checkpoint(run))
    config, questions = checkpoint.config, make_questions(tokenizer, ends, checkpoint.config.max_position_embeddings)
    programs = ask_programs(run, python, questions)
    reference = next(programs)
    if "refused" in reference:
        raise UserError(reference["refused"])
    del reference["program"]
    columns = [*programs]
    for answers in [] if other is None else ask_programs(other, python, questions):
        columns.append(answers | {"program": f"{Path(other).name} in {answers['program']}"})
    if not columns:
        raise UserError("no other program is installed: pip install transformers, or give --with OTHER.")
    # A sum of n products is off by about sqrt(n) roundings (Higham and Mary 2019), the seven of each layer add up in
    # quadrature, and the angle at position p is off by p roundings. Both programs round.
    positions = np.array(questions["positions"])
    products = 7 * config.num_hidden_layers * max(config.hidden_size, config.intermediate_size)
    tolerances = 2 * 2.0**-24 * (products**0.5 + positions) * np.linalg.norm(reference["logits"], axis=1)
    compare = {"logits": partial(logits_difference, positions, tolerances)}
    compare["loss per token"] = partial(loss_difference, tolerances)
    table = {}
    for answers in columns:
        cells = table[answers["program"]] = {"opens": answers.get("refused", "equal")}
        for name, answer in reference.items():
            if name in answers:
                cells[name] = compare.get(name, difference)(answer, answers[name])
            else:
                cells[name] = "refused" if "refused" in answers else "not asked"
    print(json.dumps(table, indent=2, ensure_ascii=False) if as_json else as_text(table))
    return int(any(cell not in ("equal", "not asked") for cells in table.values() for cell in cells.values()))


def make_questions(tokenizer: Tokenizer, ends: frozenset[int], context: int) -> dict:
    """What every program is asked; texts and conversations for its tokenizer, ids for its network."""
    length = min(max(context // 2, 2048), 4096, context)
    ids = tokenizer.encode(Path(inspect.__file__).read_text("utf-8")[: 8 * length])  # some text that every Python has
    # The first are those of a short text. An error in the rotation grows with the position.
    positions = np.unique([*range(min(16, length - 1)), *np.linspace(0, length - 2, 64, dtype=int)])
    return {
        "texts": [*TEXTS, "a".join(token.content for token in tokenizer.added_tokens.values())],
        "conversations": [[{"role": role, "content": text} for role, text in turns] for turns in CONVERSATIONS],
        "EOS": sorted(ends),
        "ids": (ids * (length // len(ids) + 1))[:length],
        "positions": positions.tolist(),
    }


def as_text(table: dict[str, dict[str, str]]) -> str:
    """The table with a line for each question."""
    rows = [["", *table], *([name, *(cells[name] for cells in table.values())] for name in next(iter(table.values())))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return printable("\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows))


def ask_programs(place: str, pythons: tuple[str, ...], questions: dict) -> Iterator[dict]:
    """The answers of each program that opens a directory, this one first, or a GGUF file."""
    if place.endswith(".gguf"):
        if not Path(place).is_file():
            raise UserError(f"{place} does not exist; give a GGUF file.")
        files, llama = {"model": Path(place).parent, "gguf_file": Path(place)}, llama_cpp
    else:
        model, adapter = find_adapter(find_checkpoint(place))
        files = {"model": model, "adapter": adapter, "tokenizer": tokenizer_directory(model, adapter)}
        llama = exported_to_llama_cpp
        yield ask(prenorm, questions, UserError, is_ours=True, place=place)
    files = {name: str(path.absolute()) for name, path in files.items() if path is not None}
    if importlib.util.find_spec("transformers"):
        yield ask(transformers, questions, **files)
    for python in pythons:
        yield ask_other_python(python, {"questions": questions, **files})
    if importlib.util.find_spec("llama_cpp"):
        yield ask(llama, questions, (UserError, OSError, ValueError), place=place)


def prenorm(questions: dict, place: str) -> Iterator[dict]:
    """This program."""
    checkpoint, tokenizer, ends = open_model(find_checkpoint(place))
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]

    def chat(messages: list[dict]) -> dict:
        text = "".join(ChatFormat(tokenizer).render(messages))
        return {"text": text.replace(BREAK, ""), "ids": tokenizer.encode_special(text, BREAK).ids}

    yield text_answers(questions, tokenizer.encode, lambda text: bos + tokenizer.encode(text), chat, UserError)
    sampling = recommended_sampling(find_checkpoint(place)) or Sampling(temperature=0)
    yield {"EOS": sorted(ends), "sampling": vars(sampling)}
    decoder = load_pretrained(checkpoint, cast=True).eval().requires_grad_(False)
    yield model_answers(questions, lambda ids, positions: decoder(torch.tensor([ids]))[0, positions].numpy())


def exported_to_llama_cpp(questions: dict, place: str) -> Iterator[dict]:
    """llama.cpp, for which the model is written as a GGUF file, with its adapter merged."""
    yield {"program": "llama.cpp"}
    from contrib.gguf import write_gguf

    checkpoint, tokenizer, ends = open_model(find_checkpoint(place))
    with tempfile.TemporaryDirectory() as folder:
        directory = checkpoint.directory
        if checkpoint.adapter is not None:
            directory = Path(folder) / "merged"
            merge(checkpoint, tokenizer, ends, directory)
        write_gguf(directory, Path(folder) / "model.gguf", "float32")
        yield from llama_cpp(questions, f"{folder}/model.gguf")


def ask_other_python(python: str, arguments: dict) -> dict:
    """The answers of transformers in another Python."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "questions.json", Path(folder) / "answers.npz"
        asked.write_text(json.dumps(arguments), encoding="utf-8")
        command = [os.path.abspath(shutil.which(python) or python), "-m", "contrib.programs", asked, answered]
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
        if done.returncode:
            return {"program": python, "refused": "crashed: " + done.stderr.strip().split("\n")[-1]}
        with np.load(answered) as arrays:
            answers = {name: json.loads(str(array)) if array.ndim == 0 else array for name, array in arrays.items()}
    return answers | {"program": f"{answers['program']} ({python})"}


def logits_difference(positions: np.ndarray, tolerances: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> str:
    """Where logits (P, V) part first, or "equal"."""
    if ours.shape != theirs.shape:
        return f"ours {ours.shape[1]} logits, theirs {theirs.shape[1]}"
    different = ~(np.linalg.norm(theirs - ours, axis=1) <= tolerances)
    if not different.any():
        return "equal"
    i = different.argmax()  # the first
    token = np.abs(theirs[i] - ours[i]).argmax()
    return f"position {positions[i]}, token {token}: ours {ours[i, token]:.5g}, theirs {theirs[i, token]:.5g}"


def loss_difference(tolerances: np.ndarray, ours: float, theirs: float) -> str:
    """Both losses, or "equal"."""
    # Each error is at most sqrt(2) of its logits', and independent: that of the mean is the root mean square / sqrt(n).
    error = np.sqrt(2 * np.mean(np.square(tolerances)) / np.size(tolerances))
    return "equal" if abs(theirs - ours) <= error else f"ours {ours:.6g}, theirs {theirs:.6g}"


def difference(ours: object, theirs: object) -> str:
    """Where two answers part first, with both sides; or "equal"."""
    if ours == theirs:
        return "equal"
    if isinstance(ours, dict) and isinstance(theirs, dict):
        key = next(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
        return f"{key!r:.24} {difference(ours.get(key, 'refused'), theirs.get(key, 'refused'))}"
    if type(ours) is type(theirs) and isinstance(ours, str | list):
        start = len(os.path.commonprefix([ours, theirs]))  # noqa: RUF071 - no paths
        return f"from {start}: ours {ours[start:][:20]!r:.24}, theirs {theirs[start:][:20]!r:.24}"
    return f"ours {ours!s:.24}, theirs {theirs!s:.24}"


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"  # a model of the Hub must be in its cache
    os.environ["TQDM_DISABLE"] = "1"  # bars of other programs
    with exit_on_user_error():
        sys.exit(call_with_flags(main, prog="python -m contrib.same"))
