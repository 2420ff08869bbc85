"""Programs that open a model, and where their answers part from those of this program: the work of `contrib.same`.

Another Python, with another transformers but without most packages of this project, runs this file, too: so each
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
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.find import find_adapter, find_checkpoint, tokenizer_directory
from errors import UserError

REFUSALS = (ImportError, OSError, UserError, ValueError)  # another exception of a program is a crash


@dataclass
class Questions:
    """What every program is asked, and what this one answers."""

    texts: list[str]
    conversations: list[list[dict]]
    end_ids: list[int]
    ids: list[int]
    positions: list[int]  # at which logits are compared
    tolerances: list[float]  # of these logits, relative to their norm
    answers: dict[str, object] = field(default_factory=dict)


@dataclass
class Program:
    """A program that has opened the tokenizer of a model; it may refuse the network."""

    name: str
    encode: Callable[[str, bool], list[int]]  # ids of a text, with or without BOS; special tokens in it are text, too
    render: Callable[[list[dict]], tuple[str, list[int]]]  # text and ids of a conversation
    # The ids that end a text, the sampling, and a function: logits (P, V) of ids at P positions.
    open_network: Callable[[], tuple[list[int], dict | None, Callable[[list[int], list[int]], Tensor]]]
    template_error: type = Exception  # with which a chat template refuses a conversation


def ask(program: Program, questions: Questions) -> Iterator[tuple[str, object]]:
    """Each question with the program's answer, or None where it has none."""
    yield "ids of texts", {text: program.encode(text, False) for text in questions.texts}
    yield "ids with BOS", program.encode("a", True)
    conversations = {}
    for i, messages in enumerate(questions.conversations, 1):
        with contextlib.suppress(program.template_error):
            text, ids = program.render(messages)
            conversations[f"conversation {i}"] = {"text": text, "ids": ids}
    yield "conversations", conversations
    end_ids, sampling, predict = program.open_network()
    yield "EOS", sorted(end_ids)
    yield "sampling", sampling
    logits = predict(questions.ids, questions.positions)
    yield "logits", logits
    targets = torch.tensor([questions.ids[position + 1] for position in questions.positions])
    yield "loss per token", torch.nn.functional.cross_entropy(logits.double(), targets).item()
    ids = questions.ids[:8]
    for _ in range(10):
        ids = [*ids, predict(ids, [len(ids) - 1]).argmax().item()]
    yield "greedy tokens", ids[8:]


def compare(open_program: Callable, place: str, questions: Questions) -> tuple[str, dict[str, str]]:
    """The program's name, and by question "equal", "not asked", "refused", or where its answer parts from ours."""
    name = open_program.__name__
    cells = {"opens": "equal"} | dict.fromkeys(questions.answers, "refused")
    tolerances = torch.tensor(questions.tolerances) * questions.answers["logits"].norm(dim=1)
    # Each error is at most sqrt(2) of its logits', and independent: that of the mean is the root mean square / sqrt(n).
    loss_tolerance = (2 * tolerances.square().mean() / len(tolerances)).sqrt()
    try:
        program = open_program(place, questions)
        name = program.name
        for question, theirs in ask(program, questions):
            ours = questions.answers[question]
            if question == "logits":
                cells[question] = logits_difference(questions.positions, tolerances, ours, theirs)
            elif question == "loss per token" and abs(theirs - ours) <= loss_tolerance:
                cells[question] = "equal"
            else:
                is_asked = theirs is not None and (ours, theirs) != ({}, {})  # there may be no chat template
                cells[question] = difference(ours, theirs) if is_asked else "not asked"
    except Exception as error:
        word = "refused" if isinstance(error, REFUSALS) else f"crashed: {type(error).__name__}"
        fix = f"; pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        cells["opens"] = f"{word}: {str(error).partition(chr(10))[0]:.120}{fix}"
    return name, cells


def compare_elsewhere(
    place: str, questions: Questions, python: str | None = None, program: str = "transformers"
) -> tuple[str, dict[str, str]]:
    """`compare` in another process, because of its packages or, with llama.cpp, because C++ code may kill it."""
    paths = [str(Path(__file__).parents[1])] + ([os.environ.get("PYTHONPATH", "")] if python is None else [])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    fields = vars(questions) | {"answers": questions.answers | {"logits": None}}
    asked = {"program": program, "place": place, "questions": fields}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "questions.safetensors")
        save_file({"logits": questions.answers["logits"].contiguous()}, path, {"asked": json.dumps(asked)})
        command = [python or sys.executable, "-m", "contrib.programs", path]
        done = subprocess.run(command, capture_output=True, env=environment)
    where = "" if python is None else f" ({python})"
    if done.returncode:
        status = done.returncode
        ending = f"exit status {status}" if status > 0 else signal.Signals(-status).name
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [ending]
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
    """Where two answers part first, with both sides; or "equal"."""
    if ours == theirs:
        return "equal"
    if isinstance(ours, dict) and isinstance(theirs, dict):
        key = next(key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key))
        return f"{key!r:.24} {difference(ours.get(key, 'refused'), theirs.get(key, 'refused'))}"
    if type(ours) is type(theirs) and isinstance(ours, str | list):
        start = len(os.path.commonprefix([ours, theirs]))  # noqa: RUF071 - no paths
        return f"from {start}: ours {short(ours[start:])}, theirs {short(theirs[start:])}"
    return f"ours {short(ours)}, theirs {short(theirs)}"


def short(answer: object) -> str:
    """An answer in few characters, which break no number."""
    if isinstance(answer, float):
        return f"{answer:.7g}"
    text = repr(answer)
    if len(text) <= 24:
        return text
    whole = text[:24].rpartition(",")[0] if isinstance(answer, list) else ""
    return f"{whole or text[:24]} ..."


def prenorm(place: str, _: Questions) -> Program:
    """This program."""
    from checkpoints.pretrained import load_pretrained
    from data.chat import ChatFormat
    from data.tokenizer import BREAK, encode_prompt
    from generation.load import open_model
    from generation.settings import Sampling, recommended_sampling

    directory = find_checkpoint(place)
    checkpoint, tokenizer, end_ids = open_model(directory)

    def encode(text: str, with_bos: bool) -> list[int]:
        return encode_prompt(tokenizer, text) if with_bos else tokenizer.encode(text)

    def render(messages: list[dict]) -> tuple[str, list[int]]:
        text = ChatFormat(tokenizer).render(messages)
        return text.replace(BREAK, ""), tokenizer.encode_special(text).ids

    def open_network() -> tuple:
        sampling = vars(recommended_sampling(directory) or Sampling(temperature=0))
        decoder = load_pretrained(checkpoint, cast=True).eval().requires_grad_(False)
        return end_ids, sampling, lambda ids, at: decoder(torch.tensor([ids]))[0, at]

    return Program("prenorm", encode, render, open_network, UserError)


def transformers(place: str, _: Questions) -> Program:
    """transformers, with PEFT for an adapter."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, __version__

    name = f"transformers {__version__}"
    options = {"local_files_only": True, "trust_remote_code": False}
    model, adapter = find_adapter(find_checkpoint(place))
    if adapter is not None:
        import peft

        name = f"peft {peft.__version__}, {name}"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory(model, adapter), **options)

    def encode(text: str, with_bos: bool) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=with_bos, split_special_tokens=True)

    def render(messages: list[dict]) -> tuple[str, list[int]]:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text, tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def open_network() -> tuple:
        weights = {"torch_dtype": torch.float32, "use_safetensors": True}
        decoder = AutoModelForCausalLM.from_pretrained(model, **weights, **options)
        config = decoder.generation_config
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        sampling = {"repetition_penalty": 1.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
        sampling |= {name: getattr(config, name) for name in sampling if getattr(config, name) is not None}
        if not config.do_sample:
            sampling |= {"temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        if adapter is not None:
            decoder = peft.PeftModel.from_pretrained(decoder, adapter)
        decoder.eval().requires_grad_(False)
        return ends, sampling, lambda ids, at: decoder(torch.tensor([ids]), logits_to_keep=torch.tensor(at)).logits[0]

    return Program(name, encode, render, open_network)


def llama_cpp(place: str, questions: Questions) -> Program:
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

    def encode(text: str, with_bos: bool, special: bool = False) -> list[int]:
        return model.tokenize(text.encode(), add_bos=with_bos, special=special)

    def render(messages: list[dict]) -> tuple[str, list[int]]:
        text = Jinja2ChatFormatter(model.metadata["tokenizer.chat_template"], eos, bos)(messages=messages).prompt
        return text, encode(text, with_bos=False, special=True)

    def predict(ids: list[int], positions: list[int]) -> Tensor:
        model.reset()
        model.eval(ids)
        return torch.tensor(model.scores[positions])

    # Some ids end a text there because of their names: it is asked only about those that end one here.
    end_ids = [token for token in questions.end_ids if llama_vocab_is_eog(model._model.vocab, token)]
    return Program(f"llama-cpp-python {__version__}", encode, render, lambda: (end_ids, None, predict))


if __name__ == "__main__":
    with safe_open(sys.argv[1], "pt") as file:
        asked = json.loads(file.metadata()["asked"])
        questions = Questions(**asked["questions"])
        questions.answers["logits"] = file.get_tensor("logits")
    program = {"transformers": transformers, "llama_cpp": llama_cpp}[asked["program"]]
    print(json.dumps(compare(program, asked["place"], questions)))
