"""What generate.py does: read the prompts, load the model, then continue them in batches or hold a conversation."""

import contextlib
import functools
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import kernels
from checkpoints.find import describe
from data.chat import ChatFormat
from data.tokenizer import Tokenizer, encode_prompt, tokens_after
from errors import UserError, log, note, printable, reading
from generation.conversation import Conversation
from generation.generate import check_prompts, generate
from generation.load import load_decoder, merge, open_model
from generation.settings import Settings
from generation.stream import TextStream
from model.device import explain_out_of_memory


@explain_out_of_memory("out of memory; use a smaller --batch-size, fewer --max-new-tokens, or --device cpu.")
def run(settings: Settings, directory: Path, prompts: Sequence[str]) -> None:
    """Print the continuations of the prompts, in a chat the answers. A chat without prompts is a conversation."""
    checkpoint, tokenizer, ends = open_model(directory, settings.adapter)
    if settings.merge is not None:
        merge(checkpoint, tokenizer, ends, settings.merge)
        log(f"written: {settings.merge}; try it: python generate.py {shlex.quote(str(settings.merge))}")
        return
    if settings.chat:
        if tokenizer.chat_template is None:
            teach = f"python train.py --init-from {shlex.quote(str(directory))} --data python-chat --learning-rate 1e-3"
            raise UserError(f"{directory} has no chat template, so it only continues text; teach it to talk: {teach}")
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


class Text(NamedTuple):
    """A sample of a prompt."""

    prompt: str
    number: int
    ids: list[int]  # of the prompt
    first_tokens: list[int] | None
    stream: TextStream


def print_texts(
    continue_prompts: Callable, settings: Settings, tokenizer: Tokenizer,
    prompts: Sequence[str], encoded: list[list[int]],
) -> None:  # fmt: skip
    """Generate all samples of the prompts in batches, and print them in order or as lines of JSON."""
    texts = []
    for prompt, ids in zip(prompts, encoded, strict=True):
        first_tokens = None if settings.chat else tokens_after(tokenizer, prompt)
        for number in range(settings.samples):
            stream = TextStream(tokenizer, settings.stop, () if settings.chat else ids)  # of a chat, the answer alone
            texts.append(Text(prompt, number, ids, first_tokens, stream))
    # Texts that are not completely written, in order. Only the first is written as it grows.
    unwritten = [] if settings.jsonl else [text.stream for text in texts]
    written = 0  # characters of the first

    def write_in_order() -> None:
        nonlocal written
        while unwritten:
            stream = unwritten[0]
            write(stream.text[written:])
            written = len(stream.text)
            if not stream.finished:
                break
            del unwritten[0]
            written = 0
            write("\n\n" if unwritten else "\n")

    def push(text: Text, token: int) -> bool:
        text.stream.push(token)
        write_in_order()
        return text.stream.stopped

    def finish(text: Text, reason: str) -> None:
        text.stream.finish()
        write_in_order()
        if settings.jsonl:
            row = {"prompt": text.prompt, "sample": text.number, "text": text.stream.text, "end": reason}
            write(json.dumps(row, ensure_ascii=False) + "\n")

    for start in range(0, len(texts), settings.batch_size):
        batch = texts[start : start + settings.batch_size]
        result = continue_prompts(
            [text.ids for text in batch],
            sample_numbers=[text.number for text in batch],
            first_tokens=[text.first_tokens for text in batch],
            on_token=lambda i, token, batch=batch: push(batch[i], token),
            on_finish=lambda i, reason, batch=batch: finish(batch[i], reason),
        )
        if "context" in result.finish_reasons:
            log("a text ends where the model's context is full")


def read_prompts(settings: Settings) -> list[str]:
    """The prompts of the command line, else those on standard input; none for a conversation in a terminal."""
    prompts = [*settings.prompt] if settings.text is None else [settings.text, *settings.prompt]
    if prompts and settings.jsonl and os.path.isfile(prompts[0]):  # a path of any length
        raise UserError(f"--jsonl reads standard input: python generate.py RUN --jsonl < {prompts[0]}")
    if prompts:
        return prompts
    if settings.jsonl:
        with reading("standard input", 'give a JSON text, or an object with "prompt", in each line'):
            return [read_json_prompt(line, number) for number, line in enumerate(sys.stdin.buffer, 1) if line.strip()]
    if not sys.stdin.isatty():
        log("reading the prompt from standard input")  # if nobody writes to that pipe, the program seems to hang
        with reading("standard input", "convert it to UTF-8"):
            text = sys.stdin.buffer.read().decode("utf-8")
        return [text.removesuffix("\n").removesuffix("\r")]  # the one line break that `echo` and editors append
    if settings.chat:
        return []
    log("no prompt: the model starts a text of its own; give one after the run, or talk with a chat model with --chat")
    return [""]


def read_json_prompt(line: bytes, number: int) -> str:
    """The prompt of a line of JSON."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None
    prompt = row.get("prompt") if isinstance(row, dict) else row
    if isinstance(row, dict) and len(row) > 1:
        note(f'standard input: only "prompt" is read of {", ".join(row)}; sampling is set by flags')
    if not isinstance(prompt, str):
        raise ValueError(f"line {number}: {line.decode(errors='replace').strip():.60} is no text, and has no prompt")
    prompt.encode()  # JSON can have half a surrogate pair as an escape
    return prompt


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
