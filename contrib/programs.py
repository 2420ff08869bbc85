"""What programs make of a model, for `contrib.same`. Nothing is downloaded, and no code of a checkpoint is executed.

A program is a generator of (question, answer) pairs. It may raise an exception at any of them: a model that it refuses
can have a tokenizer that it opens. Another Python, with another transformers but without the packages of this project,
runs this file as `python -m contrib.programs QUESTIONS.json ANSWERS.npz`: so each function imports what it needs.
"""

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

Answers = Iterator[tuple[str, object]]
REFUSALS = (ImportError, OSError, ValueError)  # another exception of a program is a crash


def open_programs(place: str, questions: dict, pythons: tuple[str, ...]) -> Iterator[Answers]:
    """The programs that open a directory, this one first, or a GGUF file; `pythons` have another transformers."""
    from checkpoints.find import find_adapter, find_checkpoint, tokenizer_directory
    from errors import UserError

    if place.endswith(".gguf"):
        if not Path(place).is_file():
            raise UserError(f"{place} does not exist; give a GGUF file.")
        files = {"model": str(Path(place).absolute().parent), "gguf_file": Path(place).name}
    else:
        yield prenorm(questions, place)
        model, adapter = find_adapter(find_checkpoint(place))
        paths = {"model": model, "tokenizer": tokenizer_directory(model, adapter), "adapter": adapter}
        files = {name: str(path.absolute()) for name, path in paths.items() if path is not None}
    if importlib.util.find_spec("transformers"):
        yield transformers(questions, **files)
    for python in pythons:
        yield another_python(questions, python, files)
    if importlib.util.find_spec("llama_cpp"):
        yield llama_cpp(questions, place)


def tokenizer_answers(questions: dict, encode: Callable, render: Callable, template_error: type = Exception) -> Answers:
    """Ids of texts, and text and ids of the conversations that the template does not refuse with `template_error`."""
    yield "ids of texts", {text: encode(text, False) for text in questions["texts"]}
    yield "ids with BOS", encode("a", True)
    conversations = {}
    for i, messages in enumerate(questions["conversations"], 1):
        with contextlib.suppress(template_error):
            text, ids = render(messages)
            conversations[f"conversation {i}"] = {"text": text, "ids": ids}
    yield "conversations", conversations


def network_answers(questions: dict, predict: Callable[[list[int], np.ndarray], np.ndarray]) -> Answers:
    """Logits, loss and greedy tokens; `predict` computes the logits (P, V) of ids at P positions."""
    ids, positions = questions["ids"], questions["positions"]
    logits = predict(ids, positions)
    yield "logits", logits
    targets = torch.tensor(ids)[positions + 1]
    yield "loss per token", torch.nn.functional.cross_entropy(torch.tensor(logits).double(), targets).item()
    greedy = ids[:8]
    for _ in range(10):
        greedy = [*greedy, int(predict(greedy, np.array([len(greedy) - 1])).argmax())]
    yield "greedy tokens", greedy[8:]


def prenorm(questions: dict, place: str) -> Answers:
    """This program."""
    from checkpoints.find import find_checkpoint
    from checkpoints.pretrained import load_pretrained
    from data.chat import ChatFormat
    from data.tokenizer import BREAK, encode_prompt
    from errors import UserError
    from generation.load import open_model
    from generation.settings import Sampling, recommended_sampling

    directory = find_checkpoint(place)
    checkpoint, tokenizer, ends = open_model(directory)

    def encode(text: str, with_bos: bool) -> list[int]:
        return encode_prompt(tokenizer, text) if with_bos else tokenizer.encode(text)

    def render(messages: list[dict]) -> tuple[str, list[int]]:
        text = ChatFormat(tokenizer).render(messages)
        return text.replace(BREAK, ""), tokenizer.encode_special(text).ids

    yield from tokenizer_answers(questions, encode, render, UserError)
    yield "EOS", sorted(ends)
    yield "sampling", vars(recommended_sampling(directory) or Sampling(temperature=0))
    decoder = load_pretrained(checkpoint, cast=True).eval().requires_grad_(False)
    yield from network_answers(questions, lambda ids, positions: decoder(torch.tensor([ids]))[0, positions].numpy())


def transformers(
    questions: dict, model: str, tokenizer: str | None = None, adapter: str | None = None, **options: str
) -> Answers:
    """transformers, with PEFT for an adapter."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, __version__, logging

    yield "program", f"transformers {__version__}"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options |= {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(tokenizer or model, **options)

    def encode(text: str, with_bos: bool) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=with_bos, split_special_tokens=True)

    def render(messages: list[dict]) -> tuple[str, list[int]]:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text, tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    yield from tokenizer_answers(questions, encode, render)
    decoder = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32, use_safetensors=True, **options)
    config = decoder.generation_config
    yield "EOS", sorted(np.atleast_1d(config.eos_token_id).tolist())
    sampling = {"repetition_penalty": 1.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
    sampling |= {name: getattr(config, name) for name in sampling if getattr(config, name) is not None}
    if not config.do_sample:
        sampling |= {"temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    yield "sampling", sampling
    if adapter is not None:
        import peft

        yield "program", f"peft {peft.__version__}, transformers {__version__}"
        decoder = peft.PeftModel.from_pretrained(decoder, adapter)
    decoder.eval().requires_grad_(False)

    def predict(ids: list[int], positions: np.ndarray) -> np.ndarray:
        return decoder(torch.tensor([ids]), logits_to_keep=torch.tensor(positions)).logits[0].numpy()

    yield from network_answers(questions, predict)


def another_python(questions: dict, python: str, files: dict[str, str]) -> Answers:
    """transformers in another Python."""
    yield "program", python
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "questions.json"), Path(folder, "answers.npz")
        asked.write_text(json.dumps({"questions": questions, **files}, default=np.ndarray.tolist), encoding="utf-8")
        command = [python, "-m", "contrib.programs", asked, answered]
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, encoding="utf-8")
        answers = {}
        if answered.is_file():
            with np.load(answered) as arrays:
                answers = {name: array if array.ndim else json.loads(str(array)) for name, array in arrays.items()}
    refusal = answers.pop("refused", None)
    yield "program", f"{answers.pop('program', 'transformers')} ({python})"
    yield from answers.items()
    if refusal is not None:
        raise ValueError(refusal)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().split("\n")[-1])


def llama_cpp(questions: dict, place: str) -> Answers:
    """llama.cpp in its Python package, for which a directory is written as a GGUF file."""
    from llama_cpp import Llama, __version__, llama_vocab_is_eog
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    from checkpoints.find import find_checkpoint

    yield "program", f"llama-cpp-python {__version__}"
    context = len(questions["ids"])
    options = {"logits_all": True, "type_k": 0, "type_v": 0, "use_mmap": False, "verbose": False}
    with tempfile.TemporaryDirectory() as folder:
        if not place.endswith(".gguf"):
            from contrib.gguf import write_gguf

            write_gguf(find_checkpoint(place), Path(folder, "model.gguf"), "float32")
            place = f"{folder}/model.gguf"
        model = Llama(place, n_ctx=context, n_batch=context, **options)
    bos, eos = (model._model.token_get_text(token) for token in (model.token_bos(), model.token_eos()))

    def encode(text: str, with_bos: bool) -> list[int]:
        return model.tokenize(text.encode(), add_bos=with_bos)

    def render(messages: list[dict]) -> tuple[str, list[int]]:
        text = Jinja2ChatFormatter(model.metadata["tokenizer.chat_template"], eos, bos)(messages=messages).prompt
        return text, model.tokenize(text.encode(), add_bos=False, special=True)

    def predict(ids: list[int], positions: np.ndarray) -> np.ndarray:
        model.reset()
        model.eval(ids)
        return model.scores[positions]

    yield from tokenizer_answers(questions, encode, render)
    # Some ids end a text there because of their names: it is asked only about those that end one here.
    yield "EOS", [token for token in questions["EOS"] if llama_vocab_is_eog(model._model.vocab, token)]
    yield "sampling", None
    yield from network_answers(questions, predict)


if __name__ == "__main__":
    arguments = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    arguments["questions"]["positions"] = np.array(arguments["questions"]["positions"])
    answers = {}
    try:
        for name, answer in transformers(**arguments):
            answers[name] = answer
    except REFUSALS as error:
        answers["refused"] = str(error)
    finally:
        np.savez(sys.argv[2], **{name: a if name == "logits" else json.dumps(a) for name, a in answers.items()})
