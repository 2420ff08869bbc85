"""Random models of every family that can be read, against transformers: at once, and token by token in padded batches.

Tolerance: as in test_transformers.py; positions stay below 80, where frequencies rounded to float32 are exact enough.
All families with all types of rotary positions: `python -m pytest -m slow tests/model/test_random_models.py`.
"""

import itertools
import random

import pytest
import torch
import transformers

from checkpoints.pretrained import load_pretrained, save_pretrained
from model.cache import KeyValueCache

LOGITS = 2e-6
FAMILIES = {
    "llama": ("Llama", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 12}),
    "mistral, window": ("Mistral", {"sliding_window": 60}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, windows by layer": (
        "Qwen3",
        {"head_dim": 12, "use_sliding_window": True, "sliding_window": 60}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "partial_rotary_factor": 1.0}),
}
ROPES = ("default", "linear", "yarn", "llama3")
CONTEXT = 80
CASES = list(itertools.product(FAMILIES, ROPES))
# In the ordinary suite, each family with one type of rotary positions, and each type with two families.
QUICK = [(family, ROPES[(3 * i) % 4 if i < 4 else (3 * i + 2) % 4]) for i, family in enumerate(FAMILIES)]


def random_rope(kind: str, draw: random.Random) -> dict:
    """Rotary parameters of a type; contexts short enough for every branch to matter."""
    rope = {"rope_type": kind, "rope_theta": 10 ** draw.uniform(1.5, 5)}
    if kind != "default":
        rope["factor"] = draw.uniform(1.5, 8)
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = draw.randint(8, 40)
    if kind == "llama3":
        rope |= {"low_freq_factor": draw.uniform(0.5, 1.5), "high_freq_factor": draw.uniform(2, 5)}
    if kind == "yarn":
        rope |= {"beta_fast": draw.uniform(1, 10), "beta_slow": draw.uniform(0.1, 1), "truncate": draw.random() < 0.5}
        rope |= draw.choice([{}, {"attention_factor": 0.9}])
    return rope


def random_model(family: str, rope: str, shape: dict) -> transformers.PreTrainedModel:
    """A model of transformers with random weights, norm weights near 1, and random rotary parameters."""
    draw = random.Random(f"{family} {rope}")
    architecture, changes = FAMILIES[family]
    torch.manual_seed(draw.randrange(1000))
    shape["max_position_embeddings"] = CONTEXT
    config = getattr(transformers, f"{architecture}Config")(**shape, rope_parameters=random_rope(rope, draw), **changes)
    config.eos_token_id = config.pad_token_id = None
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) * (0.3 if parameter.ndim == 1 else 0.12) + 0.02
        parameter.data += 0.8 if parameter.ndim == 1 else 0.0
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "rope"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_logits_at_once_and_of_greedy_decoding_in_a_padded_batch_equal_those_of_transformers(
    shape, relative, tmp_path, family, rope
):
    model = random_model(family, rope, shape)
    model.save_pretrained(tmp_path / "theirs")
    decoder = load_pretrained(tmp_path / "theirs")
    save_pretrained(decoder, tmp_path / "ours")
    again = load_pretrained(tmp_path / "ours")
    assert again.config == decoder.config

    tokens = torch.randint(0, shape["vocab_size"], (2, decoder.config.max_position_embeddings))
    expected = model(tokens).logits
    assert max(relative(decoder(tokens), expected), relative(again(tokens), expected)) <= LOGITS

    lengths, steps = [40, 23, 3], 12
    prompt = torch.randint(0, shape["vocab_size"], (3, 40))
    padding = torch.tensor([40 - length for length in lengths])
    generated = model.generate(
        prompt,
        attention_mask=(torch.arange(40) >= padding[:, None]).long(),
        do_sample=False,
        max_new_tokens=steps,
        output_logits=True,
        return_dict_in_generate=True,
    )
    cache = KeyValueCache(decoder.config, 3, 40 + steps)
    found, last = [], prompt
    for _ in range(steps):
        found.append(decoder(last, cache=cache, padding=padding, last_only=True)[:, 0])
        last = found[-1].argmax(-1, keepdim=True)
    assert torch.equal(torch.stack(found, 1).argmax(-1), generated.sequences[:, 40:])
    assert relative(torch.stack(found, 1), torch.stack(generated.logits, 1)) <= LOGITS
