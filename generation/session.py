"""What generate.py does: load a checkpoint; then either generate in batches, and print the texts in the order of the
prompts, or respond to each line that is typed."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import kernels
from checkpoints import find
from checkpoints.pretrained import Checkpoint, load_pretrained, open_checkpoint
from data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from errors import UserError
from generation.chat import ChatFormat
from generation.conversation import Conversation
from generation.generate import FinishReason, Generation, generate
from generation.prompts import check_prompts, encode_prompt, first_tokens
from generation.settings import Settings
from generation.stream import TextStream
from generation.terminal import hold_session
from generation.weights import bytes_per_step, quantize_matrices
from model.config import ModelConfig
from model.decoder import Decoder
from model.device import choose_device, choose_inference_dtype, choose_kernels, explain_out_of_memory
from model.fused_decode import max_sequences
from model.int8 import ALIGNMENT


@dataclass(frozen=True)
class Request:
    """One text to generate."""

    index: int
    """Its place in the output."""
    prompt: list[int]
    """Token ids."""
    sample_number: int
    """Which of the prompt's samples it is: 0, 1, ..."""
    first_tokens: list[int] | None
    """The token ids that its first new token must be among; None for all."""


def run(
    settings: Settings,
    checkpoint: Path,
    prompts: Sequence[str] | None,
    write: Callable[[str], object],
    log: Callable[[str], object],
    read: Callable[[], str] | None = None,
) -> None:
    """Continue the prompts, or in a chat answer them: `write` gets the texts bit by bit, `log` lines about them.

    Without prompts, `read` gives one line after another to respond to, until it raises EOFError.
    """
    if prompts is None and settings.samples > 1:
        raise UserError(f"--samples is {settings.samples}, which needs --prompt; in the terminal ask again instead.")
    opened = open_checkpoint(checkpoint)
    config = opened.config
    chat = ChatFormat(checkpoint, settings.system) if settings.chat else None
    tokenizer = load_tokenizer(checkpoint) if chat is None else chat.tokenizer
    check_vocabulary(tokenizer, config.vocab_size)

    def encode(text: str) -> tuple[list[int], list[int] | None]:
        if chat is not None:
            return chat.encode([{"role": "user", "content": text}]), None
        return encode_prompt(tokenizer, text), first_tokens(tokenizer, text)

    encoded = [encode(prompt) for prompt in prompts or ()]
    check_prompts([ids for ids, _ in encoded], config.max_position_embeddings)  # before the weights are read
    eos_ids = find.eos_ids(checkpoint, tokenizer.eos_id)
    if chat is not None:
        eos_ids |= {chat.end_of_turn} - {None}
        if chat.leaves_system_out:
            log("note: the model's chat template leaves the system prompt out, so --system has no effect")
    with explain_memory(settings):
        decoder = load_decoder(opened, settings)
    dtype = str(decoder.compute_dtype).removeprefix("torch.") + " with int8 matrices" * (settings.dtype == "int8")
    device = next(decoder.parameters()).device
    log(f"{checkpoint} on {device} in {dtype}, kernels: {kernels.describe(device)}")

    def generate_texts(requests: Sequence[Request]) -> list[Generation]:
        output = OrderedOutput(len(requests), write, log)
        results = []
        for start in range(0, len(requests), settings.batch_size):
            batch = requests[start : start + settings.batch_size]
            with explain_memory(settings):
                results.append(generate_batch(decoder, tokenizer, batch, eos_ids, settings, output))
        return results

    def report(*results: Generation) -> None:
        if settings.verbose:
            log(speed(results, bytes_per_step(decoder)))

    if prompts is not None:
        samples = [(ids, number, first) for ids, first in encoded for number in range(settings.samples)]
        report(*generate_texts([Request(index, *sample) for index, sample in enumerate(samples)]))
    elif chat is not None:
        conversation = Conversation(decoder, chat, settings, eos_ids, write, log)

        def answer(text: str) -> None:
            with explain_memory(settings):
                result = conversation.answer(text)
            if result is not None:
                report(result)

        hold_session(answer, conversation.reset, read, log)
    else:
        numbers = itertools.count()

        def continue_text(text: str) -> None:
            ids, first = encode(text)
            check_prompts([ids], config.max_position_embeddings)
            try:
                report(*generate_texts([Request(0, ids, next(numbers), first)]))
            except KeyboardInterrupt:
                write("\n")
                raise

        hold_session(continue_text, lambda: log("nothing to forget: each line is a text of its own"), read, log)


def generate_batch(
    decoder: Decoder,
    tokenizer: Tokenizer,
    batch: Sequence[Request],
    eos_ids: frozenset[int],
    settings: Settings,
    output: "OrderedOutput",
) -> Generation:
    """Generate all requests of a batch at once; their text goes to the output as it is generated."""
    streams = [TextStream(tokenizer, settings.stop) for _ in batch]
    if not settings.chat:
        for request, stream in zip(batch, streams, strict=True):
            output.write(request.index, stream.push_prompt(request.prompt))

    def on_token(i: int, token: int) -> bool:
        output.write(batch[i].index, streams[i].push(token))
        return streams[i].stopped

    def on_finish(i: int, reason: FinishReason) -> None:
        output.write(batch[i].index, streams[i].flush())
        output.finish(batch[i].index, reason)

    return generate(
        decoder,
        [request.prompt for request in batch],
        max_new_tokens=settings.token_limit,
        sampling=settings.sampling,
        seed=settings.seed,
        sample_numbers=[request.sample_number for request in batch],
        first_tokens=[request.first_tokens for request in batch],
        eos_ids=eos_ids,
        vocab_size=tokenizer.vocab_size,
        on_token=on_token,
        on_finish=on_finish,
    )


class OrderedOutput:
    """Prints several texts in order, with a blank line between them.

    The first unfinished text is printed as it is generated; the text of later ones is kept until it is their turn.
    """

    def __init__(self, count: int, write: Callable[[str], object], log: Callable[[str], object]) -> None:
        self._write, self._log = write, log
        self._waiting = [""] * count
        self._finish_reasons: list[FinishReason | None] = [None] * count
        self._current = 0
        self._announce()

    def write(self, index: int, text: str) -> None:
        """Add to the text with this index."""
        if index == self._current:
            self._write(text)
        else:
            self._waiting[index] += text

    def finish(self, index: int, reason: FinishReason) -> None:
        """Mark a text as complete. If it is the current one, print those after it, up to the next unfinished one."""
        self._finish_reasons[index] = reason
        while self._current < len(self._waiting) and self._finish_reasons[self._current] is not None:
            self._write("\n")
            if self._finish_reasons[self._current] == "context":
                self._log("the text ends here because the model's context is full")
            self._current += 1
            if self._current < len(self._waiting):
                self._write("\n")
                self._announce()
                self._write(self._waiting[self._current])

    def _announce(self) -> None:
        if len(self._waiting) > 1:
            self._log(f"text {self._current + 1} of {len(self._waiting)}")


def load_decoder(checkpoint: Checkpoint, settings: Settings) -> Decoder:
    """The model on its device, with its weights in the dtype it computes in."""
    device, int8 = choose_device(settings.device), settings.dtype == "int8"
    if int8 and device.type != "cpu":
        raise UserError(f"--dtype int8 runs only on a CPU, and the device is {device}; leave it out.")
    choose_kernels(settings.kernels, device)
    if int8:
        check_int8(checkpoint.config, device, settings.batch_size)
    dtype = choose_inference_dtype("bfloat16" if int8 else settings.dtype, device, checkpoint.dtype())
    decoder = load_pretrained(checkpoint, device=device, compute_dtype=dtype, cast=True).eval()
    if int8:
        quantize_matrices(decoder)
    return decoder


def check_int8(config: ModelConfig, device: torch.device, batch_size: int) -> None:
    """Raise `UserError` where no decoding step would use matrices in int8, or only the fewest of them."""
    if kernels.implementation(device) is not kernels.cpu:
        raise UserError("--dtype int8 has no Triton kernels; use --kernels torch.")
    if max_sequences(config, device) == 0:
        kind = f"{config.norm} norm, {config.norm_placement}, {config.mlp}"
        kind += ", a bias of o_proj" * config.attention_output_bias
        raise UserError(f"--dtype int8 has no decoding step for this model ({kind}); use bfloat16.")
    if config.hidden_size % ALIGNMENT:
        raise UserError(
            f"--dtype int8 needs a hidden size that is a multiple of {ALIGNMENT}, and this model's is "
            f"{config.hidden_size}; use bfloat16."
        )
    if batch_size > max_sequences(config, device):
        raise UserError(
            f"--batch-size is {batch_size}, and --dtype int8 decodes at most {max_sequences(config, device)} texts at "
            "once; use a smaller one, or bfloat16."
        )


def explain_memory(settings: Settings) -> contextlib.AbstractContextManager[None]:
    """Turn out-of-memory errors into a `UserError` that names the flags that help."""
    return explain_out_of_memory(
        f"out of memory; use a smaller --batch-size (now {settings.batch_size}), fewer --max-new-tokens "
        f"(now {settings.token_limit}), or --device cpu."
    )


def speed(results: Sequence[Generation], step_bytes: int) -> str:
    """Tokens per second, and for decoding the rate at which weights were read: memory bandwidth is its limit."""
    prompt_tokens = sum(result.prompt_tokens for result in results)
    prefill_seconds = sum(result.prefill_seconds for result in results)
    line = f"prefill {prompt_tokens} tokens, {prompt_tokens / prefill_seconds:,.0f} tokens/s"
    steps = sum(result.steps for result in results)
    if not steps:
        return line
    seconds = sum(result.decode_seconds for result in results)
    # The prefill computes the first token of each sequence. A sequence whose first token is EOS has none.
    decoded = sum(max(len(tokens) - 1, 0) for result in results for tokens in result.tokens)
    return (
        f"{line}; decode {decoded} tokens, {decoded / seconds:,.0f} tokens/s; "
        f"{step_bytes / 1e6:,.1f} MB of weights per step, read at {step_bytes * steps / seconds / 1e9:,.2f} GB/s"
    )
