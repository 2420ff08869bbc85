"""What generate.py does with the prompts: load the model, then continue them in batches or hold a conversation."""

import contextlib
import functools
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import kernels
from checkpoints.find import describe
from data.chat import ChatFormat
from data.tokenizer import Tokenizer, encode_prompt, tokens_after
from errors import log, printable
from generation.conversation import Conversation
from generation.generate import check_prompts, generate
from generation.load import load_decoder, merge, open_model
from generation.settings import Settings
from generation.stream import TextStream
from model.device import explain_out_of_memory


@explain_out_of_memory("out of memory; use a smaller --batch-size, fewer --max-new-tokens, or --device cpu.")
def run(settings: Settings, directory: Path, tokenizer: Tokenizer, prompts: Sequence[str]) -> None:
    """Print the continuations of the prompts, in a chat the answers. A chat without prompts is a conversation."""
    checkpoint, _, ends = open_model(directory, settings.adapter, tokenizer)
    if settings.merge is not None:
        merge(checkpoint, tokenizer, ends, settings.merge)
        log(f"written: {settings.merge}; try it: python generate.py {shlex.quote(str(settings.merge))}")
        return
    if settings.chat:
        chat = ChatFormat(tokenizer, settings.system)
        ends |= chat.ends
        encoded = [chat.encode([{"role": "user", "content": text}]) for text in prompts]
    else:
        encoded = [encode_prompt(tokenizer, text) for text in prompts]
    context = checkpoint.config.max_position_embeddings
    check_prompts(encoded, context)  # before the weights are read
    decoder = load_decoder(checkpoint, settings.device, settings.dtype, settings.kernels, settings.batch_size)
    del checkpoint  # with the mapping of its files
    device = next(decoder.parameters()).device
    dtype = str(decoder.compute_dtype).removeprefix("torch.")
    dtype += " with int8 matrices" if settings.dtype == "int8" else ""
    log(f"{describe(directory, settings.adapter)} on {device} in {dtype}, kernels: {kernels.describe(device)}")
    if settings.samples > 1 and settings.sampling.temperature == 0:
        log("the samples of a prompt are equal, because temperature 0 always takes the most likely token")
    continue_prompts = functools.partial(
        generate, decoder, max_new_tokens=settings.token_limit, sampling=settings.sampling, seed=settings.seed,
        eos_ids=ends, vocab_size=tokenizer.vocab_size,
    )  # fmt: skip
    if settings.chat and not prompts:
        Conversation(continue_prompts, chat, settings, context, write, log).run(read_line)
    else:
        print_texts(continue_prompts, settings, tokenizer, prompts, encoded)


def print_texts(
    continue_prompts: Callable, settings: Settings, tokenizer: Tokenizer,
    prompts: Sequence[str], encoded: list[list[int]],
) -> None:  # fmt: skip
    """Generate all samples of the prompts in batches; print the texts (in a chat the answers) in order, or as JSON."""
    samples = [*itertools.product(range(len(prompts)), range(settings.samples))]  # place of the prompt, sample number
    first_tokens = [None if settings.chat else tokens_after(tokenizer, prompt) for prompt in prompts]
    streams = [TextStream(tokenizer, settings.stop, () if settings.chat else encoded[place]) for place, _ in samples]
    # Texts that are not completely written, in order. Only the first is written as it grows.
    unwritten = [] if settings.jsonl else [*streams]
    written = 0  # characters of the first

    def write_in_order() -> None:
        nonlocal written
        while unwritten:
            stream = unwritten[0]
            write(stream.text[written:])
            written = 0 if stream.finished else len(stream.text)
            if not stream.finished:
                break
            del unwritten[0]
            write("\n\n" if unwritten else "\n")

    def push(stream: TextStream, token: int) -> bool:
        stream.push(token)
        write_in_order()
        return stream.stopped

    def finish(stream: TextStream, place: int, number: int, reason: str) -> None:
        stream.finish()
        write_in_order()
        if settings.jsonl:
            row = {"prompt": prompts[place], "sample": number, "text": stream.text, "end": reason}
            write(json.dumps(row, ensure_ascii=False) + "\n")

    for start in range(0, len(samples), settings.batch_size):
        batch = samples[start : start + settings.batch_size]
        result = continue_prompts(
            [encoded[place] for place, _ in batch],
            sample_numbers=[number for _, number in batch],
            first_tokens=[first_tokens[place] for place, _ in batch],
            on_token=lambda i, token, start=start: push(streams[start + i], token),
            on_finish=lambda i, reason, start=start: finish(streams[start + i], *samples[start + i], reason),
        )
        if "context" in result.finish_reasons:
            log("a text ends where the model's context is full")


def write(text: str) -> None:
    """Write to standard output and flush, to a terminal without control characters."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def read_line() -> str:
    """One line that the user types, with the editing keys and the history of readline where Python has it."""
    with contextlib.suppress(ImportError):  # Windows, whose console edits lines itself
        import readline  # noqa: F401
    if sys.stdin.errors != "replace":  # the first time
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    if sys.stdout.isatty():
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)  # standard output is for the text
    return input()
