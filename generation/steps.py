"""Decoding steps: which one computes the logits of the next tokens of a model, and the one for a GPU.

A step has a key/value cache and is called with the next token of each sequence, and padding. On a CPU it is
`CpuDecodeStep`, with the kernels for a GPU `GpuDecodeStep`; for other models and larger batches `DecoderStep`.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

import kernels
from errors import note
from generation.drafts import DraftedStep
from model.cache import KeyValueCache
from model.config import ModelConfig
from model.decoder import Decoder
from model.device import allocate
from model.linear import Linear

if TYPE_CHECKING:
    from generation.cpu_step import CpuDecodeStep

MAX_CPU_SEQUENCES = 16  # the largest batch that was measured
MAX_GPU_SEQUENCES = 8  # more need more registers than a thread has; an ordinary matrix product is good at more
MIN_POSITIONS = 256  # room of a cache that is kept


def decode_step_kind(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, batch_size: int
) -> Literal["cpu", "gpu"] | None:
    """The kind of step that computes a model's logits faster than the decoder does; None: there is none."""
    if not config.is_plain:
        return None
    implementation = kernels.implementation(device)
    if implementation is kernels.gpu and batch_size <= MAX_GPU_SEQUENCES and not config.attention_output_bias:
        return "gpu"
    if implementation is kernels.cpu and batch_size <= MAX_CPU_SEQUENCES and dtype in kernels.cpu.LOOP_DTYPES:
        return "cpu"
    return None


def decode_step(
    decoder: Decoder, batch_size: int, positions: int, drafts_from: Sequence[int] | None = None
) -> "CpuDecodeStep | DraftedStep | GpuDecodeStep | DecoderStep":
    """The fastest step, with an empty cache for `positions`.

    On a GPU the next call may return the same step, so use one at a time. `drafts_from`: the prompt of a single
    sequence that is decoded greedily, which is faster with drafts.
    """
    config, device, dtype = decoder.config, decoder.embed_tokens.weight.device, decoder.compute_dtype
    kind = decode_step_kind(config, device, dtype, batch_size)
    if kind is None or decoder.lora is not None:  # an adapter that still trains is not in the weights that a step reads
        return DecoderStep(decoder, KeyValueCache(config, batch_size, positions, device=device, dtype=dtype))
    if kind == "gpu":
        return gpu_step(decoder, batch_size, positions)
    from generation.cpu_step import CpuDecodeStep  # imports Numba, which a GPU does not need

    step = CpuDecodeStep(decoder, KeyValueCache(config, batch_size, positions))
    return step if drafts_from is None else DraftedStep(step, step.cache, drafts_from)


class DecoderStep:
    def __init__(self, decoder: Decoder, cache: KeyValueCache):
        self.decoder, self.cache = decoder, cache

    def __call__(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        return self.decoder(tokens, cache=self.cache, padding=padding, last_only=True)


def quantize_matrices(decoder: Decoder) -> None:
    """Give decoding steps on a CPU the matrices of the layers and the head in int8 too; prompts use the others.

    Absmax quantization (Dettmers et al. 2022, arXiv 2208.07339, section 2) of each row; inputs are not quantized.
    """
    linears = [module for module in decoder.layers.modules() if isinstance(module, Linear)] + [decoder.head]
    shapes, device = [linear.weight.shape for linear in linears], linears[0].weight.device
    all_values = allocate([(shape, torch.int8) for shape in shapes], device)
    all_scales = allocate([(shape[:1], torch.float32) for shape in shapes], device)
    for linear, values, scales in zip(linears, all_values, all_scales, strict=True):
        weight = linear.weight.detach().float()
        scales.copy_(weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127)
        values.copy_((weight / scales[:, None]).round())
        linear.int8 = values, scales


class GpuDecodeStep:
    """Computes the logits that follow one new token of every sequence in a cache, on CUDA by replaying one graph.

    That is one call for the host instead of a hundred kernel launches. A graph always reads and writes the same memory,
    so the tokens, the position, the padding, the cache and the logits are tensors that stay where they are. If the
    kernels or the capture of their graph fail, one line on stderr says so, and the decoder itself takes over.
    """

    def __init__(self, decoder: Decoder, cache: KeyValueCache):
        config, device, dtype = decoder.config, cache.keys.device, decoder.compute_dtype
        batch, heads, head_dim = cache.keys.shape[1], config.num_attention_heads, config.resolved_head_dim
        self.tokens, self.padding = torch.zeros(2, batch, dtype=torch.int64, device=device)
        self._decoder = weakref.ref(decoder)  # the step is kept for as long as the decoder exists, and no longer
        self.cache = cache
        self.position = torch.zeros(1, dtype=torch.int64, device=device)  # place of the new tokens in the cache
        self.qkv = torch.empty(batch, (heads + 2 * config.num_key_value_heads) * head_dim, device=device)
        splits = batch, heads, kernels.decode.splits_for(cache.max_length)
        self.partials = (  # attention over each split of the cache
            torch.empty(*splits, head_dim, device=device),  # weighted sum of v
            torch.empty(splits, device=device),  # maximum score
            torch.empty(splits, device=device),  # sum of exp
        )
        self.attended = torch.empty(batch, heads, head_dim, device=device, dtype=dtype)
        self.hidden = torch.empty(batch, config.intermediate_size, device=device, dtype=dtype)
        decoder.rope.grow(cache.max_length)
        self.rope = decoder.rope.cos, decoder.rope.sin  # a graph keeps reading this memory
        self.logits: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.unavailable_reason: str | None = None  # why the kernels cannot run, known after the first step

    def __call__(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """Append tokens (B, 1) int64 to the cache; returns float32 logits (B, 1, V), valid until the next call."""
        assert self.cache.length < self.cache.max_length, "the cache is full"
        if self.unavailable_reason is None:
            try:
                with torch.cuda.device_of(self.tokens):  # graphs are captured on the current device
                    self.compute_logits(tokens, padding)
                self.cache.length += 1
                return self.logits[:, None]
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever Triton, ptxas or the driver may raise
                self.unavailable_reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                note(f"fused decoding: {self.unavailable_reason}; the decoder runs without it.")
        # The decoder overwrites this position of the cache, whatever the kernels have left there.
        return self._decoder()(tokens, cache=self.cache, padding=padding, last_only=True)

    def compute_logits(self, tokens: Tensor, padding: Tensor | None) -> None:
        """Copy the inputs into the graph's tensors and run it; leaves the result in `self.logits`."""
        self.tokens.copy_(tokens[:, 0])
        self.position.fill_(self.cache.length)
        self.padding[:] = 0 if padding is None else padding
        if self.logits is None or not self.tokens.is_cuda:
            self.logits = self.launch()
            return
        if self.graph is None:  # not in the first step, whose compiling and handle of cuBLAS cannot be captured
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # records a step, on a stream of its own, and does not run it yet
                self.logits = self.launch()
            self.graph = graph
        self.graph.replay()

    def launch(self) -> Tensor:
        """Launch the kernels of all layers, then the final norm and the head; returns float32 logits (B, V)."""
        decoder, cache, decode = self._decoder(), self.cache, kernels.decode
        s = F.embedding(self.tokens, decoder.embed_tokens.weight).to(decoder.compute_dtype)  # (B, D), the stream
        for index, layer in enumerate(decoder.layers):
            block, mlp = layer.self_attn, layer.mlp
            head_norms = (None, None) if block.q_norm is None else (block.q_norm.weight, block.k_norm.weight)
            decode.qkv(s, layer.input_layernorm, block.qkv_proj.weight, block.qkv_proj.bias, self.qkv)
            decode.attention(
                self.qkv, head_norms, block.eps, self.rope, self.position, self.padding,
                cache.keys[index], cache.values[index], self.partials, self.attended,
            )  # fmt: skip
            decode.project(self.attended.flatten(1), block.o_proj.weight, s)
            decode.gate_up(s, layer.post_attention_layernorm, mlp.gate_up_proj.weight, self.hidden)
            decode.project(self.hidden, mlp.down_proj.weight, s)
        # The head is an ordinary matrix product: it has so many rows that cuBLAS reads them near the memory's rate.
        x, _ = decoder.norm(s)
        return decoder.head(x).float()


# The last GPU step and what it is valid for, as capturing a graph takes as long as many decoding steps. At most one
# entry; the key is weak, so that the step is freed with its decoder.
_last_step: weakref.WeakKeyDictionary[Decoder, tuple[tuple, GpuDecodeStep]] = weakref.WeakKeyDictionary()


def gpu_step(decoder: Decoder, batch_size: int, positions: int) -> GpuDecodeStep:
    """The last step with its graph and its cache, emptied, if it fits; else a new one."""
    config, device, dtype = decoder.config, decoder.embed_tokens.weight.device, decoder.compute_dtype
    # Prompts of different lengths share a cache: its room is a power of two, but at most the context.
    room = 1 << (max(positions, MIN_POSITIONS) - 1).bit_length()
    room = max(positions, min(room, config.max_position_embeddings))
    # A graph reads the memory that held the weights when it was captured: if they are now elsewhere, it is useless.
    weights = [*decoder.parameters(), *decoder.buffers()]
    valid_for = batch_size, room, dtype, *((w.data_ptr(), w.dtype, w.device) for w in weights)
    if decoder not in _last_step or _last_step[decoder][0] != valid_for:
        _last_step.clear()  # frees memory before more is allocated
        cache = KeyValueCache(config, batch_size, room, device=device, dtype=dtype)
        _last_step[decoder] = valid_for, GpuDecodeStep(decoder, cache)
    _, step = _last_step[decoder]
    step.cache.length = 0
    return step
