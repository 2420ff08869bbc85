"""What generate.py does: load a checkpoint, then hand text to one function and notes about it to another."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

import kernels
from data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from errors import UserError
from generation.generate import Generation, check_prompts, generate
from generation.prompts import prompt_ids
from generation.settings import Settings
from generation.stream import TextStream
from generation.weights import bytes_per_step, cast_weights
from model.decoder import Decoder
from model.device import choose_device, choose_inference_dtype, choose_kernels
from model.find_checkpoint import eos_ids
from model.pretrained import load_config, load_pretrained


def run(
    settings: Settings,
    checkpoint: Path,
    prompts: Sequence[str],
    write: Callable[[str], object],
    note: Callable[[str], object],
) -> None:
    """Continue the prompts as the settings ask: texts to `write`, piece by piece, and lines about them to `note`."""
    config = load_config(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    check_vocabulary(tokenizer, config.vocab_size)
    prompts = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    check_prompts(prompts, config.max_position_embeddings)  # before the weights are read, which may take long
    ends = eos_ids(checkpoint, tokenizer.eos_id)
    with memory_of(settings):
        decoder = load_decoder(checkpoint, settings)
    dtype = str(decoder.compute_dtype).removeprefix("torch.")
    device = next(decoder.parameters()).device
    note(f"{checkpoint} on {device} in {dtype}, kernels: {kernels.describe(device)}")

    texts = [(prompt, number) for prompt in prompts for number in range(settings.samples)]
    transcript = Transcript(len(texts), write, note)
    results = []
    for first in range(0, len(texts), settings.batch_size):
        batch = texts[first : first + settings.batch_size]
        with memory_of(settings):
            results.append(generate_batch(batch, first, transcript, decoder, tokenizer, ends, settings))
    note(speed(results, bytes_per_step(decoder)))


def generate_batch(
    batch: list[tuple[list[int], int]],
    first: int,
    transcript: "Transcript",
    decoder: Decoder,
    tokenizer: Tokenizer,
    ends: frozenset[int],
    settings: Settings,
) -> Generation:
    """Generate (prompt, sample number) pairs at once and hand their text to the transcript, from text `first` on."""
    streams = [
        TextStream(tokenizer, prompt, settings.stop, lambda text, row=row: transcript.write(first + row, text))
        for row, (prompt, _) in enumerate(batch)
    ]

    def end(row: int, ending: str) -> None:
        streams[row].close()
        transcript.end(first + row, ending)

    return generate(
        decoder,
        [prompt for prompt, _ in batch],
        max_new_tokens=settings.max_new_tokens,
        sampling=settings.sampling,
        seed=settings.seed,
        sample_numbers=[number for _, number in batch],
        eos_ids=ends,
        vocabulary=tokenizer.vocab_size,
        on_token=lambda row, token: streams[row].push(token),
        on_end=end,
    )


class Transcript:
    """Texts written one after another with a blank line between: the first unfinished one streams, later ones wait."""

    def __init__(self, count: int, write: Callable[[str], object], note: Callable[[str], object]) -> None:
        self._write, self._note = write, note
        self._waiting = [""] * count
        self._endings: list[str | None] = [None] * count
        self._current = 0
        self._announce()

    def write(self, text: int, piece: str) -> None:
        """Take the next piece of a text."""
        if text == self._current:
            self._write(piece)
        else:
            self._waiting[text] += piece

    def end(self, text: int, ending: str) -> None:
        """Take the end of a text; goes on to the next ones as far as they have ended too."""
        self._endings[text] = ending
        while self._current < len(self._endings) and self._endings[self._current] is not None:
            self._write("\n")
            if self._endings[self._current] == "context":
                self._note("the text ends here because the model's context is full")
            self._current += 1
            if self._current < len(self._endings):
                self._write("\n")
                self._announce()
                self._write(self._waiting[self._current])

    def _announce(self) -> None:
        if len(self._endings) > 1:
            self._note(f"{self._current + 1} of {len(self._endings)}")


def load_decoder(checkpoint: Path, settings: Settings) -> Decoder:
    """The model on its device, its weights in the dtype that it computes in."""
    device = choose_device(settings.device)
    choose_kernels(settings.kernels, device)
    decoder = load_pretrained(checkpoint, device=device).eval()
    cast_weights(decoder, choose_inference_dtype(settings.dtype, device, next(decoder.parameters()).dtype))
    return decoder


@contextlib.contextmanager
def memory_of(settings: Settings) -> Iterator[None]:
    """Say in a sentence that the device's memory does not suffice."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError(
            f"the device's memory is too small; give a smaller --batch-size (it is {settings.batch_size}) "
            f"or --max-new-tokens, or --device cpu."
        ) from None


def speed(results: list[Generation], step_bytes: int) -> str:
    """Tokens per second, and beside decoding its physical limit: the rate at which the weights were read."""
    prompts = sum(result.prompt_tokens for result in results)
    prefill = sum(result.prefill_seconds for result in results)
    line = f"prefill {prompts} tokens, {prompts / prefill:,.0f} tokens/s"
    steps = sum(result.steps for result in results)
    if not steps:
        return line
    seconds = sum(result.decode_seconds for result in results)
    # The prefill gave each row its first token; a row that ended with that one may have none.
    decoded = sum(max(len(row) - 1, 0) for result in results for row in result.tokens)
    return (
        f"{line}; decode {decoded} tokens, {decoded / seconds:,.0f} tokens/s; "
        f"{step_bytes / 1e6:,.1f} MB of weights a step, read at {step_bytes * steps / seconds / 1e9:,.2f} GB/s"
    )
