"""Our checkpoints opened by transformers, and theirs opened by us: equal logits in float32.

Tolerance: two orders of the same float32 sums through three layers, relative L2 of at most 2e-6.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from checkpoints.pretrained import load_config, load_pretrained, save_pretrained
from model.cache import KeyValueCache
from model.config import NORMS, PLACEMENTS
from model.decoder import Decoder
from tests.conftest import SHAPE

LOGITS = 2e-6
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.2}
YARN |= {"beta_fast": 4, "beta_slow": 0.5, "truncate": False}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
ALL_BIASES = {"attention_bias": True, "attention_output_bias": True}
WRITTEN = {
    "rms": ("LlamaForCausalLM", {}),
    "rms with qkv bias": ("LlamaForCausalLM", {"attention_bias": True}),
    "rms with all biases": ("LlamaForCausalLM", ALL_BIASES),
    "rms with wide heads": ("LlamaForCausalLM", {"head_dim": 20}),
    "qk norm": ("Qwen3ForCausalLM", {"qk_norm": True}),
    "qk norm with qkv bias": ("Qwen3ForCausalLM", {"qk_norm": True, "attention_bias": True}),
    "qk norm with all biases": ("Qwen3ForCausalLM", {"qk_norm": True, **ALL_BIASES}),
    "qk norm with odd heads": ("Qwen3ForCausalLM", {"qk_norm": True, "hidden_size": 50, "head_dim": 6}),
    "rms with linear rope": ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "rms with llama3 rope": ("LlamaForCausalLM", {"rope_scaling": LLAMA3, "rope_theta": 100.0}),  # three bands
    "rms with yarn": ("LlamaForCausalLM", {"rope_scaling": YARN}),
    "qk norm with yarn": ("Qwen3ForCausalLM", {"rope_scaling": YARN, "qk_norm": True, "rope_theta": 500.0}),
    "layer with yarn": ("StableLmForCausalLM", {"rope_scaling": YARN | {"truncate": True}, "norm": "layer"}),
    "layer": ("StableLmForCausalLM", {"norm": "layer", "norm_eps": 1e-3}),
    "layer without bias": ("StableLmForCausalLM", {"norm": "layer", "norm_bias": False}),
    "layer with qkv bias": ("StableLmForCausalLM", {"norm": "layer", "attention_bias": True, "rope_theta": 500.0}),
    # No family of transformers computes these, so it refuses them.
    "layer with qk norm": (None, {"norm": "layer", "qk_norm": True}),
    "layer with wide heads": (None, {"norm": "layer", "head_dim": 20}),
    "rms with heads that do not divide": (None, {"hidden_size": 50, "head_dim": 6}),
    "rms with bias": (None, {"norm_bias": True}),
    "rms with the bias of o_proj alone": (None, {"attention_output_bias": True}),
    "layer with all biases": (None, {"norm": "layer", **ALL_BIASES}),
    "offset with bias": (None, {"norm": "offset", "norm_bias": True}),
    **{norm: (None, {"norm": norm}) for norm in NORMS if norm not in ("rms", "layer")},
    **{place: (None, {"norm_placement": place}) for place in PLACEMENTS if place != "pre"},
}


@pytest.fixture
def load_with_transformers(caplog):
    """The model that transformers loads from a directory, using every tensor and missing none, without a warning."""

    def load(directory):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        assert not any(report.values()), report
        assert [record.message for record in caplog.records if record.levelname != "INFO"] == []
        return model.eval()

    transformers.utils.logging.enable_propagation()
    yield load
    transformers.utils.logging.disable_propagation()


@torch.no_grad()
@pytest.mark.parametrize(("tied", "name"), [(i % 2 == 0, name) for i, name in enumerate(WRITTEN)])
def test_a_saved_model_has_equal_logits_in_transformers_and_is_read_back_bit_equal(
    make_decoder, tokens, relative, tmp_path, load_with_transformers, tied, name
):
    architecture, changes = WRITTEN[name]
    decoder = make_decoder(tie_word_embeddings=tied, **changes).eval()
    ids = (3, 4) if tied else (None, None)
    save_pretrained(decoder, tmp_path, bos_token_id=ids[0], eos_token_id=ids[1])
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    if architecture is None:
        with pytest.raises(ValueError, match="prenorm"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    else:
        model = load_with_transformers(tmp_path)
        assert type(model).__name__ == architecture
        for config in (model.config, model.generation_config):
            assert (config.bos_token_id, config.eos_token_id) == ids
        assert relative(decoder(tokens), model(tokens).logits) <= LOGITS
    again = load_pretrained(tmp_path).eval()
    assert again.config == decoder.config
    assert again.state_dict().keys() == decoder.state_dict().keys()
    assert all(torch.equal(tensor, decoder.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert torch.equal(again(tokens), decoder(tokens))


CONTEXT = 80  # short enough for frequencies rounded to float32
ROPES = {  # their original contexts are short enough for every branch to matter
    "default": {"rope_theta": 400.0},
    "linear": {"rope_theta": 400.0, "factor": 2.5},
    "yarn": {"rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 25, "beta_fast": 5.0},
    "llama3": LLAMA3 | {"rope_theta": 1e4, "original_max_position_embeddings": 20},
}
STABLE = {"partial_rotary_factor": 1.0}
FOREIGN = {
    "llama": ("Llama", "default", {}),
    "llama, all biases": ("Llama", "yarn", {"attention_bias": True}),
    "llama, own head_dim": ("Llama", "llama3", {"head_dim": 20}),
    "qwen2": ("Qwen2", "linear", {}),
    "qwen2, windows": ("Qwen2", "default", {"use_sliding_window": True, "sliding_window": 60, "max_window_layers": 2}),
    "qwen3": ("Qwen3", "yarn", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 60}),
    "qwen3, all biases": ("Qwen3", "linear", {"head_dim": 12, "attention_bias": True}),
    "mistral": ("Mistral", "llama3", {"sliding_window": None, "head_dim": 12}),
    "mistral, window": ("Mistral", "yarn", {"sliding_window": 60}),
    "stablelm": ("StableLm", "default", STABLE),
    "stablelm, biases": ("StableLm", "default", STABLE | {"use_qkv_bias": True, "layer_norm_eps": 1e-3}),
}


def foreign(family: str, rope: str, changes: dict) -> torch.nn.Module:
    """A random model of transformers, with norm weights and biases away from their initial values."""
    rope_parameters = {"rope_type": rope, **ROPES[rope]}
    fields = {**SHAPE, "max_position_embeddings": CONTEXT, "rope_parameters": rope_parameters, **changes}
    config = getattr(transformers, f"{family}Config")(**fields)
    config.eos_token_id = config.pad_token_id = None
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(8)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data = drawn * (0.3 if parameter.ndim == 1 else 0.12) + (0.6 if parameter.ndim == 1 else 0.01)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize(("tied", "name"), [(i % 2 == 0, name) for i, name in enumerate(FOREIGN)])
def test_a_model_saved_by_transformers_has_equal_logits_here(relative, tmp_path, tied, name):
    """In one file, in several, saved by us, with a config.json as of transformers 4, and token by token when padded."""
    family, rope, changes = FOREIGN[name]
    model = foreign(family, rope, {"tie_word_embeddings": tied, **changes})
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 3
    decoder = load_pretrained(tmp_path / "one")
    save_pretrained(decoder, tmp_path / "ours")
    path = tmp_path / "one" / "config.json"
    fields = json.loads(path.read_text())
    old_rope = fields.pop("rope_parameters")
    fields |= {"rope_theta": old_rope.pop("rope_theta"), "rope_scaling": old_rope, "torch_dtype": fields.pop("dtype")}
    path.write_text(json.dumps(fields))
    tokens = torch.arange(2 * decoder.config.max_position_embeddings).view(2, -1) * 37 % 97
    expected = model(tokens).logits
    assert relative(decoder(tokens), expected) <= LOGITS
    for folder in ("sharded", "ours", "one"):
        again = load_pretrained(tmp_path / folder)
        assert again.config == decoder.config and relative(again(tokens), expected) <= LOGITS

    prompt, padding, steps = tokens.flatten()[:120].view(3, 40), torch.tensor([0, 17, 37]), 12
    options = dict(do_sample=False, max_new_tokens=steps, output_logits=True, return_dict_in_generate=True)
    mask = torch.arange(40) >= padding[:, None]
    generated = model.generate(prompt, attention_mask=mask.long(), **options)
    cache = KeyValueCache(decoder.config, 3, 40 + steps)
    logits, last = [], prompt
    for _ in range(steps):
        logits.append(decoder(last, cache=cache, padding=padding, last_only=True)[:, 0])
        last = logits[-1].argmax(-1, keepdim=True)
    assert torch.equal(torch.stack(logits, 1).argmax(-1), generated.sequences[:, 40:])
    assert relative(torch.stack(logits, 1), torch.stack(generated.logits, 1)) <= LOGITS


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"norm": "layer"}, {"norm": "layer", "norm_bias": False}])
def test_a_model_trained_further_by_transformers_has_equal_logits_here(
    make_config, tokens, relative, tmp_path, load_with_transformers, changes
):
    config = make_config(attention_bias=True, tie_word_embeddings=False, **changes)
    save_pretrained(Decoder(config, seed=1), tmp_path / "ours")
    assert load_config(tmp_path / "ours") == config
    model = load_with_transformers(tmp_path / "ours")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "theirs")
    decoder = load_pretrained(tmp_path / "theirs")
    assert relative(decoder(tokens), model(tokens).logits) <= LOGITS
    assert decoder.config.attention_output_bias == (config.norm == "rms")
    assert decoder.config.has_norm_bias == (config.norm == "layer")
