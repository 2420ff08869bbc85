"""LoRA against PEFT, and what learns, what is stored and in which dtype.

The base and the adapter are written here and opened by PEFT. Tolerance of logits: 2e-6, as against transformers.
"""

import math

import pytest
import torch
from torch.nn import functional as F

from checkpoints.pretrained import save_pretrained, unpacked_tensors
from model.config import GATED
from model.count import adapter_parameters
from model.lora import add_lora

LOGITS = 2e-6


def learning(decoder) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in decoder.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    "changes", [{}, {"norm": "layer"}, {"attention_bias": True, "tie_word_embeddings": False}, {"qk_norm": True}]
)
def test_logits_and_gradients_equal_those_of_peft_on_the_same_base(make_lora, tokens, relative, tmp_path, changes):
    """Tolerance of gradients: three times PEFT's own error against float64, plus that of the logits."""
    peft = pytest.importorskip("peft")
    decoder = make_lora(**changes)
    save_pretrained(decoder, tmp_path / "adapter")
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", is_trainable=True)
    assert relative(decoder(tokens), theirs(tokens).logits) <= LOGITS

    weights = torch.randn(tokens.numel(), generator=torch.Generator().manual_seed(4)) + 0.5
    (decoder(tokens, tokens.roll(-1, 1)).flatten() * weights).sum().backward()
    ours = unpacked_tensors({name: p.grad for name, p in learning(decoder).items()}, decoder.config)
    ours = {f"base_model.model.{name}": gradient for name, gradient in ours.items()}

    def gradients() -> dict[str, torch.Tensor]:
        theirs.zero_grad()
        losses = F.cross_entropy(theirs(tokens).logits.flatten(0, 1), tokens.roll(-1, 1).flatten(), reduction="none")
        (losses * weights).sum().backward()
        parameters = theirs.named_parameters()
        return {name.replace(".default", ""): p.grad.clone() for name, p in parameters if p.requires_grad}

    single, double = gradients(), (theirs.double(), gradients())[1]
    assert ours.keys() == double.keys() and len(ours) == 2 * 7 * decoder.config.num_hidden_layers
    for name, expected in double.items():
        assert relative(ours[name], expected) <= 3 * relative(single[name], expected) + LOGITS, name


@pytest.mark.parametrize(
    "changes", [{"attention_bias": True, "attention_output_bias": True}, *({"mlp": mlp} for mlp in GATED)]
)
def test_a_new_adapter_changes_nothing_and_is_a_function_of_the_seed(make_decoder, tokens, relative, changes):
    fields = {"r": 4, "lora_alpha": 5, "base_model_name_or_path": ""}
    plain, first, other = make_decoder(**changes), *(add_lora(make_decoder(**changes), fields, seed=s) for s in (1, 2))
    assert relative(first(tokens), plain(tokens)) <= LOGITS
    assert sum(parameter.numel() for parameter in learning(first).values()) == adapter_parameters(first.config, rank=4)
    assert first.config.packed_matrices.keys() <= {name.split(".")[-3] for name in learning(first)}
    for name, parameter in learning(first).items():
        if ".lora_A." in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            assert 0.9 * bound < parameter.abs().max() <= bound and abs(parameter.mean()) < 0.2 * bound
            assert not torch.equal(parameter, learning(other)[name])
    again = learning(add_lora(make_decoder(**changes), fields, seed=1))
    assert all(torch.equal(parameter, again[name]) for name, parameter in learning(first).items())


def test_frozen_matrices_in_bfloat16_change_no_result_and_only_a_and_b_have_gradients(make_lora, tokens):
    decoder = make_lora(torch.bfloat16)
    copy = make_lora(torch.bfloat16)
    for name, parameter in copy.named_parameters():
        parameter.data = parameter.data.float()
        stored = decoder.get_parameter(name).dtype
        assert stored == (torch.float32 if ".lora_" in name or parameter.ndim < 2 else torch.bfloat16)
    for model in (decoder, copy):
        model(tokens, tokens.roll(-1, 1)).mean().backward()
    for name, parameter in decoder.named_parameters():
        assert (parameter.grad is None) == (".lora_" not in name)
        if parameter.grad is not None:
            assert parameter.grad.any() and torch.equal(parameter.grad, copy.get_parameter(name).grad), name
