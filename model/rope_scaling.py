"""The supported scalings of rotary frequencies for longer contexts. Imports no torch."""

from errors import UserError

# Types of scaling, and the numbers that each needs; `unscaled_part` in model/rope.py has the formulas.
ROPE_SCALING = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
}


def check_rope_scaling(scaling: dict | None) -> None:
    """Raise `UserError` unless the scaling of the rotary frequencies is None or has the numbers that its type needs."""
    for key in () if scaling is None else ROPE_SCALING[scaling["rope_type"]]:
        value = scaling.get(key)
        if type(value) not in (int, float) or not 0 < value < 1e9:  # scores are products of two attention factors
            raise UserError(f"rope_scaling has {key} {value!r} and needs a number above 0 and below 1e9.")
