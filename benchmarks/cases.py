"""What `benchmarks.kernels` measures: shapes of each kernel, its baselines, and the minimum of bytes or FLOP.

Bytes are what must be read and written once.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import kernels
from kernels import reference

BF16 = torch.bfloat16
OURS = "ours"
BACKENDS = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
BF16_WEIGHT, RMS_TWIN = "ours, bfloat16 weight", "ours, RMSNorm"


@dataclass
class Case:
    """One kernel on one shape."""

    name: str
    make: Callable[[], tuple[Tensor, ...]]
    """New random inputs; those that get gradients come first."""
    num_learned: int
    """How many of the inputs get gradients; with 0 only the forward pass is measured."""
    baselines: dict[str, Callable]
    """What is measured, by name; `ours` is the first. Each takes the inputs and returns one tensor or a tuple."""
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    flops: float = 0.0
    """Of all matrix products, forward and backward; if not 0, they are the limit instead of the bytes."""
    measure_kept: bool = False
    """Whether to measure the bytes kept for the backward pass; the output must be one new tensor."""
    prepare: dict[str, Callable] = field(default_factory=dict)
    """For baselines that take other inputs: makes them from the case's inputs, in the same order. It is not timed."""


@dataclass(frozen=True)
class NormShape:
    """One norm to measure."""

    kind: str
    rows: int
    width: int
    after_addition: bool = False
    mixed: bool = False
    """Whether it is measured with a bfloat16 weight, too."""


@dataclass(frozen=True)
class Shapes:
    """What is measured on one type of device."""

    norms: tuple[NormShape, ...]
    activations: tuple[tuple[int, int], ...]
    """Tokens and F of SwiGLU's kernels alone."""
    mlps: tuple[tuple[int, int, int], ...]
    rotaries: tuple[tuple[int, int, int, int], ...]
    """Tokens, query heads, key/value heads and their size."""
    losses: tuple[tuple[int, int, int], ...]
    """Tokens, D and V."""
    attentions: tuple[tuple[int, int, int, int, int], ...] = ()
    """Sequences, tokens of each, query heads, key/value heads and their size."""
    decodings: tuple[tuple[int, int, int, int, int], ...] = ()
    """The same of attention in a decoding step, over so many cached tokens."""


SHAPES = {
    "cuda": Shapes(
        norms=(
            NormShape("rms", 8192, 4096, mixed=True),
            NormShape("rms", 8192, 4096, after_addition=True),
            NormShape("rms", 16384, 8192),
            NormShape("rms", 65536, 1024, mixed=True),
            NormShape("rms", 65536, 256),
            NormShape("rms", 32768, 768, after_addition=True),
            NormShape("rms", 8192, 4104),  # divisible by 8 and not by 16
            NormShape("layer", 8192, 4096),
            NormShape("layer", 8192, 4096, after_addition=True),
            NormShape("layer", 16384, 8192),
        ),
        activations=((8192, 14336), (8192, 2816)),
        mlps=((8192, 4096, 14336), (8192, 1024, 2816)),
        rotaries=((16384, 32, 8, 128), (16384, 16, 8, 64)),
        losses=((8192, 1024, 50304), (8192, 4096, 131072)),
        attentions=((32, 1024, 12, 12, 64), (2, 4096, 32, 8, 64)),  # of configs/124m.toml and 1b.toml
        decodings=((1, 128, 32, 8, 64), (1, 4000, 32, 8, 64), (8, 4000, 32, 8, 64)),
    ),
    "cpu": Shapes(
        norms=tuple(
            NormShape(kind, rows, width, after_addition)
            for rows, width in ((4096, 256), (2048, 512))
            for kind in ("rms", "layer")
            for after_addition in (False, True)
        ),
        activations=(),
        mlps=((4096, 256, 704),),
        rotaries=((4096, 4, 2, 64),),
        losses=((4096, 256, 4096), (2048, 512, 6400)),
    ),
}


def cases(device: torch.device, shapes: Shapes | None = None) -> Iterator[Case]:
    """The cases of a device: large shapes for a GPU, those of the default model for a CPU."""
    shapes = shapes or SHAPES.get(device.type, SHAPES["cpu"])
    yield from (norm(device, shape) for shape in shapes.norms)
    yield from (activation(device, *sizes) for sizes in shapes.activations)
    yield from (mlp(device, *sizes) for sizes in shapes.mlps)
    yield from (rotary(device, *sizes, normed) for sizes in shapes.rotaries for normed in (False, True))
    yield from (loss(device, *sizes, weighted) for sizes in shapes.losses for weighted in (False, True))
    yield from (attention(device, *sizes) for sizes in shapes.attentions)
    yield from (attention(device, *sizes, decoding=True) for sizes in shapes.decodings)


def has_liger(device: torch.device) -> bool:
    """Whether there is a Liger-Kernel to compare with. It is always called with its own defaults."""
    return device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def random(device: torch.device, *shape: int, dtype: torch.dtype = BF16, mean: float = 0.3, std: float = 1.0) -> Tensor:
    """Normal numbers with a mean away from zero."""
    return (torch.randn(shape, device=device) * std + mean).to(dtype)


def norm(device: torch.device, shape: NormShape) -> Case:
    """RMSNorm or LayerNorm, alone or after the residual addition.

    Our weight is float32, as in training. torch's own norm is measured with a weight of x's dtype and with this one.
    """
    kind, rows, width = shape.kind, shape.rows, shape.width

    def make():
        x, weight = random(device, rows, width), random(device, width, dtype=torch.float32, mean=1.0, std=0.1)
        return (x, weight, random(device, rows, width)) if shape.after_addition else (x, weight)

    def round_weight(x, weight, *rest):
        return x, weight.to(BF16), *rest

    def using(module, kind=kind):
        def run(x, weight, stream=None):
            y, s = module.normalize(x, weight, None, stream, kind=kind, eps=1e-5)
            return y if stream is None else (y, s)

        return run

    def torch_own(x, weight, stream=None):
        s = x if stream is None else x + stream
        y = F.rms_norm(s, (width,), weight, 1e-5) if kind == "rms" else F.layer_norm(s, (width,), weight, None, 1e-5)
        return y if stream is None else (y, s)

    ours = using(kernels.implementation(device))
    baselines, prepare = {OURS: ours}, {}
    if shape.mixed:
        baselines[BF16_WEIGHT], prepare[BF16_WEIGHT] = ours, round_weight
    if kind == "layer" and device.type == "cuda":
        baselines[RMS_TWIN] = using(kernels.implementation(device), "rms")
    baselines["reference, eager"] = using(reference)
    baselines[f"F.{kind}_norm"], prepare[f"F.{kind}_norm"] = torch_own, round_weight
    baselines[f"F.{kind}_norm, float32 weight"] = torch_own
    baselines["torch.compile"] = torch.compile(using(reference))
    if has_liger(device) and (kind == "rms" or not shape.after_addition):
        baselines["Liger"], prepare["Liger"] = liger_norm(kind), round_weight
    size = rows * width * BF16.itemsize
    moved = (4, 4) if shape.after_addition else (2, 3)
    return Case(
        f"{kind} norm{' after addition' if shape.after_addition else ''}, {rows} x {width}",
        make,
        3 if shape.after_addition else 2,
        baselines,
        forward_bytes=moved[0] * size,
        backward_bytes=moved[1] * size,
        prepare=prepare,
    )


def liger_norm(kind: str) -> Callable:
    """Liger's norm. By default its RMSNorm overwrites the gradient that it is given with the one that it returns."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def run(x, weight, stream=None):
        if stream is not None:
            return LigerFusedAddRMSNormFunction.apply(x, stream, weight, 1e-5)
        if kind == "rms":
            return LigerRMSNormFunction.apply(x, weight, 1e-5)
        return LigerLayerNormFunction.apply(x, weight, torch.zeros_like(weight), 1e-5)

    return run


class Activation(torch.autograd.Function):
    """SwiGLU's two kernels alone, as our MLP calls them: packed (M, 2F) to hidden (M, F) and back."""

    @staticmethod
    def forward(ctx, packed):
        ctx.save_for_backward(packed)
        return torch.ops.prenorm.swiglu_forward(packed)

    @staticmethod
    def backward(ctx, dhidden):
        return torch.ops.prenorm.swiglu_backward(dhidden, *ctx.saved_tensors)[0]


def activation(device: torch.device, rows: int, width: int) -> Case:
    """silu(gate) up and its gradients, of the packed product.

    Our backward pass moves 12 bytes for each of the F elements of a token, because it writes hidden again. The
    baselines keep hidden and need only 10.
    """

    def make():
        return (random(device, rows, 2 * width),)

    def halves(packed):
        return tuple(half.contiguous() for half in packed.chunk(2, -1))

    def eager(packed):
        gate, up = packed.chunk(2, -1)
        return (F.silu(gate.float()) * up.float()).to(packed.dtype)

    def rounded_twice(packed):
        gate, up = packed.chunk(2, -1)
        return F.silu(gate) * up

    baselines = {
        OURS: Activation.apply,
        "reference, eager": eager,
        "F.silu(gate) * up": rounded_twice,
        "torch.compile": torch.compile(eager),
    }
    prepare = {}
    if has_liger(device):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        baselines["Liger"], prepare["Liger"] = LigerSiLUMulFunction.apply, halves
    size = rows * width * BF16.itemsize
    name = f"SwiGLU kernels, {rows} x {width}"
    return Case(name, make, 1, baselines, 3 * size, 6 * size, prepare=prepare)


def mlp(device: torch.device, rows: int, hidden: int, width: int, dtype: torch.dtype = BF16) -> Case:
    """The SwiGLU MLP."""

    def make():
        std = hidden**-0.5
        return (
            random(device, rows, hidden, dtype=dtype),
            random(device, 2 * width, hidden, dtype=dtype, mean=0.0, std=std),
            random(device, hidden, width, dtype=dtype, mean=0.0, std=std),
        )

    baselines = {
        OURS: kernels.implementation(device).swiglu_mlp,
        "reference, eager": reference.swiglu_mlp,
        "torch.compile": torch.compile(reference.swiglu_mlp),
    }
    if has_liger(device):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        def with_liger(x, gate_up, down):
            gate, up = F.linear(x, gate_up).chunk(2, -1)
            return F.linear(LigerSiLUMulFunction.apply(gate, up), down)

        baselines["Liger"] = with_liger
    name = f"SwiGLU MLP, {rows} x {hidden}, {width} wide"
    return Case(name, make, 3, baselines, flops=18.0 * rows * hidden * width, measure_kept=True)


def rotary(device: torch.device, tokens: int, heads: int, kv_heads: int, width: int, normed: bool) -> Case:
    """q and k rotated, from the packed product, with or without the norm of each head."""
    length = 1024 if tokens > 4096 else min(tokens, 256)

    def make():
        angles = torch.rand(length, width // 2, device=device) * 100
        qkv = random(device, tokens // length, length, (heads + 2 * kv_heads) * width)
        norm_weights = [random(device, width, dtype=torch.float32, mean=1.0, std=0.1) for _ in range(2 * normed)]
        return qkv, *norm_weights, angles.cos(), angles.sin()

    def using(function):
        def run(qkv, *rest):
            norm_weights = rest[:-2] if normed else (None, None)
            return function(qkv, *rest[-2:], heads, kv_heads, *norm_weights, 1e-6)

        return run

    baselines = {
        OURS: using(kernels.implementation(device).rotary),
        "reference, eager": using(reference.rotary),
        "torch.compile": torch.compile(using(reference.rotary)),
    }
    size = BF16.itemsize * tokens * width
    rotated, packed = size * (heads + kv_heads), size * (heads + 2 * kv_heads)
    name = f"rotary{' with norms of heads' if normed else ''}, {tokens} tokens, {heads} + {kv_heads} heads of {width}"
    # Forward: q and k alone, although without the norms ours also copies v (see `kernels.rope`). Backward: the
    # gradients of q, k and v become packed ones; with the norms, q and k are read again.
    return Case(name, make, 1 + 2 * normed, baselines, 2 * rotated, 2 * packed + rotated * normed)


def loss(device: torch.device, rows: int, hidden: int, vocabulary: int, weighted: bool) -> Case:
    """The head's product and the cross-entropy: the loss of each token, or, `weighted`, the scalar that is trained on.

    The scalar is the sum of the losses times `token_weights`, which lets the forward pass compute the gradients.
    """

    def make():
        weight = random(device, vocabulary, hidden, mean=0.0, std=hidden**-0.5)
        targets = torch.randint(vocabulary, (rows,), device=device)
        token_weights = [torch.full((), 1 / rows, device=device)] if weighted else []  # the mean
        return random(device, rows, hidden), weight, targets, *token_weights

    def ours(x, weight, targets, token_weights=None):
        options = {"token_weights": token_weights} if weighted else {}
        return kernels.linear_cross_entropy(x, weight, targets, **options)

    def all_logits(x, weight, targets, token_weights=None):
        losses = reference.linear_cross_entropy(x, weight, targets)
        return (losses * token_weights).sum() if weighted else losses

    def torch_own(x, weight, targets, token_weights=None):
        return F.linear_cross_entropy(x, weight, targets, reduction="mean" if weighted else "none")

    baselines = {OURS: ours, "F.cross_entropy, all logits": all_logits, "torch.compile": torch.compile(all_logits)}
    if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
        baselines["F.linear_cross_entropy"] = torch_own
    if has_liger(device) and weighted:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def with_liger(x, weight, targets, token_weights):
            return LigerFusedLinearCrossEntropyFunction.apply(x, weight, targets)[0]  # the mean

        baselines["Liger"] = with_liger
    name = f"head and loss{', weighted sum' if weighted else ''}, {rows} x {hidden}, vocabulary {vocabulary}"
    return Case(name, make, 2, baselines, flops=6.0 * rows * hidden * vocabulary)


class PickedBackend(TorchFunctionMode):
    """Notes which backend torch picks for attention; `name` is that of the last call."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            self.name = SDPBackend(torch._fused_sdp_choice(*args, **kwargs)).name
        return function(*args, **kwargs or {})


def attention(
    device: torch.device, sequences: int, length: int, heads: int, kv_heads: int, width: int, decoding: bool = False
) -> Case:
    """Attention of a training step or, with one query for each sequence, of a decoding step, by torch's backends.

    The model lets torch pick one: that is ours, and the case's name says which it is.
    """

    def make():
        q = random(device, sequences, heads, 1 if decoding else length, width, mean=0.0)
        return q, *(random(device, sequences, kv_heads, length, width, mean=0.0) for _ in range(2))

    def using(backend):
        def run(q, k, v):
            with sdpa_kernel(backend):
                return reference.attention(q, k, v)

        return run

    with PickedBackend() as picked:
        reference.attention(*(tensor.requires_grad_(not decoding) for tensor in make()))
    shape = f"{sequences} x {length}, {heads} + {kv_heads} heads of {width}"
    name = f"attention in {'decoding' if decoding else 'training'}, {shape}, torch picks {picked.name}"
    baselines = {OURS: reference.attention} | {backend.name: using(backend) for backend in BACKENDS}
    if decoding:
        return Case(name, make, 0, baselines, 2 * BF16.itemsize * sequences * kv_heads * length * width)
    # Two products forward and five backward, half of each hidden by the mask.
    return Case(name, make, 3, baselines, flops=7.0 * sequences * heads * length**2 * width)
