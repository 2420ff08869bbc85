"""Which config.json can be read, and the error for each that cannot."""

import json
from pathlib import Path

import pytest
import transformers

from checkpoints.families import FAMILIES, SHAPE_FIELDS
from checkpoints.pretrained import load_config
from errors import UserError

YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
STABLE = {"model_type": "stablelm", "partial_rotary_factor": 1.0}

REFUSED = {
    "another model": {"model_type": "gpt2"},
    "biases in the MLP": {"mlp_bias": True},
    "attention in both directions": {"is_causal": False},
    "partial rotation": {"partial_rotary_factor": 0.5},
    "unknown rope key": {"rope_scaling": {**YARN, "sections": 1}},
    "rope by layer type": {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    "bands in reverse": {"rope_scaling": YARN | {"type": "llama3", "low_freq_factor": 1, "high_freq_factor": 1}},
    "broken yarn": {"rope_scaling": {"type": "yarn"}},
    "layers of other kinds": {"layer_types": ["full_attention", "chunked_attention"]},
    "parallel residual": {**STABLE, "use_parallel_residual": True},
    "an ignored head_dim": {**STABLE, "head_dim": 20},
    "a quarter is rotated by default": {"model_type": "stablelm"},
    "a number as text": {"hidden_size": "48"},
    "a key that prenorm needs": {"model_type": "prenorm"},
    "layers": {"num_hidden_layers": 100_000, "attention_bias": True},
    **{f"{key}, too large": {key: 2**62} for key in (*SHAPE_FIELDS, "head_dim")},
    "another head_dim": {"head_dim": 10},
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED.keys())
def test_a_model_that_computes_another_function_is_refused_in_one_line_that_names_the_file(saved, changes, edit_config):
    directory = saved()
    edit_config(directory, without=("rope_scaling", "rope_parameters"))
    edit_config(directory, **changes)
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
