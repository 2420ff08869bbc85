"""Real trained weights: logits, greedy continuations and losses of the 260K TinyStories model.

The expected numbers come from another implementation and have five or six decimals. Tolerance: half a unit
of the last decimal plus float32 noise of logits of about 10 through five layers (2e-6 relative, 2e-5 absolute).
"""

import json

import pytest
import torch
from torch.nn import functional as F

from checkpoints.inference import cast_weights, quantize_matrices
from checkpoints.pretrained import load_pretrained
from generation.cpu_step import CpuDecodeStep
from generation.generate import generate
from generation.settings import Sampling
from model.cache import KeyValueCache

LOGIT, LOSS = 3e-5, 3e-6


@pytest.fixture(scope="module")
def golden(shared):
    """The expected outputs."""
    return json.loads((shared / "stories260K" / "golden.json").read_text())


@pytest.fixture(scope="module")
def decoder(stories260k_directory):
    """The model, loaded from a checkpoint in Hugging Face's format."""
    return load_pretrained(stories260k_directory).eval()


@pytest.mark.parametrize("prompt", ["from_BOS", "from_prompt"])
@torch.no_grad()
def test_logits_after_a_prompt_are_as_expected(decoder, golden, prompt):
    known = golden[prompt]
    logits = decoder(torch.tensor([known["prompt_ids"]]))[0]
    assert logits.mean().item() == pytest.approx(known["logits_mean"], abs=LOGIT)
    assert logits.std().item() == pytest.approx(known["logits_std"], abs=LOGIT)
    expected = torch.tensor(known["last_prompt_logits_first8"])
    torch.testing.assert_close(logits[-1, :8], expected, rtol=0, atol=LOGIT)
    values, ids = logits[-1].topk(5)
    assert ids.tolist() == [token for token, _ in known["last_prompt_top5"]]
    expected = torch.tensor([value for _, value in known["last_prompt_top5"]])
    torch.testing.assert_close(values, expected, rtol=0, atol=LOGIT)


@pytest.mark.parametrize("prompt", ["from_BOS", "from_prompt"])
@torch.no_grad()
def test_the_loss_of_the_greedy_continuation_is_as_expected(decoder, golden, prompt):
    ids = torch.tensor([golden[prompt]["greedy_ids"]])
    loss = decoder(ids[:, :-1], ids[:, 1:]).mean().item()
    assert loss == pytest.approx(golden[prompt]["mean_nll_of_greedy_ids"], abs=LOSS)


@torch.inference_mode()
def test_the_cpu_step_in_bfloat16_and_int8_predicts_2000_tokens_as_well_as_in_float32(stories260k_directory):
    decoder = load_pretrained(stories260k_directory).eval()
    sampled = generate(
        decoder, [[1]] * 8, max_new_tokens=250, sampling=Sampling(temperature=1.0), sample_numbers=range(8)
    )
    tokens = torch.tensor([[1, *ids] for ids in sampled.tokens])  # (8, 251)

    def loss_by_steps() -> float:
        cache = KeyValueCache(decoder.config, 8, 251)
        step = CpuDecodeStep(decoder, cache)
        losses = [
            F.cross_entropy(step(now, None)[:, 0], following[:, 0])
            for now, following in zip(tokens[:, :-1].split(1, 1), tokens[:, 1:].split(1, 1), strict=True)
        ]
        return torch.stack(losses).mean().item()

    exact = loss_by_steps()
    assert exact == pytest.approx(decoder(tokens[:, :-1], tokens[:, 1:]).mean().item(), abs=LOSS)
    cast_weights(decoder, torch.bfloat16)
    bfloat16 = loss_by_steps()
    quantize_matrices(decoder)
    int8 = loss_by_steps()
    print(f"{exact:.4f} nats per token in float32, {bfloat16:.4f} in bfloat16, {int8:.4f} in int8")
    assert len({exact, bfloat16, int8}) == 3 and abs(bfloat16 - exact) < 5e-4 and abs(int8 - exact) < 0.01
