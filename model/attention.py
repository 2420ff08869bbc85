"""Grouped-query attention with rotary position embeddings, and its mask. One packed matrix gives q, k and v."""

import torch
from torch import Tensor, nn

import kernels
from model.cache import KeyValueCache
from model.config import ModelConfig
from model.linear import Linear


class Attention(nn.Module):
    """Causal self-attention; H query heads share K key/value heads (Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__()
        self.index = index  # of the layer, in the cache
        self.eps = config.norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = config.resolved_head_dim
        rows = sum(config.packed_matrices["qkv_proj"].values())
        self.qkv_proj = Linear(config.hidden_size, rows, bias=config.attention_bias)
        # RMSNorm of each head, whatever `norm` is: `kernels.rotary` applies the weights (d,), before the rotation.
        self.q_norm = nn.RMSNorm(head_dim) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim) if config.qk_norm else None
        self.o_proj = Linear(self.heads * head_dim, config.hidden_size, bias=config.attention_output_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: KeyValueCache | None) -> Tensor:
        """The attention output (B, T, D) of normalized x (B, T, D); appends k and v to the cache, if there is one."""
        q, k, v = self.queries_keys_values(x, cos, sin)
        if cache is not None:
            k, v = cache.update(self.index, k, v)  # (B, K, S, d), of all S positions so far
        return self.o_proj(kernels.attention(q, k, v, mask).transpose(1, 2).flatten(2))

    def queries_keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries (B, H, T, d) and keys (B, K, T, d), and values (B, K, T, d)."""
        norms = (None, None) if self.q_norm is None else (self.q_norm.weight, self.k_norm.weight)
        q, k, v = kernels.rotary(self.qkv_proj(x), cos, sin, self.heads, self.kv_heads, *norms, eps=self.eps)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def attention_mask(
    start: int, length: int, device: torch.device, *, padding: Tensor | None = None, documents: Tensor | None = None
) -> Tensor | None:
    """True where a query at cache positions start .. start + length may attend to a key; None: no mask is needed.

    A query sees every position up to its own that is neither padding nor of another document. A padding position sees
    itself alone, so that its softmax is not 0/0. Rows are queries, columns keys, # is True:
    padding 0      padding 2      documents 1 1 2 2
    # . . .        # . . .        # . . .
    # # . .        . # . .        # # . .
    # # # .        . . # .        . . # .
    # # # #        . . # #        . . # #
    """
    if padding is None and documents is None and (start == 0 or length == 1):  # causal, or one query, which sees all
        return None
    keys = torch.arange(start + length, device=device)
    queries = keys[start:, None]
    mask = (keys <= queries)[None, None]  # (1, 1, T, S)
    if padding is not None:
        mask = mask & ((keys >= padding[:, None, None, None]) | (keys == queries))  # (B, 1, T, S)
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])  # (B, 1, T, T)
    return mask
