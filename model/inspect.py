"""What happens inside a decoder while it reads a text: `inspect` measures it, `surgery` changes a norm. Both run the
network as it is, in float32 and evaluation mode, with forward hooks; so not in two threads at once."""

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from errors import UserError
from kernels.reference import IGNORED
from model.attention import Attention
from model.decoder import Decoder, Layer
from model.norm import Norm

MAX_TOKENS = 1024  # the attention weights of a layer are H T^2 numbers
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)


@dataclass(frozen=True)
class Inspection:
    """Measurements of T tokens, on the CPU. N norms in the order in which they run; a norm reads rows of D channels."""

    norms: tuple[str, ...]  # names of the modules, such as "layers.0.input_layernorm"
    rms: Tensor  # (N, T) root mean square of the row: the residual stream or, behind a block, the block's output
    mean_over_std: Tensor  # (N, T) |mean| / standard deviation of the row: what LayerNorm would subtract
    chance: float  # sqrt(2 / (pi D)), the mean of `mean_over_std` if channels are independent and normal
    kurtosis: Tensor  # (N, T) E[x^4] / E[x^2]^2 over the channels; 3 if they are normal
    largest_channel: Tensor  # (N, T) int64
    largest_share: Tensor  # (N, T) its square as a share of the row's sum of squares
    gain: Tensor  # (N, 5) `QUANTILES` over the channels of what a norm multiplies by; 1 without a gain
    bias: Tensor  # (N, 5) the same of what it adds; 0 without a bias
    to_previous: Tensor  # (L, H, T) attention to the token before; 0 at the first
    to_itself: Tensor  # (L, H, T)
    to_first: Tensor  # (L, H, T)
    after_same: Tensor  # (L, H, T) to all tokens after an earlier occurrence of the same token, summed (induction)
    top_ids: Tensor  # (L, T, 5) int64, logit lens: likeliest next tokens if final norm and head read the stream here
    top_probabilities: Tensor  # (L, T, 5)
    losses: Tensor  # (T - 1,) -log p in nats, of each token but the first


def inspect(decoder: Decoder, ids: Sequence[int]) -> Inspection:
    """Measure one forward pass over 1 to `MAX_TOKENS` ids; `UserError` for any other number of them."""
    names = {module: name for name, module in decoder.named_modules()}
    norms, measured = [], {}

    def record(fields: dict[str, Tensor]) -> None:
        for field, tensor in fields.items():
            measured.setdefault(field, []).append(tensor.cpu())

    def read_norm(norm: Norm, _: tuple, outputs: tuple[Tensor, Tensor]) -> None:
        norms.append(names[norm])
        record(measure_norm(norm, outputs[1][0]))

    hooks = {
        Norm: read_norm,
        Attention: lambda attention, inputs, _: record(measure_attention(attention, *inputs[:3], ids)),
        Layer: lambda _layer, _inputs, outputs: record(predict(decoder, *outputs)),
    }
    losses = token_losses(decoder, ids, {module: hooks[type(module)] for module in names if type(module) in hooks})
    stacked = {field: torch.stack(tensors) for field, tensors in measured.items()}
    chance = math.sqrt(2 / (math.pi * decoder.config.hidden_size))
    return Inspection(norms=tuple(norms), chance=chance, losses=losses, **stacked)


def surgery(decoder: Decoder, ids: Sequence[int], change: str, norm: str = "all") -> Tensor:
    """Losses (T - 1,) after one of `CHANGES` in the norm of this name, or in all, minus those before."""
    norms = {name: module for name, module in decoder.named_modules() if isinstance(module, Norm)}
    if change not in CHANGES or norm not in ("all", *norms):
        choices = f"changes are {', '.join(CHANGES)}; norms are all, {', '.join(norms)}"
        raise UserError(f"there is no change {change} of {norm}: {choices}.")

    def run_changed_norm(module: Norm, _: tuple, outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        s = outputs[1]  # (1, T, D)
        return CHANGES[change](copy.deepcopy(module), s), s

    chosen_norms = norms.values() if norm == "all" else [norms[norm]]
    return token_losses(decoder, ids, dict.fromkeys(chosen_norms, run_changed_norm)) - token_losses(decoder, ids, {})


@torch.no_grad()
def token_losses(decoder: Decoder, ids: Sequence[int], hooks: Mapping[nn.Module, Callable]) -> Tensor:
    """The losses (T - 1,) of one forward pass with these forward hooks of modules."""
    most = min(MAX_TOKENS, decoder.config.max_position_embeddings)
    if not 1 <= len(ids) <= most:
        raise UserError(f"the text has {len(ids)} tokens; give 1 to {most}, the most for this model.")
    tokens = torch.tensor([[*ids]], device=decoder.embed_tokens.weight.device)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, decoder, "compute_dtype", decoder.compute_dtype)
        stack.callback(decoder.train, decoder.training)
        for module, hook in hooks.items():
            stack.enter_context(module.register_forward_hook(hook))
        decoder.eval().compute_dtype = torch.float32
        return decoder(tokens, F.pad(tokens[:, 1:], (0, 1), value=IGNORED))[0, :-1].cpu()


def measure_norm(norm: Norm, rows: Tensor) -> dict[str, Tensor]:
    """The fields of `Inspection` that come from what a norm reads, (T, D), and from its parameters."""
    rms = rows.square().mean(-1).sqrt()
    squares = (rows / rms.clamp(min=1e-20)[:, None]).square()  # with the mean 1
    largest, channel = squares.max(-1)
    gain = 1 + norm.offset if norm.name == "offset" else norm.weight
    gain = torch.ones_like(rows[0]) if gain is None else gain
    bias = torch.zeros_like(rows[0]) if norm.bias is None else norm.bias
    quantiles = rows.new_tensor(QUANTILES)
    return {
        "rms": rms,
        "mean_over_std": rows.mean(-1).abs() / rows.std(-1, correction=0).clamp(min=1e-20),
        "kurtosis": squares.square().mean(-1),
        "largest_channel": channel,
        "largest_share": largest / rows.shape[1],
        "gain": gain.float().quantile(quantiles),
        "bias": bias.float().quantile(quantiles),
    }


def measure_attention(module: Attention, x: Tensor, cos: Tensor, sin: Tensor, ids: Sequence[int]) -> dict[str, Tensor]:
    """The fields of `Inspection` that come from the attention weights, which fused attention does not return."""
    q, k, _ = module.queries_keys_values(x, cos, sin)  # (1, H, T, d), (1, K, T, d)
    scores = (q @ k.repeat_interleave(module.heads // module.kv_heads, 1).mT)[0] / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf).softmax(-1)  # (H, T, T)
    tokens = torch.tensor([*ids], device=x.device)
    after_same = F.pad(tokens[:, None] == tokens[:-1], (1, 0))  # (t, j): is token j - 1 as token t?
    return {
        "to_previous": F.pad(weights.diagonal(-1, 1, 2), (1, 0)),
        "to_itself": weights.diagonal(0, 1, 2),
        "to_first": weights[..., 0],
        "after_same": weights.masked_fill(~after_same, 0).sum(-1),
    }


def predict(decoder: Decoder, x: Tensor, residual: Tensor | None) -> dict[str, Tensor]:
    """The logit lens (nostalgebraist 2020): final norm and head read what a layer returns."""
    if decoder.norm is not None:
        x, _ = decoder.norm.forward(x, residual)  # without its hook
    probabilities, ids = decoder.head(x)[0].softmax(-1).topk(min(5, decoder.config.vocab_size))
    return {"top_ids": ids, "top_probabilities": probabilities}


def without_mean(norm: Norm, s: Tensor) -> Tensor:
    """The mean of each row is subtracted before the norm; LayerNorm and `center` no longer subtract it themselves."""
    if norm.name == "layer":
        norm.kind = "rms"
    elif norm.name == "center":
        norm.name = "none"
    else:
        s = s - s.mean(-1, keepdim=True)
    return norm.forward(s)[0]


def filled(norm: Norm, s: Tensor, **values: float) -> Tensor:
    """All elements of the parameters with these names, if the norm has them, have these values."""
    for name, parameter in norm.named_parameters():
        if name in values:
            parameter.fill_(values[name])
    return norm.forward(s)[0]


def common_statistics(norm: Norm, s: Tensor) -> Tensor:
    """One mean and variance for the text instead of one for each token: the norm of one row that holds all of them."""
    for tensor in (*norm.parameters(), *norm.buffers()):
        tensor.data = tensor.repeat_interleave(s.shape[1]) if tensor.ndim else tensor  # (D,) -> (D T,)
    if norm.name == "l2":  # a row's length grows with the square root of its width
        norm.weight.mul_(math.sqrt(s.shape[1]))
    row = s.mT.reshape(1, 1, -1)  # all tokens, channel by channel, so that slices of channels stay slices
    return norm.forward(row)[0].view(s.mT.shape).mT.contiguous()


# What `surgery` can change: functions of a copy of the norm, which they may alter, and of the residual stream s
# (1, T, D), that return the new output. They call `forward`, which runs no hooks.
CHANGES: dict[str, Callable[[Norm, Tensor], Tensor]] = {
    "mean": without_mean,
    "bias": lambda norm, s: filled(norm, s, bias=0),
    "gain": lambda norm, s: filled(norm, s, weight=1, offset=0),
    "statistics": common_statistics,
    "norm": lambda norm, s: s,
}
