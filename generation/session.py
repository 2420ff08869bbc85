"""What generate.py does: load a checkpoint; then either generate in batches, and print the texts in the order of the
prompts, or respond to each line that is typed."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

import kernels
from checkpoints import find
from checkpoints.pretrained import Checkpoint, load_pretrained, open_checkpoint
from data.chat import ChatFormat
from data.tokenizer import check_vocabulary, load_tokenizer
from errors import UserError
from generation import terminal
from generation.conversation import Conversation
from generation.generate import Generation, generate, import_cpu_step
from generation.prompts import check_prompts, encode_prompt, first_tokens
from generation.settings import Settings
from generation.stream import OrderedTexts, TextStream
from generation.weights import bytes_per_step, quantize_matrices
from model.config import ModelConfig
from model.decoder import Decoder
from model.device import choose_device, choose_inference_dtype, choose_kernels, explain_out_of_memory


@explain_out_of_memory("out of memory; use a smaller --batch-size, fewer --max-new-tokens, or --device cpu.")
def run(
    settings: Settings,
    directory: Path,
    prompts: Sequence[str] | None,
    write: Callable[[str], object] = terminal.write,
    log: Callable[[str], object] = terminal.log,
    read: Callable[[], str] = terminal.read_line,
) -> None:
    """Continue the prompts, or in a chat answer them: `write` gets the texts bit by bit, `log` lines about them.

    Without prompts, `read` gives one line after another to respond to, until it raises EOFError.
    """
    checkpoint, tokenizer = open_checkpoint(directory), load_tokenizer(directory)
    context = checkpoint.config.max_position_embeddings
    check_vocabulary(tokenizer, checkpoint.config.vocab_size)
    chat = ChatFormat(directory, tokenizer, settings.system) if settings.chat else None
    eos_ids = find.eos_ids(directory, tokenizer.eos_id) | ({chat.end_of_turn} - {None} if chat is not None else set())

    def encode(text: str) -> list[int]:
        return encode_prompt(tokenizer, text) if chat is None else chat.encode([{"role": "user", "content": text}])

    check_prompts([encode(prompt) for prompt in prompts or ()], context)  # before the weights
    decoder = load_decoder(checkpoint, settings)
    del checkpoint  # with the mapping of its files
    device, dtype = next(decoder.parameters()).device, str(decoder.compute_dtype).removeprefix("torch.")
    dtype += " with int8 matrices" * (settings.dtype == "int8")
    log(f"{directory} on {device} in {dtype}, kernels: {kernels.describe(device)}")

    continue_prompts = functools.partial(
        generate,
        decoder,
        max_new_tokens=settings.token_limit,
        sampling=settings.sampling,
        seed=settings.seed,
        eos_ids=eos_ids,
        vocab_size=tokenizer.vocab_size,
    )

    def generate_texts(texts: Sequence[str], sample_numbers: Iterable[int]) -> list[Generation]:
        encoded = [encode(text) for text in texts]
        check_prompts(encoded, context)
        firsts = [None if chat else first_tokens(tokenizer, text) for text in texts]
        requests = [(*pair, n) for pair in zip(encoded, firsts, strict=True) for n in sample_numbers]
        streams = [TextStream(tokenizer, settings.stop, () if chat else prompt) for prompt, _, _ in requests]
        output, results = OrderedTexts(streams, write, log), []
        for start in range(0, len(requests), settings.batch_size):
            batch, firsts, numbers = zip(*requests[start : start + settings.batch_size], strict=True)
            result = continue_prompts(
                batch,
                sample_numbers=numbers,
                first_tokens=firsts,
                on_token=lambda i, token, start=start: output.push(start + i, token),
                on_finish=lambda i, reason, start=start: output.finish(start + i, reason),
            )
            results.append(result)
        return results

    def report(results: list[Generation]) -> None:
        if settings.verbose and results:
            log(speed(results, bytes_per_step(decoder)))

    if prompts is not None:
        report(generate_texts(prompts, range(settings.samples)))
    elif chat is not None:
        conversation = Conversation(continue_prompts, chat, settings, context, write, log)
        terminal.prompt_loop(lambda text: report(conversation.answer(text)), conversation.reset, read, log)
    else:
        numbers = itertools.count()

        def respond(text: str) -> None:
            report(generate_texts([text], itertools.islice(numbers, 1)))  # a number for each text that fits

        terminal.prompt_loop(respond, lambda: None, read, log)


def load_decoder(checkpoint: Checkpoint, settings: Settings) -> Decoder:
    """The model on its device, with its weights in the dtype it computes in."""
    device, int8 = choose_device(settings.device), settings.dtype == "int8"
    choose_kernels(settings.kernels, device)
    if int8:
        check_int8(checkpoint.config, device, settings.batch_size)
    dtype = choose_inference_dtype("bfloat16" if int8 else settings.dtype, device, checkpoint.dtype())
    decoder = load_pretrained(checkpoint, device=device, compute_dtype=dtype, cast=True).eval()
    if int8:
        quantize_matrices(decoder)
    return decoder


def check_int8(config: ModelConfig, device: torch.device, batch_size: int) -> None:
    """Raise `UserError` where no decoding step would use matrices in int8."""
    cpu_step = import_cpu_step() if kernels.implementation(device) is kernels.cpu else None
    if cpu_step is None or not cpu_step.supports(config, torch.bfloat16, batch_size):
        raise UserError(
            f"--dtype int8 needs a CPU, Numba, a --batch-size (now {batch_size}) of at most 16, and a pre-norm model "
            "with RMSNorm or LayerNorm and SwiGLU; use bfloat16."
        )


def speed(results: Sequence[Generation], step_bytes: int) -> str:
    """Tokens per second, and for decoding the rate at which weights were read: memory bandwidth is its limit."""
    prompt_tokens = sum(result.prompt_tokens for result in results)
    line = f"prefill {prompt_tokens} tokens, {prompt_tokens / sum(r.prefill_seconds for r in results):,.0f} tokens/s"
    steps, seconds = sum(result.steps for result in results), sum(result.decode_seconds for result in results)
    if not steps:
        return line
    # The prefill computes the first token of each sequence. A sequence whose first token is EOS has none.
    decoded = sum(max(len(tokens) - 1, 0) for result in results for tokens in result.tokens)
    return (
        f"{line}; decode {decoded} tokens, {decoded / seconds:,.0f} tokens/s; "
        f"{step_bytes / 1e6:,.1f} MB of weights per step, read at {step_bytes * steps / seconds / 1e9:,.2f} GB/s"
    )
