"""What other programs say about a model, for `contrib.same`. Imports nothing of this project, so that another Python,
with another version of transformers, can run it too: `python -m contrib.programs QUESTIONS.json ANSWERS.npz`.

A program is a function of the questions and of a model's files. It yields its name ("program") and its answers as soon
as it has them: of a model that it refuses, those of the tokenizer are there.
"""

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

REFUSALS = (ImportError, OSError, ValueError)  # of other programs


def ask(program: Callable, questions: dict, refusals: type | tuple = REFUSALS, is_ours: bool = False, **files) -> dict:
    """All answers of a program; "refused" has the reason of a refusal or, unless the program is ours, of a crash."""
    answers = {"program": program.__name__}
    try:
        for more in program(questions, **files):
            answers |= more
    except Exception as error:
        if is_ours and not isinstance(error, refusals):
            raise
        word = "refused" if isinstance(error, refusals) else f"crashed: {type(error).__name__}"
        answers["refused"] = f"{word}: {' '.join(str(error).splitlines()[:1]):.120}"
    return answers


def text_answers(questions: dict, encode: Callable, encode_with_bos: Callable, chat: Callable, error=Exception) -> dict:
    """Ids of texts, and text and ids of conversations."""
    conversations = {}
    for i, messages in enumerate(questions["conversations"], 1):
        with contextlib.suppress(error):  # the template refuses the conversation, or is missing
            conversations[f"conversation {i}"] = chat(messages)
    texts = {text: encode(text) for text in questions["texts"]}
    return {"ids of texts": texts, "ids with BOS": encode_with_bos("a"), "conversations": conversations}


def model_answers(questions: dict, logits_at: Callable[[list[int], list[int]], np.ndarray]) -> dict:
    """What a model predicts; `logits_at` gives the logits of ids at some positions."""
    ids, positions, greedy = questions["ids"], questions["positions"], questions["ids"][:8]
    logits, targets = logits_at(ids, positions), [ids[position + 1] for position in positions]
    loss = torch.nn.functional.cross_entropy(torch.tensor(logits).double(), torch.tensor(targets))
    for _ in range(10):
        greedy = [*greedy, int(logits_at(greedy, [len(greedy) - 1]).argmax())]
    return {"logits": logits, "loss per token": loss.item(), "greedy tokens": greedy[8:]}


def transformers(
    questions: dict, model: str, adapter: str | None = None, tokenizer: str | None = None, **options: str
) -> Iterator[dict]:
    """transformers, with PEFT for an adapter. Nothing is downloaded, unpickled or executed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, __version__, logging

    warnings.simplefilter("ignore", FutureWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield {"program": f"transformers {__version__}"}
    options |= {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(tokenizer or model, **options)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def chat(messages: list[dict]) -> dict:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return {"text": text, "ids": ids}

    yield text_answers(questions, encode, tokenizer.encode, chat)
    decoder = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32, use_safetensors=True, **options)
    defaults = decoder.generation_config
    ends = defaults.eos_token_id
    sampling = {"repetition_penalty": 1.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
    sampling |= {name: getattr(defaults, name) for name in sampling if getattr(defaults, name) is not None}
    if not defaults.do_sample:
        sampling |= {"temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    yield {"EOS": sorted(ends) if isinstance(ends, list) else [ends], "sampling": sampling}
    if adapter is not None:
        import peft

        yield {"program": f"peft {peft.__version__}, transformers {__version__}"}
        decoder = peft.PeftModel.from_pretrained(decoder, adapter)
    decoder.eval().requires_grad_(False)

    def logits_at(ids: list[int], positions: list[int]) -> np.ndarray:
        return decoder(torch.tensor([ids]), logits_to_keep=torch.tensor(positions)).logits[0].numpy()

    yield model_answers(questions, logits_at)


def llama_cpp(questions: dict, place: str) -> Iterator[dict]:
    """llama.cpp in its Python package. Of the ids that end a text, it also has some that it knows by their names."""
    from llama_cpp import Llama, __version__, llama_vocab_is_eog
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    yield {"program": f"llama-cpp-python {__version__}"}
    context = len(questions["ids"])
    model = Llama(place, n_ctx=context, n_batch=context, logits_all=True, type_k=0, type_v=0, verbose=False)
    bos, eos = (model._model.token_get_text(token) for token in (model.token_bos(), model.token_eos()))

    def chat(messages: list[dict]) -> dict:
        text = Jinja2ChatFormatter(model.metadata["tokenizer.chat_template"], eos, bos)(messages=messages).prompt
        return {"text": text, "ids": model.tokenize(text.encode(), add_bos=False, special=True)}

    def logits_at(ids: list[int], positions: list[int]) -> np.ndarray:
        model.reset()
        model.eval(ids)
        return model.scores[positions]

    def encode(text: str) -> list[int]:
        return model.tokenize(text.encode(), add_bos=False)

    yield text_answers(questions, encode, lambda text: model.tokenize(text.encode()), chat)
    yield {"EOS": [token for token in questions["EOS"] if llama_vocab_is_eog(model._model.vocab, token)]}
    yield model_answers(questions, logits_at)


if __name__ == "__main__":
    answers = ask(transformers, **json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    np.savez(sys.argv[2], **{name: a if name == "logits" else json.dumps(a) for name, a in answers.items()})
