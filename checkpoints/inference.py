"""A model to generate with: opened with its tokenizer; merged with its adapter; its weights cast, or in 8 bits too."""

from pathlib import Path

import torch

from checkpoints import pretrained
from checkpoints.find import eos_ids, find_adapter, generation_config
from checkpoints.pretrained import Checkpoint
from data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from errors import UserError
from files import read_json
from model.decoder import Decoder
from model.device import allocate
from model.linear import Linear


def open_model(directory: Path, adapter: str | None = None) -> tuple[Checkpoint, Tokenizer, frozenset[int]]:
    """A checkpoint whose weights are not read yet, its tokenizer, and the ids that end a text."""
    model, found = find_adapter(directory, adapter)
    checkpoint = pretrained.open_checkpoint(model, found)
    tokenizer = load_tokenizer(found if found is not None and [*found.glob("tokenizer.*")] else model)
    check_vocabulary(tokenizer, checkpoint.config.vocab_size)
    return checkpoint, tokenizer, eos_ids(model, tokenizer.eos_id, found)


def merge(checkpoint: Checkpoint, tokenizer: Tokenizer, ends: frozenset[int], new: Path) -> None:
    """Write a model with its adapter added, in the dtypes of its files, as the directory `new`."""
    if new.exists():
        raise UserError(f"--merge {new} exists; give a new directory.")
    decoder, unfinished = pretrained.load_pretrained(checkpoint), new.with_name(f"{new.name}.new")
    pretrained.save_pretrained(decoder, unfinished, bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id)
    tokenizer.save(unfinished)
    fields = read_json(generation_config(checkpoint.directory, checkpoint.adapter))
    fields["eos_token_id"] = [tokenizer.eos_id, *sorted(ends - {tokenizer.eos_id})]
    pretrained.write_json(unfinished / "generation_config.json", fields)
    unfinished.rename(new)


def cast_weights(decoder: Decoder, dtype: torch.dtype) -> None:
    """Compute in `dtype` and store the matrices in it, so that no step casts them. Norm weights and biases: float32."""
    decoder.compute_dtype = dtype
    parameters = [*decoder.parameters()]
    sizes = [(parameter.shape, pretrained.inference_dtype(parameter, dtype)) for parameter in parameters]
    for parameter, data in zip(parameters, allocate(sizes, parameters[0].device), strict=True):
        parameter.data = data.copy_(parameter.data)


def quantize_matrices(decoder: Decoder) -> None:
    """Give decoding steps on a CPU the matrices of the layers and the head in int8 too; prompts use the others.

    Absmax quantization (Dettmers et al. 2022, arXiv 2208.07339, section 2): a row w is stored as the integers closest
    to w / s, with s = max |w| / 127. Inputs are not quantized.
    """
    lookup = None if decoder.lm_head is None else decoder.embed_tokens  # an untied embedding multiplies nothing
    linears = [module for module in decoder.modules() if isinstance(module, Linear) and module is not lookup]
    sizes = []
    for linear in linears:
        sizes += [(linear.weight.shape, torch.int8), (linear.weight.shape[:1], torch.float32)]
    memory = iter(allocate(sizes, linears[0].weight.device))
    for linear in linears:
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        linear.int8 = next(memory).copy_((weight / scales[:, None]).round()), next(memory).copy_(scales)
