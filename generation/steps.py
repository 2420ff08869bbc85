"""The step that computes the logits of the next tokens: which one fits a model, and the one that is kept.

A step has a key/value cache and is called with tokens (B, 1) and padding. On a CPU it is `CpuDecodeStep`, with the
kernels for a GPU `GpuDecodeStep`; for other models and larger batches the decoder itself computes the logits.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor

import kernels
from errors import note
from generation.gpu_step import GpuDecodeStep
from model.cache import KeyValueCache
from model.config import ModelConfig
from model.decoder import Decoder
from model.device import allocate
from model.linear import Linear

MAX_CPU_SEQUENCES = 16  # the largest batch that was measured
MAX_GPU_SEQUENCES = 8  # more need more registers than a thread has; an ordinary matrix product is good at more
MIN_POSITIONS = 256  # room of a cache that is kept
# At most one step that nobody uses now, by its decoder, with which it goes: a graph takes as long as many steps.
_last_step: weakref.WeakKeyDictionary[Decoder, tuple[tuple, GpuDecodeStep]] = weakref.WeakKeyDictionary()


def decode_step_kind(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, batch_size: int
) -> Literal["cpu", "gpu"] | None:
    """The kind of step that computes a model's logits faster than the decoder does; a note if only Numba is missing."""
    if config.norm_placement != "pre" or config.norm not in ("rms", "layer") or config.mlp != "swiglu":
        return None
    chosen = kernels.implementation(device)
    if chosen is kernels.gpu and not config.attention_output_bias:
        return "gpu" if batch_size <= MAX_GPU_SEQUENCES else None
    if chosen is not kernels.cpu or batch_size > MAX_CPU_SEQUENCES or dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        import numba  # noqa: F401
    except ImportError as error:  # new versions of Python wait for it
        note(f"decoding on the CPU is slower here ({error}); pip install numba")
        return None
    return "cpu"


@contextlib.contextmanager
def decode_step(decoder: Decoder, batch_size: int, positions: int) -> Iterator[Callable[..., Tensor] | None]:
    """The fastest step for a decoder, its empty cache with room for `positions`; None where the decoder itself is."""
    kind = None
    if decoder.lora is None:  # an adapter in training; elsewhere it is part of the weights
        weight = decoder.embed_tokens.weight
        kind = decode_step_kind(decoder.config, weight.device, decoder.compute_dtype, batch_size)
    if kind == "gpu":
        with last_gpu_step(decoder, batch_size, positions) as step:
            yield step
    elif kind == "cpu":
        from generation.cpu_step import CpuDecodeStep  # imports Numba, which a GPU does not need

        yield CpuDecodeStep(decoder, KeyValueCache(decoder.config, batch_size, positions))
    else:
        yield None


@contextlib.contextmanager
def last_gpu_step(decoder: Decoder, batch_size: int, positions: int) -> Iterator[GpuDecodeStep]:
    """The last step with its graph and its cache, emptied, if it fits; else a new one.

    The cache has room for a power of two of positions, at least 256 and at most the context, so that prompts of
    different lengths share it.
    """
    config, device, dtype = decoder.config, decoder.embed_tokens.weight.device, decoder.compute_dtype
    room = 1 << (max(positions, MIN_POSITIONS) - 1).bit_length()
    room = max(positions, min(room, config.max_position_embeddings))
    # A graph reads the memory that held the weights when it was captured: if they are now elsewhere, it is useless.
    weights = [*decoder.parameters(), *decoder.buffers()]
    valid_for = batch_size, room, dtype, *((w.data_ptr(), w.dtype, w.device) for w in weights)
    was_valid_for, step = _last_step.pop(decoder, (None, None))  # taken out, so that a nested call makes its own
    if was_valid_for != valid_for:
        step = None  # frees memory before more is allocated
        _last_step.clear()
        step = GpuDecodeStep(decoder, KeyValueCache(config, batch_size, room, device=device, dtype=dtype))
    step.cache.length = 0
    try:
        yield step
    finally:
        _last_step.clear()
        _last_step[decoder] = valid_for, step


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
