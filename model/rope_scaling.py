"""The supported scalings of rotary frequencies for longer contexts. Imports no torch."""

from errors import UserError

# Types of scaling, and the numbers that each needs; `unscaled_part` in model/rope.py has the formulas.
ROPE_SCALING = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
}


def check_rope_scaling(scaling: dict | None, rope_theta: float) -> None:
    """Raise `UserError` unless the scaling of the rotary frequencies is None or complete."""
    if scaling is None:
        return
    kind = scaling["rope_type"]
    if kind not in ROPE_SCALING:
        raise UserError(f"rope_scaling of type {kind!r} is not supported; {', '.join(ROPE_SCALING)} are.")
    for key in ROPE_SCALING[kind]:
        value = scaling.get(key)
        if type(value) not in (int, float) or not 0 < value < 1e9:  # scores are products of two attention factors
            raise UserError(f"rope_scaling has {key} {value!r}; {kind} needs a number above 0 and below 1e9.")
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise UserError("rope_scaling needs a high_freq_factor above its low_freq_factor.")
    if kind == "yarn" and rope_theta <= 1:
        raise UserError(f"rope_theta is {rope_theta!r}; yarn needs a number greater than 1.")
