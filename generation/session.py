"""What generate.py does: load a checkpoint; then either generate in batches, and print the texts in the order of the
prompts, or hold a conversation."""

import functools
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import kernels
from checkpoints import find
from checkpoints.pretrained import Checkpoint, load_pretrained, open_checkpoint, save_pretrained, write_json
from data.chat import ChatFormat
from data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from errors import UserError
from files import read_json
from generation import terminal
from generation.conversation import Conversation
from generation.generate import MAX_CPU_SEQUENCES, generate, has_cpu_step
from generation.prompts import check_prompts, encode_prompt, first_tokens
from generation.settings import Settings
from generation.stream import OrderedTexts, TextStream
from generation.weights import quantize_matrices
from model.decoder import Decoder
from model.device import choose_device, choose_inference_dtype, explain_out_of_memory


@explain_out_of_memory("out of memory; use a smaller --batch-size, fewer --max-new-tokens, or --device cpu.")
def run(
    settings: Settings,
    directory: Path,
    prompts: Sequence[str],
    write: Callable[[str], object] = terminal.write,
    log: Callable[[str], object] = terminal.log,
    read: Callable[[], str] = terminal.read_line,
) -> None:
    """Continue the prompts, or in a chat answer them: `write` gets the texts bit by bit, `log` lines about them.

    A chat without prompts is a conversation: `read` gives one message after another, until it raises EOFError.
    """
    checkpoint, tokenizer, eos_ids = open_directory(directory, settings.adapter)
    if settings.merge is not None:
        return merge(checkpoint, tokenizer, eos_ids, settings.merge)
    context = checkpoint.config.max_position_embeddings
    if settings.chat and tokenizer.chat_template is None:
        teach = f"python train.py --init-from {shlex.quote(str(directory))} --data python-chat, or your own chat.jsonl"
        raise UserError(f"{directory} has no chat template, so it only continues text; teach it to talk: {teach}")
    if settings.chat:
        chat = ChatFormat(tokenizer, settings.system)
        eos_ids |= chat.ends
        encoded = [chat.encode([{"role": "user", "content": text}]) for text in prompts]
    else:
        encoded = [encode_prompt(tokenizer, text) for text in prompts]
    check_prompts(encoded, context)  # before the weights
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
    if settings.chat and not prompts:
        Conversation(continue_prompts, chat, settings, context, write, log).run(read)
        return
    firsts = [None if settings.chat else first_tokens(tokenizer, text) for text in prompts]
    requests = [(*pair, n) for pair in zip(encoded, firsts, strict=True) for n in range(settings.samples)]
    streams = [TextStream(tokenizer, settings.stop, () if settings.chat else ids) for ids, _, _ in requests]
    parts = [[stream.prompt] for stream in streams]  # with --jsonl, the texts

    def finish(i: int, reason: str) -> None:
        parts[i].append(streams[i].flush())
        number, sample = divmod(i, settings.samples)
        found = {"prompt": prompts[number], "sample": sample, "text": "".join(parts[i]), "end": reason}
        write(json.dumps(found, ensure_ascii=False) + "\n")

    def push(i: int, token: int) -> bool:
        parts[i].append(streams[i].push(token))
        return streams[i].stopped

    if not settings.jsonl:
        output = OrderedTexts(streams, write)
        push, finish = output.push, lambda i, _: output.finish(i)
    for start in range(0, len(requests), settings.batch_size):
        batch, first, numbers = zip(*requests[start : start + settings.batch_size], strict=True)
        result = continue_prompts(
            batch,
            sample_numbers=numbers,
            first_tokens=first,
            on_token=lambda i, token, start=start: push(start + i, token),
            on_finish=lambda i, reason, start=start: finish(start + i, reason),
        )
        if "context" in result.finish_reasons:
            log("a text ends where the model's context is full")


def open_directory(directory: Path, adapter: str | None = None) -> tuple[Checkpoint, Tokenizer, frozenset[int]]:
    """A checkpoint whose weights are not read yet, its tokenizer, and the ids that end a text."""
    model, found = find.find_adapter(directory, adapter)
    checkpoint = open_checkpoint(model, found)
    tokenizer = load_tokenizer(found if found is not None and [*found.glob("tokenizer.*")] else model)
    check_vocabulary(tokenizer, checkpoint.config.vocab_size)
    return checkpoint, tokenizer, find.eos_ids(model, tokenizer.eos_id, found)


def merge(checkpoint: Checkpoint, tokenizer: Tokenizer, eos_ids: frozenset[int], new: Path) -> None:
    """Write a model with its adapter added, in the dtypes of its files, as the directory `new`."""
    if new.exists():
        raise UserError(f"--merge {new} exists; give a new directory.")
    decoder, unfinished = load_pretrained(checkpoint), new.with_name(f"{new.name}.new")
    save_pretrained(decoder, unfinished, bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id)
    tokenizer.save(unfinished)
    fields = read_json(find.generation_config(checkpoint.directory, checkpoint.adapter))
    ends = [tokenizer.eos_id, *sorted(eos_ids - {tokenizer.eos_id})]
    write_json(unfinished / "generation_config.json", fields | {"eos_token_id": ends})
    unfinished.rename(new)
    terminal.log(f"written: {new}; try it: python generate.py {shlex.quote(str(new))}")


def load_decoder(checkpoint: Checkpoint, settings: Settings) -> Decoder:
    """The model on its device, with its weights in the dtype it computes in."""
    device, int8 = choose_device(settings.device), settings.dtype == "int8"
    kernels.use(settings.kernels, device)
    if int8 and not has_cpu_step(checkpoint.config, device, torch.bfloat16, settings.batch_size):
        raise UserError(
            f"--dtype int8 needs a CPU, a --batch-size (now {settings.batch_size}) of at most {MAX_CPU_SEQUENCES}, and "
            "a pre-norm model with RMSNorm or LayerNorm and SwiGLU; use bfloat16."
        )
    dtype = choose_inference_dtype("bfloat16" if int8 else settings.dtype, device, checkpoint.dtype())
    decoder = load_pretrained(checkpoint, device=device, compute_dtype=dtype, cast=True).eval()
    if int8:
        quantize_matrices(decoder)
    return decoder
