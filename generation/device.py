"""In which dtype and by how many threads a model's weights are read: decoding is bound by reading them."""

import contextlib
from collections.abc import Iterator

import torch

from model.decoder import Decoder
from model.device import fast_at_bfloat16

ONE_THREAD_BELOW = 8_000_000  # multiply-adds in a decoding step, about a millisecond of one core


def choose_dtype(name: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """The dtype that a `--dtype` value means for weights stored as `stored`.

    On a CPU bfloat16 halves the bytes of a downloaded bfloat16 model at no loss, where the processor multiplies it
    natively; a float32 checkpoint of ours is small, bound by the number of operations, and keeps its exact weights.
    """
    if name != "auto":
        return getattr(torch, name)
    fast = fast_at_bfloat16(device)
    if device.type == "cuda":
        return torch.bfloat16 if fast else torch.float16
    return torch.bfloat16 if fast and stored == torch.bfloat16 else torch.float32


def hold_weights_in(decoder: Decoder, dtype: torch.dtype) -> None:
    """Compute in `dtype` and keep the matrices in it, so that no step casts them anew; gains and biases in float32."""
    decoder.compute_dtype = dtype
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(dtype if parameter.ndim >= 2 else torch.float32)


def bytes_per_step(decoder: Decoder) -> int:
    """Bytes of weights that one decoding step has to read, however many sequences share it.

    An embedding of its own is looked up, not read; tied to the head it is read there.
    """
    config = decoder.config
    total = sum(parameter.numel() * parameter.element_size() for parameter in decoder.parameters())
    if config.tie_word_embeddings:
        return total
    return total - config.vocab_size * config.hidden_size * decoder.compute_dtype.itemsize


@contextlib.contextmanager
def threads_for(decoder: Decoder, rows: int) -> Iterator[None]:
    """Use one thread on the CPU where a decoding step is so small that threads would wait for each other, not work.

    On 2 cores beside other busy programs, two threads decoded 5 to 30 times slower than one, at 4 and 0.3 million
    parameters.
    """
    before = torch.get_num_threads()
    on_cpu = next(decoder.parameters()).device.type == "cpu"
    if on_cpu and rows * decoder.num_parameters() < ONE_THREAD_BELOW:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
