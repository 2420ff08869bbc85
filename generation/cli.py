"""What generate.py does with the prompts: load the model, then continue them in batches or hold a conversation."""

import functools
import itertools
import json
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import kernels
from checkpoints.find import find_files
from data.chat import ChatFormat, Message
from data.tokenizer import Tokenizer, encode_prompt, tokens_after
from errors import UserError, log
from generation.conversation import Conversation, write
from generation.generate import NewToken, check_prompts, generate
from generation.load import load_decoder, open_model
from generation.settings import Settings
from generation.stream import TextStream, stream_texts
from model.device import explain_out_of_memory


@explain_out_of_memory("out of memory; use a smaller --batch-size, fewer --max-new-tokens, or --device cpu.")
def run(
    settings: Settings, directory: Path, tokenizer: Tokenizer, prompts: Sequence[str | list[Message]] | None
) -> None:
    """Print the continuations of the prompts, in a chat the answers to them. None: hold a conversation."""
    checkpoint, _, eos_ids = open_model(directory, settings.adapter, tokenizer)
    context = checkpoint.config.max_position_embeddings
    texts = prompts or []
    if settings.chat:
        chat = ChatFormat(tokenizer, settings.system)
        eos_ids |= chat.ends
        questions = [[{"role": "user", "content": text}] if isinstance(text, str) else text for text in texts]
        encoded = []
        for row, question in enumerate(questions):
            try:
                encoded.append(chat.encode(question))
            except UserError as error:
                raise UserError(f"row {row}: {error}" if settings.jsonl else str(error)) from None
    else:
        encoded = [encode_prompt(tokenizer, text) for text in texts]
    check_prompts(encoded, context)  # before the weights are read
    decoder = load_decoder(checkpoint, settings.device, settings.dtype, settings.kernels, settings.batch_size)
    del checkpoint  # with the mapping of its files
    device = next(decoder.parameters()).device
    dtype = str(decoder.compute_dtype).removeprefix("torch.")
    dtype += " with int8 matrices" if settings.dtype == "int8" else ""
    log(f"{find_files(directory, settings.adapter)} on {device} in {dtype}, kernels: {kernels.describe(device)}")
    if settings.samples > 1 and settings.sampling.temperature == 0:
        log("the samples of a prompt are equal, because temperature 0 always takes the most likely token")
    continue_prompts = functools.partial(
        generate, decoder, max_new_tokens=settings.token_limit, sampling=settings.sampling, seed=settings.seed,
        eos_ids=eos_ids, vocab_size=tokenizer.vocab_size, drafts=settings.drafts,
    )  # fmt: skip
    if prompts is None or device.type == "cpu":
        # Imports and compiles first: else Ctrl-C would end the program, not an answer, and a note stand within a text.
        list(continue_prompts([[tokenizer.document_start]], max_new_tokens=2))
    if prompts is None:
        Conversation(continue_prompts, chat, settings, context).run()
    else:
        print_texts(continue_prompts, settings, tokenizer, texts, encoded)


def print_texts(
    continue_prompts: Callable, settings: Settings, tokenizer: Tokenizer,
    prompts: Sequence[str | list[Message]], encoded: list[list[int]],
) -> None:  # fmt: skip
    """Generate all samples of the prompts in batches; print the texts (in a chat the answers) in order, or as JSON."""
    samples = [*itertools.product(range(len(prompts)), range(settings.samples))]  # prompt index, sample number
    first_tokens = [None if settings.chat else tokens_after(tokenizer, prompt) for prompt in prompts]
    for start in range(0, len(samples), settings.batch_size):
        batch = samples[start : start + settings.batch_size]
        streams = [TextStream(tokenizer, settings.stop, () if settings.chat else encoded[index]) for index, _ in batch]
        tokens = continue_prompts(
            [encoded[index] for index, _ in batch],
            sample_numbers=[sample for _, sample in batch],
            first_tokens=[first_tokens[index] for index, _ in batch],
        )
        if settings.jsonl:
            for token in stream_texts(tokens, streams):
                if token.end is not None:
                    index, sample = batch[token.sequence]
                    row = {"row": index, "prompt": prompts[index], "sample": sample}
                    row |= {"text": streams[token.sequence].text, "end": token.end}
                    write(json.dumps(row, ensure_ascii=False) + "\n")
        else:
            print_in_order(tokens, streams)
            write("\n\n" if start + len(batch) < len(samples) else "\n")
        empty = [str(number) for number, stream in enumerate(streams, start + 1) if not stream.text]
        if settings.chat and empty:
            log(f"empty answers, which ended at once: {', '.join(empty)} of {len(samples)}")
        if any(stream.end == "context" for stream in streams):
            log("a text ends where the model's context is full")


def print_in_order(tokens: Generator[NewToken], streams: Sequence[TextStream]) -> None:
    """Print the texts in order, the first unfinished one as it grows."""
    waiting = [*streams]  # those that are not completely printed
    printed = 0  # characters of the first one
    for _ in stream_texts(tokens, streams):
        while waiting:
            write(waiting[0].text[printed:])
            printed = len(waiting[0].text)
            if waiting[0].end is None:
                break
            del waiting[0]
            printed = 0
            write("\n\n" if waiting else "")
