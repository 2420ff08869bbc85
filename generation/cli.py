"""What generate.py does with the prompts: load the model, then continue them in batches or hold a conversation."""

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import kernels
from checkpoints.find import describe
from data.chat import ChatFormat
from data.tokenizer import Tokenizer, encode_prompt, tokens_after
from errors import log
from generation.conversation import Conversation, write
from generation.generate import check_prompts, generate
from generation.load import load_decoder, open_model
from generation.settings import Settings
from generation.stream import TextStream
from model.device import explain_out_of_memory


@explain_out_of_memory("out of memory; use a smaller --batch-size, fewer --max-new-tokens, or --device cpu.")
def run(settings: Settings, directory: Path, tokenizer: Tokenizer, prompts: Sequence[str]) -> None:
    """Print the continuations of the prompts, in a chat the answers. A chat without prompts is a conversation."""
    checkpoint, _, ends = open_model(directory, settings.adapter, tokenizer)
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
        Conversation(continue_prompts, chat, settings, context).run()
    else:
        print_texts(continue_prompts, settings, tokenizer, prompts, encoded)


def print_texts(
    continue_prompts: Callable, settings: Settings, tokenizer: Tokenizer,
    prompts: Sequence[str], encoded: list[list[int]],
) -> None:  # fmt: skip
    """Generate all samples of the prompts in batches; print the texts (in a chat the answers) in order, or as JSON."""
    samples = [*itertools.product(range(len(prompts)), range(settings.samples))]  # place of the prompt, sample number
    first_tokens = [None if settings.chat else tokens_after(tokenizer, prompt) for prompt in prompts]
    for start in range(0, len(samples), settings.batch_size):
        batch = samples[start : start + settings.batch_size]
        streams = [TextStream(tokenizer, settings.stop, () if settings.chat else encoded[place]) for place, _ in batch]
        rows = [{"row": place, "prompt": prompts[place], "sample": number} for place, number in batch]
        output = BatchOutput(streams, rows if settings.jsonl else None)
        result = continue_prompts(
            [encoded[place] for place, _ in batch],
            sample_numbers=[number for _, number in batch],
            first_tokens=[first_tokens[place] for place, _ in batch],
            on_token=output.push,
            on_finish=output.finish,
        )
        if not settings.jsonl:
            write("\n\n" if start + len(batch) < len(samples) else "\n")
        if "context" in result.finish_reasons:
            log("a text ends where the model's context is full")


@dataclass
class BatchOutput:
    """Prints the texts of a batch in order, the first unfinished one as it grows; as JSON each when it is finished."""

    streams: list[TextStream]
    rows: list[dict] | None  # for JSON: the fields that come before a text
    first: int = 0  # place of the first text that is not completely printed
    printed: int = 0  # characters of it

    def push(self, i: int, token: int) -> bool:
        """Add a token to text i; returns whether a stop string has ended it."""
        self.streams[i].push(token)
        self.print_in_order()
        return self.streams[i].stopped

    def finish(self, i: int, reason: str) -> None:
        self.streams[i].finish()
        self.print_in_order()
        if self.rows is not None:
            row = self.rows[i] | {"text": self.streams[i].text, "end": reason}
            write(json.dumps(row, ensure_ascii=False) + "\n")

    def print_in_order(self) -> None:
        while self.rows is None and self.first < len(self.streams):
            stream = self.streams[self.first]
            write(stream.text[self.printed :])
            self.printed = len(stream.text)
            if not stream.finished:
                return
            self.first += 1
            self.printed = 0
            write("\n\n" if self.first < len(self.streams) else "")
