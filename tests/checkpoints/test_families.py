"""Which config.json can be read, and the error for each that cannot."""

import json
from pathlib import Path

import pytest
import transformers

from checkpoints.families import FAMILIES, SHAPE_FIELDS, from_json
from checkpoints.pretrained import load_config
from errors import UserError

YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
STABLE = {"model_type": "stablelm", "partial_rotary_factor": 1.0}

REFUSED = {
    "another model": {"model_type": "gpt2"},
    "biases in the MLP": {"mlp_bias": True},
    "quantized": {"quantization_config": {"bits": 4}},
    "attention in both directions": {"is_causal": False},
    "partial rotation": {"partial_rotary_factor": 0.5},
    "unknown rope key": {"rope_scaling": {**YARN, "sections": 1}},
    "rope by layer type": {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    "bands in reverse": {
        "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 1}
    },
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


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_missing_key_means_what_it_means_in_transformers(model_type):
    shape = dict(zip(SHAPE_FIELDS, (97, 256, 80, 2, 32), strict=True))
    partial = {"partial_rotary_factor": 1.0} if model_type == "stablelm" else {}
    theirs = type(transformers.AutoConfig.for_model(model_type)).from_dict(shape | partial)
    ours = from_json({"model_type": model_type, **shape, **partial})
    window = getattr(theirs, "sliding_window", None) or theirs.max_position_embeddings
    assert ours.max_position_embeddings == min(theirs.max_position_embeddings, window)
    for key in ("num_key_value_heads", "tie_word_embeddings", "initializer_range"):
        assert getattr(ours, key) == getattr(theirs, key), key
    assert ours.resolved_head_dim == (getattr(theirs, "head_dim", None) or 256 // 32)
    assert ours.norm_eps == getattr(theirs, FAMILIES[model_type].eps)
    assert ours.attention_bias == getattr(theirs, str(FAMILIES[model_type].qkv_bias), model_type == "qwen2")
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"] and ours.rope_scaling is None


PUBLISHED = [json.loads(line) for line in (Path(__file__).parent / "published_configs.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("published", PUBLISHED, ids=[published["name"] for published in PUBLISHED])
def test_the_config_of_a_published_checkpoint_is_read_as_transformers_reads_it(published, tmp_path, capsys):
    fields = published["config"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ours, theirs = load_config(tmp_path), transformers.AutoConfig.for_model(**fields)
    noted = "sliding window" in capsys.readouterr().err
    assert noted == (ours.max_position_embeddings < theirs.max_position_embeddings)
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.resolved_head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.rope_scaling or {}).get("rope_type", "default") == theirs.rope_parameters["rope_type"]
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    window = getattr(theirs, "sliding_window", None) or theirs.max_position_embeddings
    assert ours.max_position_embeddings == min(theirs.max_position_embeddings, window)
