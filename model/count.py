"""Numbers of parameters and FLOPs that follow from a configuration. Imports no torch."""

from model.config import GATED, PLACEMENTS, ModelConfig


def num_parameters(config: ModelConfig) -> int:
    layer = layer_matrices(config)
    if config.qk_norm:
        layer += 2 * config.resolved_head_dim
    if config.attention_bias:
        layer += (config.num_attention_heads + 2 * config.num_key_value_heads) * config.resolved_head_dim
    if config.attention_output_bias:
        layer += config.hidden_size
    vocabulary = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return vocabulary + config.num_hidden_layers * layer + num_norm_parameters(config)


def num_norm_parameters(config: ModelConfig) -> int:
    """Number of learned parameters in all norms that `norm` chooses: without the norms of q and k."""
    norms = config.num_hidden_layers * PLACEMENTS[config.norm_placement]
    norms += 0 if config.norm_placement == "post" else 1  # the final norm
    return norms * sum(config.hidden_size if p.per_channel else 1 for p in config.norm_parameters)


def adapter_parameters(config: ModelConfig, rank: int) -> int:
    """Number of parameters of a LoRA adapter: rank * (in + out) for each matrix of the layers."""
    heads = config.num_attention_heads + config.num_key_value_heads  # q and o; k and v
    attention = 4 * config.hidden_size + 2 * heads * config.resolved_head_dim
    # A plain MLP has two matrices instead of three, 3/2 as wide: the sum of its widths is 3 F too.
    mlp = (3 if GATED[config.mlp] else 2) * config.hidden_size + 3 * config.intermediate_size
    return config.num_hidden_layers * rank * (attention + mlp)


def layer_matrices(config: ModelConfig) -> int:
    """Number of parameters in the matrices of a layer; a plain MLP has as many as one with a gate."""
    heads = config.num_attention_heads + config.num_key_value_heads  # q and o; k and v
    return config.hidden_size * (2 * heads * config.resolved_head_dim + 3 * config.intermediate_size)


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """FLOPs of training on one token, forward and backward: 6 N + 12 L H d T (Chowdhery et al. 2022, appendix B).

    N counts the weights of the matrix products: with the head, without the embedding, which is a lookup. The second
    term is attention over T tokens as if it were not causal. Recomputed activations do not count.
    """
    products = config.num_hidden_layers * layer_matrices(config) + config.vocab_size * config.hidden_size
    heads = config.num_attention_heads * config.resolved_head_dim
    return 6 * products + 12 * config.num_hidden_layers * heads * sequence_length
