"""What other programs say about a model, for `contrib.same`. Imports nothing of this project, so that another Python,
with another version of transformers, can run it too: `python -m contrib.programs QUESTIONS.json ANSWERS.npz`.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

Answers = Iterator[tuple[str, object]]  # what is asked, with the answer or, where it depends on more, a function


def ask(program: Callable[..., Answers], questions: dict, **files: str) -> dict:
    """The answers of a program, by what is asked; from where it refuses on, its reason as "refused"."""
    answers = {"program": program.__name__}
    try:
        for name, answer in program(**files):
            if name == "ids of texts":
                answers[name] = {text: answer(text) for text in questions["texts"]}
            elif name == "conversations":
                answers[name] = {}
                for i, messages in enumerate(questions[name], 1):
                    with contextlib.suppress(Exception):  # the template refuses the conversation, or is missing
                        answers[name][f"conversation {i}"] = answer(messages)
            elif name == "logits":
                ids, positions, greedy = questions["ids"], questions["positions"], questions["ids"][:8]
                logits, targets = answer(ids, positions), [ids[position + 1] for position in positions]
                loss = torch.nn.functional.cross_entropy(torch.tensor(logits).double(), torch.tensor(targets))
                for _ in range(10):
                    greedy = [*greedy, int(answer(greedy, [len(greedy) - 1]).argmax())]
                answers |= {"logits": logits, "loss per token": loss.item(), "greedy tokens": greedy[8:]}
            else:
                answers[name] = [token for token in questions[name] if answer(token)] if callable(answer) else answer
    except Exception as error:
        answers["refused"] = f"refused: {error}"
    return answers


def transformers(model: str, adapter: str | None = None, tokenizer: str | None = None, **options: str) -> Answers:
    """transformers, with PEFT for an adapter. Nothing is downloaded, unpickled or executed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, __version__, logging

    yield "program", f"transformers {__version__}"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options |= {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(tokenizer or model, **options)

    def chat(messages: list[dict]) -> dict:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return {"text": text, "ids": ids}

    yield "ids of texts", lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    yield "ids with BOS", tokenizer.encode("a")
    yield "conversations", chat
    decoder = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32, use_safetensors=True, **options)
    defaults = decoder.generation_config
    ends = defaults.eos_token_id
    yield "EOS", sorted(ends) if isinstance(ends, list) else [ends]
    sampling = {"repetition_penalty": 1.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
    sampling |= {name: getattr(defaults, name) for name in sampling if getattr(defaults, name) is not None}
    if not defaults.do_sample:
        sampling |= {"temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    yield "sampling", sampling
    if adapter is not None:
        import peft

        yield "program", f"peft {peft.__version__}, transformers {__version__}"
        decoder = peft.PeftModel.from_pretrained(decoder, adapter)
    decoder.eval().requires_grad_(False)
    yield "logits", lambda ids, keep: decoder(torch.tensor([ids]), logits_to_keep=torch.tensor(keep)).logits[0].numpy()


def llama_cpp(place: str, context: int) -> Answers:
    """llama.cpp in its Python package. Of the ids that end a text, it also has some that it knows by their names."""
    from llama_cpp import Llama, __version__, llama_vocab_is_eog
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    yield "program", f"llama-cpp-python {__version__}"
    model = Llama(place, n_ctx=context, n_batch=context, logits_all=True, type_k=0, type_v=0, verbose=False)
    bos, eos = (model._model.token_get_text(token) for token in (model.token_bos(), model.token_eos()))

    def chat(messages: list[dict]) -> dict:
        text = Jinja2ChatFormatter(model.metadata["tokenizer.chat_template"], eos, bos)(messages=messages).prompt
        return {"text": text, "ids": model.tokenize(text.encode(), add_bos=False, special=True)}

    def logits(ids: list[int], positions: list[int]) -> np.ndarray:
        model.reset()
        model.eval(ids)
        return model.scores[positions]

    yield "ids of texts", lambda text: model.tokenize(text.encode(), add_bos=False)
    yield "ids with BOS", model.tokenize(b"a")
    yield "conversations", chat
    yield "EOS", lambda token: llama_vocab_is_eog(model._model.vocab, token)
    yield "logits", logits


if __name__ == "__main__":
    answers = ask(transformers, **json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    np.savez(sys.argv[2], **{name: a if name == "logits" else json.dumps(a) for name, a in answers.items()})
