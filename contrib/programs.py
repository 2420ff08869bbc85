"""What other programs say about a model, for `contrib.same`. Imports nothing of this project, so that another Python,
with another version of transformers, can run it too: `python -m contrib.programs QUESTIONS.json ANSWERS.npz`.
"""

import contextlib
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


@dataclass
class Program:
    """A model as a program reads it. None: the program has no such thing, or refuses the model before."""

    name: str
    encode: Callable[[str], list[int]] | None = None
    encode_with_bos: Callable[[str], list[int]] | None = None
    chat: Callable[[list[dict]], dict] | None = None  # the text and the ids of a conversation
    ends: list[int] | None = None  # ids that end a text; a program that cannot list them has `is_end`
    is_end: Callable[[int], bool] | None = None
    sampling: dict | None = None
    logits: Callable[[list[int], list[int]], np.ndarray] | None = None  # of ids, at positions


def ask(open_model: Callable[..., None], questions: dict, **files: str) -> dict:
    """The answers of the program that `open_model` fills in, by question; "refused" has the reason of a refusal."""
    program, answers = Program(open_model.__name__), {}
    try:
        try:
            open_model(program, **files)
        finally:  # what a program has opened before it refuses, such as the tokenizer, is asked too
            answer(program, questions, answers)
    except Exception as error:
        answers["refused"] = f"refused: {f'{error} '.splitlines()[0]:.120}"
    return {"program": program.name} | answers


def answer(program: Program, questions: dict, answers: dict) -> None:
    """Put the answers of a program into `answers`."""
    if program.encode is not None:
        answers["ids of texts"] = {text: program.encode(text) for text in questions["texts"]}
    if program.encode_with_bos is not None:
        answers["ids with BOS"] = program.encode_with_bos("a")
    if program.chat is not None:
        answers["conversations"] = {}
        for i, messages in enumerate(questions["conversations"], 1):
            with contextlib.suppress(Exception):  # the template refuses the conversation, or is missing
                answers["conversations"][f"conversation {i}"] = program.chat(messages)
    if program.ends is not None:
        answers["EOS"] = program.ends
    if program.is_end is not None:
        answers["EOS"] = [token for token in questions["EOS"] if program.is_end(token)]
    if program.sampling is not None:
        answers["sampling"] = program.sampling
    if program.logits is not None:
        ids, positions, greedy = questions["ids"], questions["positions"], questions["ids"][:8]
        logits, targets = program.logits(ids, positions), [ids[position + 1] for position in positions]
        loss = torch.nn.functional.cross_entropy(torch.tensor(logits).double(), torch.tensor(targets))
        for _ in range(10):
            greedy = [*greedy, int(program.logits(greedy, [len(greedy) - 1]).argmax())]
        answers |= {"logits": logits, "loss per token": loss.item(), "greedy tokens": greedy[8:]}


def transformers(
    program: Program, model: str, adapter: str | None = None, tokenizer: str | None = None, **options: str
) -> None:
    """transformers, with PEFT for an adapter. Nothing is downloaded, unpickled or executed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, __version__, logging

    warnings.simplefilter("ignore", FutureWarning)
    program.name = f"transformers {__version__}"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options |= {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(tokenizer or model, **options)

    def chat(messages: list[dict]) -> dict:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return {"text": text, "ids": ids}

    program.encode = lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    program.encode_with_bos, program.chat = tokenizer.encode, chat
    decoder = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32, use_safetensors=True, **options)
    defaults = decoder.generation_config
    ends = defaults.eos_token_id
    program.ends = sorted(ends) if isinstance(ends, list) else [ends]
    sampling = {"repetition_penalty": 1.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
    sampling |= {name: getattr(defaults, name) for name in sampling if getattr(defaults, name) is not None}
    if not defaults.do_sample:
        sampling |= {"temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    program.sampling = sampling
    if adapter is not None:
        import peft

        program.name = f"peft {peft.__version__}, transformers {__version__}"
        decoder = peft.PeftModel.from_pretrained(decoder, adapter)
    decoder.eval().requires_grad_(False)

    def logits(ids: list[int], positions: list[int]) -> np.ndarray:
        return decoder(torch.tensor([ids]), logits_to_keep=torch.tensor(positions)).logits[0].numpy()

    program.logits = logits


def llama_cpp(program: Program, place: str, context: int) -> None:
    """llama.cpp in its Python package. Of the ids that end a text, it also has some that it knows by their names."""
    from llama_cpp import Llama, __version__, llama_vocab_is_eog
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    program.name = f"llama-cpp-python {__version__}"
    model = Llama(place, n_ctx=context, n_batch=context, logits_all=True, type_k=0, type_v=0, verbose=False)
    bos, eos = (model._model.token_get_text(token) for token in (model.token_bos(), model.token_eos()))

    def chat(messages: list[dict]) -> dict:
        text = Jinja2ChatFormatter(model.metadata["tokenizer.chat_template"], eos, bos)(messages=messages).prompt
        return {"text": text, "ids": model.tokenize(text.encode(), add_bos=False, special=True)}

    def logits(ids: list[int], positions: list[int]) -> np.ndarray:
        model.reset()
        model.eval(ids)
        return model.scores[positions]

    program.encode = lambda text: model.tokenize(text.encode(), add_bos=False)
    program.encode_with_bos = lambda text: model.tokenize(text.encode())
    program.chat, program.logits = chat, logits
    program.is_end = lambda token: llama_vocab_is_eog(model._model.vocab, token)


if __name__ == "__main__":
    answers = ask(transformers, **json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    np.savez(sys.argv[2], **{name: a if name == "logits" else json.dumps(a) for name, a in answers.items()})
