"""Which config.json can be read, and the error for each that cannot."""

import json
import math
from pathlib import Path

import pytest
import transformers

from checkpoints.families import FAMILIES, SHAPE_FIELDS, from_json
from checkpoints.pretrained import load_config, save_pretrained
from errors import UserError
from model.decoder import Decoder

SHAPE = dict(
    vocab_size=97, hidden_size=256, intermediate_size=80, num_hidden_layers=2, num_attention_heads=32,
    num_key_value_heads=32, max_position_embeddings=64,
)  # fmt: skip
YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
STABLE = {"model_type": "stablelm", "partial_rotary_factor": 1.0}
QWEN_WINDOW = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}

REFUSED = {
    "another model": ({"model_type": "gpt2"}, "model_type 'gpt2' cannot be read; supported are llama"),
    "no model type": ({"model_type": None}, "model_type None"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "biases in the MLP": ({"mlp_bias": True}, "mlp_bias is True"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config is .*; give the unquantized model"),
    "quantized by MLX": ({"quantization": {"bits": 4}}, "quantization is"),
    "attention in both directions": ({"is_causal": False}, "is_causal is False, which .*; it needs True"),
    "attention in both directions, null": ({"is_causal": None}, "is_causal is None"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "partial rotation inside": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    "old rope type": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type 'dynamic' .*linear, llama3, yarn"),
    "new rope type": ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "type 'longrope'"),
    "unknown rope key": ({"rope_scaling": {**YARN, "sections": 1}}, "rotary positions have sections"),
    "rope by layer type": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rotary positions"),
    "broken llama3 rope": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor None"),
    "broken yarn": ({"rope_scaling": {"type": "yarn"}}, "factor None"),
    "broken linear rope": ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor '2'"),
    "no rotation": ({"rope_theta": 0}, "rope_theta is 0"),
    "yarn without a base": ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta is 1; yarn"),
    "llama's window": ({"sliding_window": 16}, "sliding_window is 16, which llama does not have"),
    "a window of nothing": ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
    "windows by layer of llama": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types are not those that llama has",
    ),
    "windows by layer without a window": (
        {**QWEN_WINDOW, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 3},
        "without a sliding window",
    ),
    "windows for too few layers": ({**QWEN_WINDOW, "layer_types": ["sliding_attention"]}, "for each of 3 layers"),
    "another layer type": ({**QWEN_WINDOW, "layer_types": ["linear_attention"] * 3}, "must be full_attention or"),
    "parallel residual": ({**STABLE, "use_parallel_residual": True}, "use_parallel_residual"),
    "another per-head norm": ({**STABLE, "qk_layernorm": True}, "qk_layernorm"),
    "an ignored head_dim": ({**STABLE, "head_dim": 20}, "head_dim 20"),
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


def test_a_missing_shape_is_an_error(saved, edit_config):
    directory = saved()
    edit_config(directory, without=("hidden_size",))
    with pytest.raises(UserError, match="hidden_size is missing"):
        load_config(directory)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_missing_key_means_what_it_means_in_transformers(model_type):
    shape = {key: SHAPE[key] for key in SHAPE_FIELDS}
    partial = {"partial_rotary_factor": 1.0} if model_type == "stablelm" else {}
    theirs = type(transformers.AutoConfig.for_model(model_type)).from_dict(shape | partial)
    ours = from_json({"model_type": model_type, **shape, **partial})
    for key in ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "initializer_range"):
        assert getattr(ours, key) == getattr(theirs, key), key
    assert ours.resolved_head_dim == (getattr(theirs, "head_dim", None) or 256 // 32)
    assert ours.norm_eps == getattr(theirs, FAMILIES[model_type].eps)
    assert ours.attention_bias == getattr(theirs, str(FAMILIES[model_type].qkv_bias), model_type == "qwen2")
    assert {"rope_theta": ours.rope_theta, "rope_type": "default"} == {
        key: theirs.rope_parameters[key] for key in ("rope_theta", "rope_type")
    }
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    if hasattr(theirs, "max_window_layers"):  # the default counts where a file has a window
        window = {"use_sliding_window": True, "num_hidden_layers": 32}
        windows = from_json({"model_type": model_type, **shape, **window}).windows
        layers = type(theirs).from_dict(shape | window)
        expected = [layers.sliding_window if "sliding" in kind else None for kind in layers.layer_types]
        assert windows == expected and set(expected) == {None, 4096}


def test_a_stablelm_without_partial_rotary_factor_rotates_a_quarter(saved, edit_config):
    directory = saved(norm="layer")
    edit_config(directory, without=("partial_rotary_factor",))
    with pytest.raises(UserError, match=r"partial_rotary_factor is 0\.25"):
        load_config(directory)


INNER = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "mscale", "truncate", "x")


@pytest.mark.parametrize("model_type", [*FAMILIES, "prenorm"])
def test_every_value_of_every_key_is_read_or_a_one_line_user_error(saved, model_type):
    fields = json.loads((saved(norm="layer", qk_norm=model_type == "prenorm") / "config.json").read_text())
    if model_type != "prenorm":
        ignored = ("use_parallel_residual", "qk_layernorm", "use_qkv_bias")
        fields = {key: value for key, value in fields.items() if key not in ignored} | {"model_type": model_type}
        from_json(fields)
    keys = {*fields, "layer_types", "prenorm", "use_sliding_window", "max_window_layers", "sliding_window"}
    ropes = [YARN | {key: value} for key in INNER for value in (None, True, -1, 0, 10**400, "x", [], {})]
    for key in keys:
        for value in (None, True, -1, 0, 7, 0.5, 1e300, math.nan, "x", [], ["x"], {}, {"rope_type": []}, *ropes):
            try:
                from_json({"use_sliding_window": True, **fields, key: value})
            except UserError as error:
                assert "\n" not in str(error)


def test_unknown_keys_are_ignored_with_one_note(saved, edit_config, capsys):
    directory = saved()
    expected = load_config(directory)
    edit_config(directory, _model_name_or_path="a", pad_token_id=0)
    assert load_config(directory) == expected and capsys.readouterr().err == ""
    edit_config(directory, logit_scale=0.5, auto_map={"AutoModelForCausalLM": "x.Y"})
    assert load_config(directory) == load_config(directory) == expected
    path, unknown = directory / "config.json", "unknown keys, which are ignored: 'logit_scale', 'auto_map'"
    assert capsys.readouterr().err == f"note: {path} has {unknown}\n"


def test_an_error_is_one_line_and_names_the_file(saved, edit_config):
    directory = saved()
    edit_config(directory, is_causal=False, logit_scale=[1, 2])
    with pytest.raises(UserError) as refusal:
        load_config(directory)
    assert str(refusal.value).startswith(f"{directory / 'config.json'}: is_causal") and "\n" not in str(refusal.value)


PUBLISHED = [json.loads(line) for line in (Path(__file__).parent / "published_configs.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("published", PUBLISHED, ids=[published["name"] for published in PUBLISHED])
def test_the_config_of_a_published_checkpoint_is_read_as_transformers_reads_it(published, tmp_path, capsys):
    fields = published["config"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ours, theirs = load_config(tmp_path), transformers.AutoConfig.for_model(**fields)
    assert capsys.readouterr().err == ""
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.resolved_head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.rope_scaling or {}).get("rope_type", "default") == theirs.rope_parameters["rope_type"]
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    window = getattr(theirs, "sliding_window", None)
    assert ours.sliding_window == (window if window is None or window < theirs.max_position_embeddings else None)


def test_sliding_windows_that_hide_no_token_leave_full_attention(saved, edit_config):
    directory = saved()
    for changes in (
        {"model_type": "mistral", "sliding_window": 64},
        {"model_type": "llama", "sliding_window": 4096},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3},
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["full_attention"] * 3,
        },
    ):
        edit_config(directory, **changes)
        assert load_config(directory).windows == [None] * 3


def test_sliding_windows_of_some_layers_are_read(saved, edit_config):
    directory = saved()
    edit_config(directory, **QWEN_WINDOW, head_dim=8)
    assert load_config(directory).windows == [None, 16, 16]
    edit_config(directory, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    assert load_config(directory).windows == [16, None, 16]
    edit_config(directory, model_type="mistral", layer_types=None)
    assert load_config(directory).windows == [16, 16, 16]


def test_the_original_context_of_scaled_positions_may_stand_beside_them_or_be_missing(saved, edit_config):
    directory = saved()
    for changes, expected in (
        ({"rope_scaling": YARN}, 32),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, 64),  # max_position_embeddings
        ({"rope_scaling": YARN | {"finetuned": True}, "original_max_position_embeddings": 16}, 16),
    ):
        edit_config(directory, **changes)
        assert load_config(directory).rope_scaling["original_max_position_embeddings"] == expected


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
