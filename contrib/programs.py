"""Programs that open a model, and where their answers part from those of this program: the work of `contrib.same`.

A program is a generator of questions with its answers. It opens the tokenizer and answers; then it opens the network,
which it may refuse, and answers. Another Python, without most packages of this project, runs this file, too: so each
program imports what it needs.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from checkpoints.find import find_checkpoint, find_files
from errors import UserError

REFUSALS = (ImportError, OSError, UserError, ValueError)  # another exception of a program is a crash
Answers = Iterator[tuple[str, object]]  # each question with its answer, None: not asked


@dataclass
class Questions:
    """What every program is asked, and what this one answers."""

    texts: list[str]
    conversations: list[list[dict]]
    ids: list[int]
    positions: list[int]  # at which logits are compared
    tolerances: list[float]  # of these logits, relative to their norm
    answers: dict[str, object] = field(default_factory=dict)


def prenorm(place: str, questions: Questions) -> Answers:
    from checkpoints.pretrained import load_pretrained
    from data.chat import ChatFormat
    from data.tokenizer import BREAK, encode_prompt
    from generation.load import open_model
    from generation.settings import Sampling, recommended_sampling

    directory = find_checkpoint(place)
    checkpoint, tokenizer, end_ids = open_model(directory)

    def render(messages: list[dict]) -> tuple[str, list[int]]:
        text = ChatFormat(tokenizer).render(messages)
        return text.replace(BREAK, ""), tokenizer.encode_special(text).ids

    yield from ask_tokenizer(tokenizer.encode, partial(encode_prompt, tokenizer), render, questions, UserError)
    yield "EOS", sorted(end_ids)
    yield "sampling", vars(recommended_sampling(directory) or Sampling(temperature=0))
    decoder = load_pretrained(checkpoint, cast=True).eval().requires_grad_(False)
    yield from ask_network(lambda ids, at: decoder(torch.tensor([ids]))[0, at], questions)


def transformers(place: str, questions: Questions) -> Answers:
    """transformers, with PEFT for an adapter."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, __version__

    name = f"transformers {__version__}"
    options = {"local_files_only": True, "trust_remote_code": False}
    weights = options | {"use_safetensors": True, "torch_dtype": torch.float32}
    files = find_files(find_checkpoint(place))
    if files.adapter is not None:
        import peft

        name = f"peft {peft.__version__}, {name}"
    tokenizer = AutoTokenizer.from_pretrained(files.tokenizer, **options)
    yield "program", name

    encode_prompt = partial(tokenizer.encode, split_special_tokens=True)
    encode = partial(encode_prompt, add_special_tokens=False)

    def render(messages: list[dict]) -> tuple[str, list[int]]:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text, tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    yield from ask_tokenizer(encode, encode_prompt, render, questions)
    decoder = AutoModelForCausalLM.from_pretrained(files.model, **weights)
    config = decoder.generation_config
    yield "EOS", sorted(config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id])
    sampling = {"repetition_penalty": 1.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
    sampling |= {name: getattr(config, name) for name in sampling if getattr(config, name) is not None}
    greedy = {"temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    yield "sampling", sampling if config.do_sample else sampling | greedy
    if files.adapter is not None:
        decoder = peft.PeftModel.from_pretrained(decoder, files.adapter)
    decoder.eval().requires_grad_(False)

    def predict(ids: list[int], positions: list[int]) -> Tensor:
        return decoder(torch.tensor([ids]), logits_to_keep=torch.tensor(positions)).logits[0]

    yield from ask_network(predict, questions)


def llama_cpp(place: str, questions: Questions) -> Answers:
    """llama.cpp in its Python package, for which a directory is written as a GGUF file."""
    from llama_cpp import Llama, __version__, llama_vocab_is_eog
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    context = len(questions.ids)
    options = {"logits_all": True, "type_k": 0, "type_v": 0, "use_mmap": False, "verbose": False}
    with tempfile.TemporaryDirectory() as folder:
        if not place.endswith(".gguf"):
            from contrib.gguf_file import write_gguf

            write_gguf(find_checkpoint(place), Path(folder, "model.gguf"), "float32")
            place = f"{folder}/model.gguf"
        model = Llama(place, n_ctx=context, n_batch=context, **options)
    bos, eos = (model._model.token_get_text(token) for token in (model.token_bos(), model.token_eos()))
    yield "program", f"llama-cpp-python {__version__}"

    def encode(text: str, bos: bool = False, special: bool = False) -> list[int]:
        return model.tokenize(text.encode(), bos, special)

    def render(messages: list[dict]) -> tuple[str, list[int]]:
        text = Jinja2ChatFormatter(model.metadata["tokenizer.chat_template"], eos, bos)(messages=messages).prompt
        return text, encode(text, special=True)

    def predict(ids: list[int], positions: list[int]) -> Tensor:
        model.reset()
        model.eval(ids)
        return torch.tensor(model.scores[positions])

    yield from ask_tokenizer(encode, partial(encode, bos=True), render, questions)
    # Some ids end a text there because of their names: it is asked only about those that end one here.
    yield "EOS", [token for token in questions.answers["EOS"] if llama_vocab_is_eog(model._model.vocab, token)]
    yield "sampling", None
    yield from ask_network(predict, questions)


def ask_tokenizer(
    encode: Callable, encode_prompt: Callable, render: Callable, questions: Questions, refusal: type = Exception
) -> Answers:
    """encode: ids of a text, in which special tokens are text, too; encode_prompt: with BOS. render: text and ids of a
    conversation; `refusal` says that there is no template, or that it refuses this conversation.
    """
    yield "ids of texts", {text: encode(text) for text in questions.texts}
    yield "ids with BOS", encode_prompt("a")
    conversations = {}
    for i, messages in enumerate(questions.conversations, 1):
        with contextlib.suppress(refusal):
            conversations[f"conversation {i}"] = dict(zip(("text", "ids"), render(messages), strict=True))
    yield "conversations", conversations


def ask_network(predict: Callable[[list[int], list[int]], Tensor], questions: Questions) -> Answers:
    """predict: logits (P, V) of ids at P positions."""
    logits = predict(questions.ids, questions.positions)
    yield "logits", logits
    targets = torch.tensor([questions.ids[position + 1] for position in questions.positions])
    yield "loss per token", torch.nn.functional.cross_entropy(logits.double(), targets).item()
    ids = questions.ids[:8]
    for _ in range(10):
        ids = [*ids, predict(ids, [len(ids) - 1]).argmax().item()]
    yield "greedy tokens", ids[8:]


def compare(program: Callable, place: str, questions: Questions) -> tuple[str, dict[str, str]]:
    """The program's name, and by question "equal", "not asked", "refused", or where its answer parts from ours."""
    name = program.__name__
    cells = {"opens": "equal"} | dict.fromkeys(questions.answers, "refused")
    tolerances = torch.tensor(questions.tolerances) * questions.answers["logits"].norm(dim=1)
    # Each error is at most sqrt(2) of its logits', and independent: that of the mean is the root mean square / sqrt(n).
    loss_tolerance = (2 * tolerances.square().mean() / len(tolerances)).sqrt()
    try:
        for question, theirs in program(place, questions):
            if question == "program":
                name = theirs
                continue
            ours = questions.answers[question]
            if question == "logits":
                cells[question] = logits_difference(questions.positions, tolerances, ours, theirs)
            elif question == "loss per token" and abs(theirs - ours) <= loss_tolerance:
                cells[question] = "equal"
            else:
                cells[question] = difference(ours, theirs)
    except Exception as error:
        word = "refused" if isinstance(error, REFUSALS) else f"crashed: {type(error).__name__}"
        fix = f"; pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        cells["opens"] = f"{word}: {str(error).partition(chr(10))[0]:.120}{fix}"
    return name, cells


def compare_elsewhere(
    place: str, questions: Questions, python: str | None = None, program: str = "transformers"
) -> tuple[str, dict[str, str]]:
    """`compare` in another process, because of its packages or, with llama.cpp, because C++ code may kill it."""
    paths = sys.path if python is None else [str(Path(__file__).parents[1])]
    fields = vars(questions) | {"answers": questions.answers | {"logits": None}}
    asked = json.dumps([program, place, fields]).encode() + b"\n"
    done = subprocess.run(
        [python or sys.executable, "-m", "contrib.programs"],
        input=asked + save({"logits": questions.answers["logits"].contiguous()}),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    where = "" if python is None else f" ({python})"
    if done.returncode:
        status = done.returncode
        ending = f"exit status {status}" if status > 0 else f"killed by {signal.Signals(-status).name}"
        if status in (-signal.SIGSEGV, -signal.SIGILL, -signal.SIGABRT):
            ending += f", an error inside {program}; try another build of it"
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        if status < 0 or not lines:
            lines.append(ending)
        return program + where, {"opens": f"crashed: {lines[-1]}"}
    name, cells = json.loads(done.stdout.splitlines()[-1])
    return name + where, cells


def logits_difference(positions: list[int], tolerances: Tensor, ours: Tensor, theirs: Tensor) -> str:
    """Where logits (P, V) part first, or "equal"."""
    if ours.shape != theirs.shape:
        return f"ours {ours.shape[1]} logits, theirs {theirs.shape[1]}"
    differs = ~((theirs - ours).norm(dim=1) <= tolerances)  # a distance that is not a number differs
    if not differs.any():
        return "equal"
    row = differs.tolist().index(True)
    token = (theirs[row] - ours[row]).abs().argmax()
    return f"position {positions[row]}, token {token}: ours {ours[row, token]:.5g}, theirs {theirs[row, token]:.5g}"


def difference(ours: object, theirs: object) -> str:
    """Where two answers part first, with the beginnings of both sides; or "equal", or "not asked"."""
    if theirs is None or ours == theirs == {}:  # there may be no chat template
        return "not asked"
    if ours == theirs:
        return "equal"
    if isinstance(ours, dict) and isinstance(theirs, dict):
        key = next(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
        return f"{key!r:.24} {difference(ours.get(key, 'refused'), theirs.get(key, 'refused'))}"
    if type(ours) is type(theirs) and isinstance(ours, str | list):
        start = len(os.path.commonprefix([ours, theirs]))  # noqa: RUF071 - no paths
        return f"from {start}: ours {sixteen_from(ours, start)}, theirs {sixteen_from(theirs, start)}"
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return f"ours {ours:.7g}, theirs {theirs:.7g}"
    return f"ours {ours!r:.24}, theirs {theirs!r:.24}"


def sixteen_from(answer: str | list, start: int) -> str:
    """The next 16 characters or ids, and dots where there are more."""
    shown = repr(answer[start : start + 16])
    return shown if len(answer) <= start + 16 else f"{shown} ..."


if __name__ == "__main__":
    name, place, fields = json.loads(sys.stdin.buffer.readline())
    questions = Questions(**fields)
    questions.answers |= load(sys.stdin.buffer.read())
    print(json.dumps(compare({"transformers": transformers, "llama_cpp": llama_cpp}[name], place, questions)))
