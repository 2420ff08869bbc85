"""Which config.json can be read, and the error for each that cannot."""

import json

import pytest

from errors import UserError
from model.config import NORMS
from model.decoder import Decoder
from model.families import FORMAT
from model.pretrained import load_config, save_pretrained

REFUSED = {
    "another model": ({"model_type": "gpt2"}, "model_type 'gpt2' cannot be read; supported are llama"),
    "no model type": ({"model_type": None}, "model_type None"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "biases in the MLP": ({"mlp_bias": True}, "mlp_bias is True"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "old rope type": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type 'linear'"),
    "new rope type": ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "type 'yarn'"),
    "rope by layer type": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rotary positions"),
    "broken scaled rope": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor None"),
    "mistral's window": ({"model_type": "mistral", "sliding_window": 16}, "sliding window of 16"),
    "qwen's window": (
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        "sliding window of 16",
    ),
    "windows by layer": ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
    "parallel residual": (
        {"model_type": "stablelm", "use_parallel_residual": True, "partial_rotary_factor": 1.0},
        "use_parallel_residual",
    ),
    "another per-head norm": (
        {"model_type": "stablelm", "qk_layernorm": True, "partial_rotary_factor": 1.0},
        "qk_layernorm",
    ),
    "an ignored head_dim": (
        {"model_type": "stablelm", "head_dim": 20, "partial_rotary_factor": 1.0},
        "head_dim 20",
    ),
    "an impossible shape": ({"num_key_value_heads": 4}, "not a multiple of num_key_value_heads 4"),
    "a number as text": ({"hidden_size": "48"}, "hidden_size is '48'"),
}


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_model_that_computes_another_function_is_refused(saved, changes, words, edit_config):
    directory = saved()
    edit_config(directory, without=("rope_scaling", "rope_parameters"))
    edit_config(directory, **changes)
    with pytest.raises(UserError, match=words) as refusal:
        load_config(directory)
    assert str(directory / "config.json") in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("model_type", "key", "words"),
    [
        ("llama", "hidden_size", "hidden_size is missing"),
        ("llama", "max_position_embeddings", "max_position_embeddings is missing"),
        ("qwen2", "num_key_value_heads", "num_key_value_heads is missing"),
        ("qwen3", "head_dim", "head_dim is missing"),
        ("mistral", "sliding_window", "sliding window of 4096"),  # the family's default
        ("stablelm", "partial_rotary_factor", "partial_rotary_factor is 0.25"),  # the family's default
    ],
)
def test_a_missing_key_is_an_error_or_the_default_of_the_family(saved, model_type, key, words, edit_config):
    directory = saved(max_position_embeddings=8192)
    edit_config(directory, without=(key,), model_type=model_type)
    with pytest.raises(UserError, match=words):
        load_config(directory)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "stablelm", "prenorm"])
def test_every_value_of_every_key_is_read_or_a_one_line_user_error(saved, model_type, edit_config):
    directory = saved(norm="layer", qk_norm=True) if model_type == "prenorm" else saved()
    edit_config(directory, model_type=model_type, sliding_window=None, partial_rotary_factor=1.0)
    if model_type != "prenorm":
        load_config(directory)
    original = (directory / "config.json").read_text()
    keys = ["layer_types", "prenorm", "use_sliding_window", "max_window_layers", "use_qkv_bias", *json.loads(original)]
    for key in keys:
        for value in (None, True, -1, 0, 7, 0.5, 1e300, "x", [], ["x"], {}, {"rope_type": []}, {"x": {"y": 1}}):
            edit_config(directory, **{"use_sliding_window": True, key: value})
            try:
                load_config(directory)
            except UserError as error:
                assert "\n" not in str(error)
            (directory / "config.json").write_text(original)


def test_sliding_windows_that_hide_no_token_are_accepted(saved, edit_config):
    directory = saved()
    edit_config(directory, model_type="mistral", sliding_window=64)
    load_config(directory)
    edit_config(directory, model_type="qwen2", use_sliding_window=False, sliding_window=16)
    load_config(directory)


def test_a_llama_without_num_key_value_heads_has_as_many_as_query_heads(saved, edit_config):
    directory = saved(num_key_value_heads=6)
    edit_config(directory, without=("num_key_value_heads",))
    assert load_config(directory).num_key_value_heads == 6


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_configuration_with_the_default_head_dim_is_read_back_equal(make_config, tmp_path, norm, qk_norm):
    config = make_config(head_dim=8, norm=norm, qk_norm=qk_norm)
    save_pretrained(Decoder(config), tmp_path)
    assert load_config(tmp_path) == config


def test_a_prenorm_configuration_that_lacks_a_key_is_refused(saved, edit_config):
    directory = saved(norm="layer", qk_norm=True)
    edit_config(directory, without=("qk_norm",))
    with pytest.raises(UserError, match="qk_norm is missing"):
        load_config(directory)


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_bias_that_was_always_true_before_files_had_a_format_means_the_default(saved, edit_config, norm):
    directory = saved(norm=norm, mlp="geglu")
    config = load_config(directory)
    edit_config(directory, without=("format",), norm_bias=True)
    assert load_config(directory) == config
    edit_config(directory, norm_bias=False)  # this too was written, for LayerNorm without bias
    assert not load_config(directory).has_norm_bias
    edit_config(directory, format=FORMAT, norm_bias=True)
    assert load_config(directory).has_norm_bias == (norm not in ("none", "srms"))
