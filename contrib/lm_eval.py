"""lm-eval (EleutherAI's lm-evaluation-harness) with any model of this project: `python -m contrib.lm_eval --help`.

    python -m contrib.lm_eval --model prenorm --model_args pretrained=runs/NAME --tasks hellaswag --batch_size 16

takes lm-eval's own arguments. A checkpoint that transformers opens needs none of this: `lm_eval --model hf --model_args
pretrained=runs/NAME/best`. The two give equal results, also for the first token of a text, which lm-eval predicts from
BOS (or EOS without one), and for texts and prompts longer than the context.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import torch

from checkpoints.find import eos_ids, find_checkpoint
from checkpoints.pretrained import open_checkpoint
from data.tokenizer import Tokenizer, load_tokenizer
from errors import UserError, exit_on_user_error
from generation.generate import generate
from generation.prompts import encode_prompt
from generation.session import load_decoder
from generation.settings import Sampling, Settings
from generation.stream import TextStream
from model.decoder import Decoder

Ids = Sequence[int]
MAX_NEW_TOKENS = 256  # where a task says nothing, as in lm-eval


def main() -> None:
    """Run lm-eval's command line with the model `prenorm` added to those that it knows."""
    with exit_on_user_error():
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()


@functools.cache
def register() -> type:
    """Make `--model prenorm` known to lm-eval and return its class. Raises `UserError` when lm-eval is missing."""
    try:
        import lm_eval.models  # noqa: F401 - the registry reads its own models only while it is empty
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    except ImportError:
        raise UserError("this needs lm-eval; install it with `pip install lm_eval`.") from None

    class Prenorm(TemplateLM):
        """`pretrained` is a run folder or a checkpoint; `dtype` (but int8) and `device` are as for generate.py.

        A `batch_size` that is not a number, such as auto, means 16.
        """

        def __init__(self, pretrained: str, batch_size: int | str = 16, device: str = "auto", dtype: str = "auto", **_):
            super().__init__()
            if device.startswith("cuda") and not torch.cuda.is_available():
                device = "auto"  # lm-eval's command line asks for cuda:0 where its user asked for nothing
            if dtype == "int8":  # only decoding steps use it, and log-likelihoods are those of complete texts
                raise UserError("dtype=int8 is for generate.py; evaluate with dtype=bfloat16.")
            checkpoint = find_checkpoint(Path(pretrained))
            self.decoder = load_decoder(open_checkpoint(checkpoint), Settings(device=device, dtype=dtype))
            self.tokenizer = load_tokenizer(checkpoint)
            self.batch_size = int(batch_size) if str(batch_size).isdigit() else 16
            self.eos_ids = eos_ids(checkpoint, self.tokenizer.eos_id)

        @property
        def eot_token_id(self) -> int:
            return self.tokenizer.eos_id

        @property
        def prefix_token_id(self) -> int:
            return encode_prompt(self.tokenizer, "")[0]

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
            bos = self.tokenizer.bos_id is not None and add_special_tokens is not False
            return [self.tokenizer.bos_id] * bos + self.tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
            found = log_likelihoods(self.decoder, [request[1:] for request in requests], self.batch_size)
            for (texts, *_ids), answer in zip(requests, found, strict=True):
                self.cache_hook.add_partial("loglikelihood", texts, answer)
            return found

        def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
            windows, owners = [], []
            for number, request in enumerate(requests):
                ids = self.tok_encode(request.args[0])
                context = self.decoder.config.max_position_embeddings
                found = [*map(make_disjoint_window, get_rolling_token_windows(ids, self.prefix_token_id, context, 1))]
                windows += found
                owners += [number] * len(found)
            totals = [0.0] * len(requests)
            found = log_likelihoods(self.decoder, windows, self.batch_size)
            for owner, (value, _greedy) in zip(owners, found, strict=True):
                totals[owner] += value
            for request, total in zip(requests, totals, strict=True):
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            return totals

        def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
            answers = [""] * len(requests)
            by_arguments = {}
            for number, request in enumerate(requests):
                by_arguments.setdefault(repr(request.args[1]), []).append(number)
            for numbers in by_arguments.values():
                prompts = [self.tok_encode(requests[number].args[0]) for number in numbers]
                arguments = dict(requests[numbers[0]].args[1])
                found = continuations(self.decoder, self.tokenizer, prompts, arguments, self.eos_ids, self.batch_size)
                for number, text in zip(numbers, found, strict=True):
                    answers[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
            return answers

    return register_model("prenorm")(Prenorm)


@torch.inference_mode()
def log_likelihoods(decoder: Decoder, pairs: Sequence[tuple[Ids, Ids]], batch_size: int) -> list[tuple[float, bool]]:
    """For each (context, continuation): the sum of the continuation's log probabilities in nats, and whether every
    token of it is the most likely one.

    A context (at least one token) is cut on the left where both are too long for the model together. Raises `UserError`
    for a continuation that is too long by itself.
    """
    limit, device = decoder.config.max_position_embeddings, next(decoder.parameters()).device
    answers = [(0.0, True)] * len(pairs)
    for batch in in_batches([len(context) + len(continuation) for context, continuation in pairs], batch_size):
        inputs = []
        for i in batch:
            context, continuation = pairs[i]
            if len(continuation) > limit:
                raise UserError(
                    f"a continuation has {len(continuation)} tokens, but the model's context is {limit}; "
                    f"leave out the task, or use a model with a longer context."
                )
            inputs.append([*context, *continuation][-limit - 1 : -1])
        longest = max(map(len, inputs))
        # Padding on the right: a causal model's logits do not depend on it.
        tokens = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in inputs], device=device)
        for i, ids, logits in zip(batch, inputs, decoder(tokens), strict=True):
            expected = torch.tensor(pairs[i][1], device=device, dtype=torch.int64)
            logits = logits[len(ids) - len(expected) : len(ids)]  # (tokens of the continuation, V)
            chosen = logits.log_softmax(-1).gather(1, expected[:, None])
            answers[i] = chosen.double().sum().item(), bool((logits.argmax(-1) == expected).all())
    return answers


def continuations(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Ids],
    arguments: dict,
    eos_ids: frozenset[int],
    batch_size: int,
) -> list[str]:
    """The text that follows each prompt, up to a stop string; `arguments` are lm-eval's generation_kwargs.

    A prompt is cut on the left to leave room for `max_gen_toks` tokens.
    """
    until, count, sampling = read_arguments(arguments)
    room = decoder.config.max_position_embeddings - count
    if room < 1:
        raise UserError(
            f"max_gen_toks is {count}, but the model's context is {decoder.config.max_position_embeddings} tokens for "
            f"prompt and answer together; give less with --gen_kwargs max_gen_toks=N."
        )
    answers = [""] * len(prompts)
    for batch in in_batches([len(prompt) for prompt in prompts], batch_size):
        streams = [TextStream(tokenizer, until) for _ in batch]

        def on_token(place: int, token: int, batch=batch, streams=streams) -> bool:
            answers[batch[place]] += streams[place].push(token)
            return streams[place].stopped

        generate(
            decoder,
            [prompts[i][-room:] for i in batch],
            max_new_tokens=count,
            sampling=sampling,
            eos_ids=eos_ids,
            vocab_size=tokenizer.vocab_size,
            on_token=on_token,
        )
        for i, stream in zip(batch, streams, strict=True):
            answers[i] += stream.flush()
    return answers


def read_arguments(arguments: dict) -> tuple[list[str], int, Sampling]:
    """Stop strings, maximum number of tokens and sampling from lm-eval's generation_kwargs; greedy unless do_sample."""
    arguments = dict(arguments)
    until = arguments.pop("until", None) or []
    until = [until] if isinstance(until, str) else [stop for stop in until if stop]
    aliases = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    counts = [value for alias in aliases if (value := arguments.pop(alias, None)) is not None]
    sample = arguments.pop("do_sample", arguments.get("temperature", 0.0) > 0)
    if unknown := arguments.keys() - {field.name for field in fields(Sampling)}:
        raise UserError(f"the task's generation_kwargs has {', '.join(sorted(unknown))}, which is not known here.")
    sampling = Sampling(**({"temperature": 1.0} | arguments if sample else arguments | {"temperature": 0.0}))
    return until, int(counts[0]) if counts else MAX_NEW_TOKENS, sampling


def in_batches(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Indices in batches of similar lengths, the longest first: if memory is too small, that shows at once."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return (order[start : start + batch_size] for start in range(0, len(order), batch_size))


if __name__ == "__main__":
    main()
