"""Random models of every family that can be read, against transformers: at once, and token by token in padded batches.

Tolerance: as in test_transformers.py; positions stay below 80, where frequencies rounded to float32 are exact enough.
"""

import pytest
import torch
import transformers

from checkpoints.pretrained import load_pretrained, save_pretrained
from model.cache import KeyValueCache

LOGITS = 2e-6
CONTEXT = 80
# Original contexts that are short enough for every branch to matter.
ROPES = {
    "default": {"rope_theta": 400.0},
    "linear": {"rope_theta": 400.0, "factor": 2.5},
    "yarn": {"rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 25, "beta_fast": 5.0},
    "llama3": {"rope_theta": 1e4, "factor": 6.0, "original_max_position_embeddings": 20}
    | {"low_freq_factor": 0.8, "high_freq_factor": 3.0},
}
MODELS = [  # each family, and each type of rotary positions with two of them
    ("Llama", "default", {"attention_bias": True}),
    ("Llama", "llama3", {}),
    ("Mistral", "llama3", {"sliding_window": None, "head_dim": 12}),
    ("Mistral", "yarn", {"sliding_window": 60}),
    ("Qwen2", "linear", {}),
    ("Qwen3", "yarn", {"head_dim": 16}),
    ("Qwen3", "linear", {"head_dim": 12, "use_sliding_window": True, "sliding_window": 60, "max_window_layers": 1}),
    ("StableLm", "default", {"use_qkv_bias": True, "partial_rotary_factor": 1.0}),
]


@torch.no_grad()
@pytest.mark.parametrize(("architecture", "rope", "changes"), MODELS)
def test_logits_at_once_and_of_greedy_decoding_in_a_padded_batch_equal_those_of_transformers(
    shape, relative, tmp_path, architecture, rope, changes
):
    torch.manual_seed(7)
    shape |= {"max_position_embeddings": CONTEXT, "rope_parameters": {"rope_type": rope, **ROPES[rope]}, **changes}
    config = getattr(transformers, f"{architecture}Config")(**shape)
    config.eos_token_id = config.pad_token_id = None
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape) * (0.3 if parameter.ndim == 1 else 0.12) + 0.02
        parameter.data += 0.8 if parameter.ndim == 1 else 0.0
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
    options = dict(do_sample=False, max_new_tokens=steps, output_logits=True, return_dict_in_generate=True)
    mask = torch.arange(40) >= padding[:, None]
    generated = model.generate(prompt, attention_mask=mask.long(), **options)
    cache = KeyValueCache(decoder.config, 3, 40 + steps)
    found, last = [], prompt
    for _ in range(steps):
        found.append(decoder(last, cache=cache, padding=padding, last_only=True)[:, 0])
        last = found[-1].argmax(-1, keepdim=True)
    assert torch.equal(torch.stack(found, 1).argmax(-1), generated.sequences[:, 40:])
    assert relative(torch.stack(found, 1), torch.stack(generated.logits, 1)) <= LOGITS
