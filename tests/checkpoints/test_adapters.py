"""Adapters that PEFT wrote for our directories have equal logits; what their directory means, and which are refused."""

import math
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from checkpoints.families import load_config
from checkpoints.find import find_checkpoint, find_files
from checkpoints.pretrained import load_pretrained, load_weights, open_checkpoint, save_pretrained
from errors import UserError
from generation.generate import generate
from generation.settings import Sampling
from tests.conftest import edit_json, edit_tensors, randomize_trained

LOGITS = 2e-6


def load(directory):
    """The model of an adapter's directory, with the adapter added to its weights."""
    return load_pretrained(open_checkpoint(*find_files(directory)))


SUBSETS = {
    "all": {"target_modules": "all-linear", "r": 3, "lora_alpha": 7},
    "attention": {"target_modules": ["q_proj", "v_proj"], "r": 4},
    "one part of the MLP": {"target_modules": ["up_proj"], "lora_dropout": 0.1},
    "rank-stabilized, a pattern": {"target_modules": r".*\.1\..*(k|o|down)_proj", "use_rslora": True, "r": 5},
    "some layers": {"target_modules": ["gate_proj", "o_proj"], "layers_to_transform": [0, 2]},
    "the first layer": {"target_modules": ["up_proj"], "layers_to_transform": 0},
    "gaussian, the head too": {"target_modules": ["lm_head", "q_proj"], "init_lora_weights": "gaussian"},
}


@torch.no_grad()
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("options", SUBSETS.values(), ids=SUBSETS.keys())
def test_adapters_of_peft_have_equal_logits_here(saved, tokens, relative, tmp_path, options, norm):
    """Of a model of transformers, opened from our directory, with an adapter of PEFT whose matrices are all random."""
    peft = pytest.importorskip("peft")
    tied = "lm_head" not in options["target_modules"]
    base = transformers.AutoModelForCausalLM.from_pretrained(saved(norm=norm, tie_word_embeddings=tied))
    model = randomize_trained(peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options)))
    model.save_pretrained(tmp_path / "adapter")
    expected = model(tokens).logits
    with model.disable_adapter():
        assert relative(model(tokens).logits, expected) > 0.01
    assert relative(load(tmp_path / "adapter")(tokens), expected) <= LOGITS


@torch.no_grad()
def test_samples_of_a_model_in_training_have_its_adapter(make_lora, tokens):
    """The faster decoding steps read the weights alone, and would continue the text as the base does."""
    decoder, ids = make_lora(), tokens[0, :5].tolist()
    sampled = [token.id for token in generate(decoder, [ids], max_new_tokens=12, sampling=Sampling(temperature=0))]
    for _ in range(12):
        ids.append(decoder(torch.tensor([ids]))[0, -1].argmax().item())
    assert ids[5:] == sampled


@torch.no_grad()
def test_a_merged_matrix_is_computed_in_float32_and_rounded_once(make_lora, tmp_path, make_decoder):
    decoder = make_lora()
    save_pretrained(decoder, tmp_path / "adapter")
    save_pretrained(make_decoder().bfloat16(), tmp_path / "model")
    merged, base = load(tmp_path / "adapter"), load_pretrained(tmp_path / "model")
    for layer, plain, adapted in zip(merged.layers, base.layers, decoder.layers, strict=True):
        a, b = (m.weight.double() for m in (adapted.mlp.down_proj.lora_A, adapted.mlp.down_proj.lora_B))
        exact = plain.mlp.down_proj.weight.double() + 7 / 4 * (b @ a)
        rounded = layer.mlp.down_proj.weight
        assert rounded.dtype == torch.bfloat16
        assert ((rounded.double() - exact).abs() <= exact.abs() * (2**-8 + 1e-5) + 1e-6).all()


OTHER = {"mlp": "gelu", "attention_bias": True, "tie_word_embeddings": False}


@pytest.fixture
def adapter(make_lora, tmp_path):
    save_pretrained(make_lora(**OTHER), tmp_path / "adapter")
    return tmp_path / "adapter"


def edit(adapter, change=None, **fields):
    """Change the fields and the tensors of an adapter in place."""
    edit_json(adapter / "adapter_config.json", **fields)
    edit_tensors(adapter / "adapter_model.safetensors", change or dict)


HEAD, Q = "base_model.model.lm_head.base_layer.weight", "base_model.model.model.layers.1.self_attn.q_proj.lora_"
REFUSED = [
    ({"use_dora": True}, None, "use_dora True is not supported"),
    ({"init_lora_weights": "pissa"}, None, "init_lora_weights 'pissa' is not supported"),
    ({"peft_type": "IA3"}, None, "peft_type 'IA3' is not supported"),
    ({"r": 8}, None, "sizes .* and r is 8"),
    ({"r": 0}, None, "r 0 "),
    ({"lora_alpha": math.nan}, None, "lora_alpha nan"),
    ({"lora_alpha": "8"}, None, "lora_alpha '8'"),
    ({}, lambda t: t.pop(f"{Q}A.weight"), f"no '{Q}A"),
    ({}, lambda t: t.update({f"{Q}A.weight": torch.ones(4, 1)}), r"sizes \[4, 1\]"),
    ({}, lambda t: t.update({HEAD: torch.ones(97, 48)}), "lm_head.base_layer.weight is not supported"),
]


@pytest.mark.parametrize(("fields", "change", "reason"), REFUSED)
def test_what_is_more_than_a_and_b_or_does_not_agree_is_refused(adapter, make_lora, fields, change, reason):
    edit(adapter, change, **fields)
    with pytest.raises(UserError, match=rf"adapter cannot be read \(.*{reason}.*; give a plain LoRA"):
        load(adapter)
    if Q in reason:  # and the run that wrote them is not resumed
        with pytest.raises(UserError, match="the run cannot be resumed"):
            load_weights(make_lora(**OTHER), adapter)


def test_an_adapter_of_another_model_is_refused_and_one_with_other_weights_is_noted(adapter, make_lora, capsys):
    make_lora(**OTHER)
    model = adapter.parent / "model"
    capsys.readouterr()
    for base, notes in ((model, 0), (shutil.copytree(model, model.with_name("other")), 1)):
        assert find_files(base, str(adapter)) == (base, adapter)
        assert capsys.readouterr().err.count(f"was trained on {model}, ") == notes
    assert str(find_files(model, str(adapter))) == f"{model} with the adapter {adapter}"
    load(adapter)
    assert "train it again" not in capsys.readouterr().err
    edit_tensors(model / "model.safetensors", lambda tensors: tensors["model.norm.weight"].add_(1))
    load(adapter)
    assert f"the weights are not those that {adapter} was trained for" in capsys.readouterr().err
    for other, reason in ({"num_hidden_layers": 2}, r"no 'model\.layers\.2\."), ({"intermediate_size": 96}, "size"):
        make_lora(**OTHER | other)
        with pytest.raises(UserError, match=rf"adapter cannot be read .*{reason}"):
            load(adapter)


@torch.no_grad()
def test_with_config_json_or_a_copy_of_the_head_it_stays_an_adapter(adapter, make_lora, tokens, relative):
    model, expected = adapter.parent / "model", make_lora(**OTHER)(tokens)
    head = load_file(model / "model.safetensors")["lm_head.weight"]
    edit(adapter, lambda t: t.update({HEAD: head.bfloat16()}))  # as of a model that PEFT opened in bfloat16
    for file in ("config.json", "model.safetensors"):  # the last: a model with its adapter
        shutil.copy(model / file, adapter)
        assert find_files(adapter) == (adapter if file == "model.safetensors" else model, find_checkpoint(adapter))
        assert relative(load(adapter)(tokens), expected) <= 1e-6 < relative(load_pretrained(model)(tokens), expected)
        for command in (load_config, open_checkpoint, load_pretrained):
            with pytest.raises(UserError, match=r"is an adapter; .*: python generate.py '.*adapter' --merge NEW"):
                command(adapter)


def test_the_model_of_an_adapter_is_found_from_any_folder(adapter, make_lora, monkeypatch, tmp_path):
    make_lora(**OTHER)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for base in ("model", f"/gone/{tmp_path.name}/model"):  # as saved in the folder of both; both were moved
        edit(adapter, base_model_name_or_path=base)
        assert find_files(adapter)[0].samefile(adapter.parent / "model")
    with pytest.raises(UserError, match="is an adapter; leave out --adapter"):
        find_files(adapter, str(adapter))


@pytest.mark.parametrize("base", [None, "", ["a"], "a\0b"])
def test_an_adapter_that_names_no_model_says_what_to_give(adapter, base):
    edit(adapter, base_model_name_or_path=base)
    with pytest.raises(UserError, match=r"Give the model itself: python generate.py MODEL --adapter .*adapter"):
        find_files(adapter)
