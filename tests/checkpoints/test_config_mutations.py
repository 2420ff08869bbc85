"""No config.json is read as another function than transformers reads it as: every key is changed, one at a time.

A changed config.json beside the same small random weights must give equal logits, or a `UserError`, or an error of
transformers itself. Tolerance: as in test_transformers.py. All changes take minutes:
`python -m pytest -m slow tests/checkpoints/test_config_mutations.py`; the ordinary suite draws some of them.
Then: which config.json can be read, and the error for each that cannot.
"""

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from checkpoints.families import FAMILIES, HARMLESS, SHAPE_FIELDS
from checkpoints.pretrained import load_config, load_pretrained
from errors import UserError
from tests.conftest import edit_json

LOGITS = 2e-6
SHAPE = dict(vocab_size=29, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False)
WINDOW = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "attention_factor": 1.2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": YARN | {"beta_fast": 16, "beta_slow": 0.1, "truncate": False},
    "yarn, few keys": {"type": "yarn", "factor": 4.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 16},
}
# Each is changed in turn: the family, and keys of config.json on top of those that transformers writes.
BASES = {
    **{family: (family, {"head_dim": 8} if family == "qwen3" else {}) for family in FAMILIES},
    "qwen2 with window": ("qwen2", WINDOW),
    "mistral with window": ("mistral", {"sliding_window": 4}),
    "qwen3 with window": ("qwen3", WINDOW | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    **{f"llama, old {name}": ("llama", {"rope_scaling": rope, "rope_theta": 100.0}) for name, rope in SCALED.items()},
    **{f"mistral, {name}": ("mistral", {"rope_parameters": {**r, "rope_theta": 100.0}}) for name, r in SCALED.items()},
}
# Keys of no configuration class of these families, some of which transformers reads by name all the same.
OTHER_KEYS = """
    is_causal attention_chunk_size sliding_window use_sliding_window max_window_layers layer_types rope_theta
    rope_scaling original_max_position_embeddings partial_rotary_factor head_dim attention_bias use_qkv_bias mlp_bias
    rms_norm_eps layer_norm_eps qk_norm num_kv_shared_layers per_layer_config default_theta logit_scale num_experts
    auto_map torch_dtype use_bidirectional_attention mup no_rope_layers rope_interleaved
""".split()
MISSING = object()
VALUES = (MISSING, None, True, False, 0, 1, 2, 3, -1, 0.5, 1.5, 1e300, "x", "silu", "bfloat16", [], ["x"], {}, {"x": 1})
SPECIAL = {
    "layer_types": [["full_attention"] * 2, ["sliding_attention"] * 2, ["full_attention", "sliding_attention"]],
    "rope_scaling": [*SCALED.values(), YARN, {"type": "dynamic", "factor": 2.0}, {"type": "su"}, {"rope_theta": 99.0}],
    "rope_parameters": [*SCALED.values(), YARN, {"full_attention": {"rope_type": "default"}}, {"factor": 2.0}],
    "per_layer_config": [{"1": {"sliding_window": 3}}, {"0": {"num_key_value_heads": 2}}],
    "hidden_act": ["gelu", "swish", "relu"],
    "partial_rotary_factor": [1.0, 0.25],
    "sliding_window": [4, 12, 31, 32, 4096],
    "max_position_embeddings": [16, 64],
    "rope_theta": [1e6, 50],
}


@pytest.fixture(scope="module", params=BASES, ids=BASES.keys())
def base(request, tmp_path_factory) -> Path:
    """A directory with a small random model of transformers, as it saves it."""
    family, changes = BASES[request.param]
    directory = tmp_path_factory.mktemp("base")
    defaults = {"partial_rotary_factor": 1.0} if family == "stablelm" else {}
    kind = type(transformers.AutoConfig.for_model(family))
    config = kind.from_dict(copy.deepcopy({"sliding_window": None} | SHAPE | defaults | changes))
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.3 + (1.0 if parameter.ndim == 1 else 0.02)
    model.save_pretrained(directory)
    if "rope_scaling" in changes:  # as transformers 4 saved it
        edit_json(directory / "config.json", without=("rope_parameters",), **changes)
    return directory


def mutations(fields: dict) -> Iterator[tuple[str, dict]]:
    """Every changed config.json, with a description of the change."""
    keys = {*fields, *OTHER_KEYS, *HARMLESS, "an_unknown_key"}
    for key in sorted(keys - {"model_type"}):
        value = fields.get(key)
        near = [value + 1, value * 2, value / 2] if isinstance(value, int | float) else []
        values = VALUES if key in fields or key in OTHER_KEYS else (None, True, 3, "x", {})
        for new in [*values, *near, *SPECIAL.get(key, [])]:
            yield f"{key}: {new!r}", changed(fields, key, new)
        if isinstance(value, dict):
            for inner in [*value, "rope_type", "type", "factor", "mscale", "partial_rotary_factor", "truncate", "x"]:
                number = value.get(inner)
                near = [number * 2, number / 2] if isinstance(number, int | float) else []
                for new in [*VALUES, *near, "linear", "yarn", "default", 0.25]:
                    yield f"{key}.{inner}: {new!r}", fields | {key: changed(value, inner, new)}


def changed(fields: dict, key: str, value: object) -> dict:
    """A copy with one key changed, or without it."""
    fields = copy.deepcopy(fields)
    fields.pop(key, None)
    return fields if value is MISSING else fields | {key: value}


@torch.no_grad()
def compare(directory: Path, changes: list[tuple[str, dict]], tmp_path: Path) -> tuple[Counter, list[str]]:
    """How many of the changes had which outcome, and those that were silently different."""
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    tokens = torch.randint(0, SHAPE["vocab_size"], (2, 14), generator=torch.Generator().manual_seed(3))
    counts, different = Counter(), []
    for name, fields in changes:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        try:
            decoder = load_pretrained(tmp_path)
        except UserError:
            counts["refused here"] += 1
            continue
        given = tokens[:, : decoder.config.max_position_embeddings]
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
            expected = model(given, use_cache=False, return_dict=True).logits
        except Exception:  # whatever it may be
            expected = torch.tensor(torch.nan)
        error = ((decoder(given) - expected).norm() / expected.norm()).item()
        if not torch.isfinite(expected).all():
            counts["refused by transformers"] += 1
        elif error <= LOGITS:
            counts["equal"] += 1
        else:
            different.append(f"{name}: {error:.1e}")
    return counts, different


@pytest.mark.parametrize("count", [6, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "all"])
def test_no_changed_config_file_is_silently_read_as_another_function(base, tmp_path, count):
    fields = json.loads((base / "config.json").read_text())
    changes = list(mutations(fields))
    random.Random(str(sorted(fields))).shuffle(changes)
    counts, different = compare(base, [("unchanged", fields), *changes[:count]], tmp_path)
    assert different == [] and counts["equal"] > 0, counts  # the unchanged one at least


OLD_YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
STABLE = {"model_type": "stablelm", "partial_rotary_factor": 1.0}

REFUSED = {
    "another model": {"model_type": "gpt2"},
    "biases in the MLP": {"mlp_bias": True},
    "attention in both directions": {"is_causal": False},
    "partial rotation": {"partial_rotary_factor": 0.5},
    "unknown rope key": {"rope_scaling": {**OLD_YARN, "sections": 1}},
    "rope by layer type": {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    "bands in reverse": {"rope_scaling": OLD_YARN | {"type": "llama3", "low_freq_factor": 1, "high_freq_factor": 1}},
    "broken yarn": {"rope_scaling": {"type": "yarn"}},
    "layers of other kinds": {"layer_types": ["full_attention", "chunked_attention"]},
    "parallel residual": {**STABLE, "use_parallel_residual": True},
    "an ignored head_dim": {**STABLE, "head_dim": 20},
    "a quarter is rotated by default": {"model_type": "stablelm"},
    "a number as text": {"hidden_size": "48"},
    "a key that prenorm needs": {"model_type": "prenorm"},
    "layers": {"num_hidden_layers": 100_000, "attention_bias": True},
    **{f"{key}, too large": {key: 2**62} for key in (*SHAPE_FIELDS, "head_dim")},
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED.keys())
def test_a_model_that_computes_another_function_is_refused_in_one_line_that_names_the_file(saved, changes):
    directory = saved()
    edit_json(directory / "config.json", without=("rope_scaling", "rope_parameters"))
    edit_json(directory / "config.json", **changes)
    with pytest.raises(UserError) as refusal:
        load_config(directory)
    assert str(refusal.value).startswith(f"{directory / 'config.json'} cannot be read (")
    assert "\n" not in str(refusal.value)


BARE = dict(zip(SHAPE_FIELDS, (97, 256, 80, 2, 32), strict=True)) | {"partial_rotary_factor": 1.0}
LINES = (Path(__file__).parent / "published_configs.jsonl").read_text().splitlines()
CONFIGS = {family: BARE | {"model_type": family} for family in FAMILIES}
CONFIGS |= {published["name"]: published["config"] for published in map(json.loads, LINES)}


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_published_config_and_a_missing_key_mean_what_they_mean_in_transformers(fields, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ours, theirs, family = load_config(tmp_path), transformers.AutoConfig.for_model(**fields), fields["model_type"]
    noted = "sliding window" in capsys.readouterr().err
    assert noted == (ours.max_position_embeddings < fields.get("max_position_embeddings", 0))
    window = getattr(theirs, "sliding_window", None) or theirs.max_position_embeddings
    assert ours.max_position_embeddings == min(theirs.max_position_embeddings, window)
    for key in ("num_key_value_heads", "tie_word_embeddings", "initializer_range"):
        assert getattr(ours, key) == getattr(theirs, key), key
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.resolved_head_dim == head_dim and ours.norm_eps == getattr(theirs, FAMILIES[family].eps)
    assert ours.attention_bias == getattr(theirs, str(FAMILIES[family].qkv_bias), family == "qwen2")
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (ours.rope_scaling or {}).get("rope_type", "default") == theirs.rope_parameters["rope_type"]
