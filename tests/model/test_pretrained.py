"""Directories on disk: what is written, weights for another norm, and what unreadable ones get."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from errors import UserError
from model.decoder import Decoder
from model.pretrained import load_config, load_pretrained, load_weights, plain_tensors, save_pretrained


@pytest.fixture
def saved(make_decoder, tmp_path):
    """Save a small decoder with the given changes and return its directory."""

    def save(**changes):
        save_pretrained(make_decoder(**changes), tmp_path / "model")
        return tmp_path / "model"

    return save


def edit_config(directory, *, without=(), **changes):
    """Change fields of a config.json."""
    path = directory / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in fields.items() if key not in without}))


def edit_weights(directory, change):
    """Change the tensors of a model.safetensors."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_packed_matrices_are_plain_on_disk_with_the_rows_in_order(make_decoder, saved):
    decoder = make_decoder(attention_bias=True)
    tensors = load_file(saved(attention_bias=True) / "model.safetensors")
    attention, mlp = decoder.layers[1].self_attn, decoder.layers[1].mlp
    q, k, v = attention.qkv_proj.weight.split((48, 16, 16))
    gate, up = mlp.gate_up_proj.weight.split(80)
    for name, tensor in {"q": q, "k": k, "v": v, "o": attention.o_proj.weight}.items():
        assert torch.equal(tensors[f"model.layers.1.self_attn.{name}_proj.weight"], tensor)
    for name, tensor in {"gate": gate, "up": up, "down": mlp.down_proj.weight}.items():
        assert torch.equal(tensors[f"model.layers.1.mlp.{name}_proj.weight"], tensor)
    assert torch.equal(tensors["model.layers.1.self_attn.v_proj.bias"], attention.qkv_proj.bias[64:])
    assert not tensors["model.layers.1.self_attn.o_proj.bias"].any()
    assert "lm_head.weight" not in tensors


def test_plain_tensors_are_views_that_write_through(make_decoder):
    decoder = make_decoder()
    with torch.no_grad():
        for tensor in plain_tensors(decoder.state_dict(), decoder.config).values():
            tensor.fill_(7)
    assert all((parameter == 7).all() for parameter in decoder.parameters())


def test_saving_again_into_the_same_directory_replaces_what_was_there(make_decoder, saved, tokens):
    directory, other = saved(), make_decoder(seed=99)
    save_pretrained(other, directory)
    assert torch.equal(load_pretrained(directory)(tokens), other(tokens))


def test_a_file_that_cannot_be_written_is_an_os_error(make_decoder, tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        save_pretrained(make_decoder(), tmp_path)


def test_weights_of_different_precision_in_one_file_all_stay_exact(saved):
    directory = saved()

    def halve(tensors):
        for name in list(tensors):
            if "proj" in name and "k_proj" not in name:
                tensors[name] = tensors[name].bfloat16()

    edit_weights(directory, halve)
    tensors, decoder = load_file(directory / "model.safetensors"), load_pretrained(directory)
    for name, tensor in plain_tensors(decoder.state_dict(), decoder.config).items():
        assert torch.equal(tensor.float(), tensors[name].float())
    assert decoder.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
    assert decoder.layers[0].self_attn.qkv_proj.weight.dtype == torch.float32


def test_loaded_parameters_can_be_trained(saved, tokens):
    decoder = load_pretrained(saved())
    decoder(tokens, tokens).mean().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())


def test_a_tied_checkpoint_that_also_holds_the_head_opens_when_the_two_are_equal(saved):
    directory = saved()
    edit_weights(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load_pretrained(directory).lm_head is None
    edit_weights(directory, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(UserError, match="another lm_head"):
        load_pretrained(directory)


def test_tables_of_rotary_frequencies_in_old_files_are_passed_over(saved):
    directory = saved()
    edit_weights(directory, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load_pretrained(directory)


NORMS = [f"model.layers.{i}.{norm}" for i in range(3) for norm in ("input_layernorm", "post_attention_layernorm")]
BIASES = {f"{norm}.bias" for norm in [*NORMS, "model.norm"]}


def test_weights_for_the_same_norm_are_all_kept(make_decoder, saved, tokens):
    decoder = make_decoder(seed=1)
    report = load_weights(decoder, saved())
    assert (report.new, report.dropped) == ([], [])
    assert set(report.kept) == set(plain_tensors(decoder.state_dict(), decoder.config))
    assert torch.equal(decoder(tokens), make_decoder()(tokens))


def test_from_rms_to_layer_gains_are_kept_and_biases_are_new(make_config, make_decoder, saved):
    decoder, source = Decoder(make_config(norm="layer")), make_decoder()
    report = load_weights(decoder, saved())
    assert (set(report.new), report.dropped) == (BIASES, [])
    for name, parameter in decoder.named_parameters():
        if parameter.ndim == 1 and name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            assert torch.equal(parameter, source.state_dict()[name])


@pytest.mark.parametrize("target", [{"norm": "rms"}, {"norm": "layer", "norm_bias": False}])
def test_from_layer_biases_are_dropped_where_the_arm_has_none(make_config, make_decoder, saved, target):
    decoder, source = Decoder(make_config(**target)), make_decoder(norm="layer")
    report = load_weights(decoder, saved(norm="layer"))
    assert (report.new, set(report.dropped)) == ([], BIASES)
    assert all(torch.equal(parameter, source.state_dict()[name]) for name, parameter in decoder.named_parameters())


def test_zero_biases_that_only_fill_a_family_are_neither_kept_nor_dropped(make_decoder, saved):
    report = load_weights(make_decoder(seed=1), saved(norm="layer", norm_bias=False))
    assert (report.new, report.dropped) == ([], [])


def test_master_weights_stay_float32_when_the_checkpoint_is_half_precision(make_decoder, saved):
    directory, decoder = saved(), make_decoder(seed=1)
    edit_weights(directory, lambda t: t.update({name: tensor.bfloat16() for name, tensor in t.items()}))
    load_weights(decoder, directory)
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.float32}
    assert torch.equal(decoder.norm.weight, make_decoder().norm.weight.bfloat16().float())


def test_weights_of_another_shape_are_refused_and_nothing_is_loaded(make_decoder, saved):
    directory, decoder = saved(), make_decoder(seed=1, vocab_size=100, intermediate_size=88)
    before = decoder.norm.weight.clone()
    with pytest.raises(UserError, match=r"another shape: model\.embed_tokens\.weight is \(97, 48\) instead of \(100"):
        load_weights(decoder, directory)
    assert torch.equal(decoder.norm.weight, before)


def test_weights_with_other_heads_in_the_same_shapes_are_refused(make_decoder, saved):
    directory = saved(num_attention_heads=6, num_key_value_heads=6)
    with pytest.raises(UserError, match="num_attention_heads 6, and the model to fill has 12"):
        load_weights(make_decoder(num_attention_heads=12, num_key_value_heads=12), directory)


def test_weights_without_the_norms_of_q_and_k_are_refused(make_decoder, saved):
    with pytest.raises(UserError, match=r"missing: model\.layers\.0\.self_attn\.q_norm\.weight"):
        load_weights(make_decoder(qk_norm=True), saved())


REFUSED = {
    "another model": ({"model_type": "gpt2"}, "model_type 'gpt2' is not one of those that can be read: llama"),
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
def test_a_configuration_that_would_compute_something_else_is_refused(saved, changes, words):
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
def test_a_missing_key_is_never_guessed(saved, model_type, key, words):
    directory = saved(max_position_embeddings=8192)
    edit_config(directory, without=(key,), model_type=model_type)
    with pytest.raises(UserError, match=words):
        load_config(directory)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "stablelm", "prenorm"])
def test_any_value_of_any_key_is_read_or_refused_in_a_sentence(saved, model_type):
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


def test_windows_that_hide_nothing_are_read(saved):
    directory = saved()
    edit_config(directory, model_type="mistral", sliding_window=64)
    load_config(directory)
    edit_config(directory, model_type="qwen2", use_sliding_window=False, sliding_window=16)
    load_config(directory)


def test_a_llama_without_num_key_value_heads_has_as_many_as_query_heads(saved):
    directory = saved(num_key_value_heads=6)
    edit_config(directory, without=("num_key_value_heads",))
    assert load_config(directory).num_key_value_heads == 6


def test_a_bias_on_the_attention_output_is_refused_unless_it_is_zero(saved):
    directory = saved(attention_bias=True)
    edit_weights(directory, lambda t: t["model.layers.1.self_attn.o_proj.bias"].add_(0.1))
    with pytest.raises(UserError, match=r"model\.layers\.1\.self_attn\.o_proj\.bias is not zero"):
        load_pretrained(directory)


def test_missing_unexpected_and_misshapen_tensors_are_listed_and_long_lists_are_cut(saved):
    directory = saved()

    def damage(tensors):
        for name in [name for name in tensors if "q_proj" in name or "gate_proj" in name or "layernorm" in name]:
            del tensors[name]
        tensors["model.extra"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.zeros(7)

    edit_weights(directory, damage)
    with pytest.raises(UserError) as refusal:
        load_pretrained(directory)
    sentence = str(refusal.value)
    assert "missing: model.layers.0.input_layernorm.weight, " in sentence
    assert "and 4 more; unexpected: model.extra; " in sentence
    assert "of another shape: model.norm.weight is (7,) instead of (48,)." in sentence


@pytest.mark.parametrize("name", ["stray", "model.layers.0.mlp.norm.weight"])
def test_a_tensor_of_a_strange_name_is_unexpected_and_not_dropped_as_a_norm(make_decoder, saved, name):
    directory = saved()
    edit_weights(directory, lambda t: t.update({name: torch.zeros(2)}))
    for load in (load_pretrained, lambda directory: load_weights(make_decoder(norm="layer"), directory)):
        with pytest.raises(UserError, match=f"unexpected: {name}"):
            load(directory)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_configuration_with_an_implied_head_dim_comes_back_equal(make_config, tmp_path, norm, qk_norm):
    config = make_config(head_dim=8, norm=norm, qk_norm=qk_norm)
    save_pretrained(Decoder(config), tmp_path)
    assert load_config(tmp_path) == config


@pytest.mark.parametrize("kept", [0, 4, 200, 20_000, -1])
def test_weights_that_are_cut_short_are_one_sentence(saved, kept):
    directory = saved()
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match="is not a whole safetensors file"):
        load_pretrained(directory)


def test_quantized_tensors_are_refused(saved):
    directory = saved()
    edit_weights(directory, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight has type I8"):
        load_pretrained(directory)


def test_pickled_weights_are_never_opened(saved):
    directory = saved()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UserError, match="convert them to safetensors"):
        load_pretrained(directory)


def test_a_missing_or_broken_file_is_one_sentence(saved, tmp_path):
    directory = saved()
    (directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        load_pretrained(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(UserError, match=r"lacks model-1\.safetensors, model-2\.safetensors"):
        load_pretrained(directory)
    index.write_text("[]")
    with pytest.raises(UserError, match="is not a readable index"):
        load_pretrained(directory)
    for content, words in {
        "{": "is not readable JSON",
        "[]": "holds no JSON object",
        "\udcff": "is not readable JSON",
    }.items():
        (directory / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(UserError, match=words):
            load_pretrained(directory)
    (directory / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config\.json"):
        load_pretrained(directory)
    with pytest.raises(UserError, match="is not a directory"):
        load_pretrained(tmp_path / "nowhere")


def test_a_prenorm_configuration_that_lacks_a_key_is_refused(saved):
    directory = saved(norm="layer", qk_norm=True)
    edit_config(directory, without=("qk_norm",))
    with pytest.raises(UserError, match="qk_norm is missing"):
        load_config(directory)
