"""Keys of a Hugging Face config.json that must be off, and those that change nothing. Imports no torch."""

import functools
import sys
from pathlib import Path

from checkpoints.weight_files import join_names
from errors import UserError, is_main_process

# With keys that end in _token_id, what published configurations have; any other key that is not read is noted.
NO_EFFECT = frozenset(
    """
    model_type architectures transformers_version name_or_path _name_or_path _model_name_or_path dtype torch_dtype
    use_cache pretraining_tp attention_dropout hidden_dropout max_sequence_length is_llama_config transformers.js_config
    _attn_implementation_autoset unsloth_fixed unsloth_version
    """.split()
)
QUANTIZED = ("quantization_config", "quantization", "compression_config")
# Keys of functions that this decoder does not compute, with the values under which they change nothing.
OFF: dict[str, tuple] = {
    "is_causal": (True,),
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0, None),
    "pruned_heads": ({}, [], None),
    "per_layer_config": ({}, None),
    **dict.fromkeys([*QUANTIZED, "attention_chunk_size"], (None,)),
    **dict.fromkeys(
        """
        mlp_bias use_parallel_residual qk_layernorm qk_norm use_qk_norm qk_layer_norms rope_interleaved use_mrope
        is_encoder_decoder use_bidirectional_attention alibi use_moe use_bias bias final_logit_softcapping
        attn_logit_softcapping
        """.split(),
        (False, None),
    ),
}


def check_off(fields: dict) -> None:
    """Raise `UserError` for a key of `OFF` that has another value."""
    for key, allowed in OFF.items():
        if key in fields and fields[key] not in allowed:
            advice = "give the unquantized model" if key in QUANTIZED else f"it needs {allowed[0]!r}"
            raise UserError(f"{key} is {fields[key]!r}, which this decoder cannot represent; {advice}.")


@functools.cache
def note_ignored_keys(path: Path, keys: tuple[str, ...]) -> None:
    """Say on stderr, once, which keys of a config.json are unknown."""
    if keys and is_main_process():
        names = join_names([f"{key!r:.40}" for key in keys])  # one short line, whatever a key is
        print(f"note: {path} has unknown keys, which are ignored: {names}", file=sys.stderr)
