"""Numbers of parameters and FLOPs that follow from a configuration. Imports no torch."""

from model.config import GATED, PLACEMENTS, ModelConfig


def num_parameters(config: ModelConfig) -> int:
    layer = layer_matrices(config)
    if config.qk_norm:
        layer += 2 * config.resolved_head_dim
    if config.attention_bias:
        layer += sum(config.packed_matrices["qkv_proj"].values())
    if config.attention_output_bias:
        layer += config.hidden_size
    vocabulary = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return vocabulary + config.num_hidden_layers * layer + num_norm_parameters(config)


def num_norm_parameters(config: ModelConfig) -> int:
    """Number of learned parameters in all norms that `norm` chooses: without the norms of q and k."""
    norms = config.num_hidden_layers * PLACEMENTS[config.norm_placement]
    norms += 0 if config.norm_placement == "post" else 1  # the final norm
    return norms * sum(config.hidden_size if p.per_channel else 1 for p in config.norm_parameters)


def inner_widths(config: ModelConfig) -> list[int]:
    """The side of each matrix in a layer that is not hidden_size wide: of q, k, v, o; gate, if it has one, up, down."""
    q, k, v = config.packed_matrices["qkv_proj"].values()
    return [q, k, v, q, *[config.mlp_width] * (3 if GATED[config.mlp] else 2)]


def adapter_parameters(config: ModelConfig, rank: int) -> int:
    """Number of parameters of a LoRA adapter: rank * (in + out) for each matrix of the layers."""
    return config.num_hidden_layers * rank * sum(config.hidden_size + width for width in inner_widths(config))


def layer_matrices(config: ModelConfig) -> int:
    return config.hidden_size * sum(inner_widths(config))


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """FLOPs of training on one token, forward and backward: 6 N + 12 L H d T (Chowdhery et al. 2022, appendix B).

    N counts the weights of the matrix products: with the head, without the embedding, which is a lookup. The second
    term is attention over T tokens as if it were not causal. Recomputed activations do not count.
    """
    products = config.num_hidden_layers * layer_matrices(config) + config.vocab_size * config.hidden_size
    heads = config.num_attention_heads * config.resolved_head_dim
    return 6 * products + 12 * config.num_hidden_layers * heads * sequence_length
