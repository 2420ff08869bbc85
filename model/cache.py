"""The key/value cache: a new token attends to the keys and values of earlier tokens without recomputing them."""

import torch
from torch import Tensor

from model.config import ModelConfig


class KeyValueCache:
    """Keys and values of every layer, allocated once for `max_length` positions; the first `length` are filled."""

    def __init__(self, config: ModelConfig, batch_size: int, max_length: int, *, device="cpu", dtype=torch.float32):
        shape = (config.num_hidden_layers, batch_size, config.num_key_value_heads, max_length, config.resolved_head_dim)
        self.keys = torch.empty(shape, device=device, dtype=dtype)  # (L, B, K, max_length, d)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.max_length = max_length  # with padding, which takes up positions, it may exceed the model's context
        self.length = 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (B, K, T, d) of one layer, return all (B, K, length + T, d); the decoder advances `length`."""
        end = self.length + k.shape[2]
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end].to(k.dtype), self.values[layer, :, :, :end].to(v.dtype)

    def keep_prefix(self, source: "KeyValueCache", length: int) -> None:
        """Hold exactly the first `length` positions of `source`. It may be this cache, which then forgets the rest."""
        if source is not self:
            self.keys[..., :length, :] = source.keys[..., :length, :]
            self.values[..., :length, :] = source.values[..., :length, :]
        self.length = length
