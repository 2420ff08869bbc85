"""Real trained weights: logits, greedy continuations and losses of the 260K TinyStories model.

The expected numbers come from another implementation and have five or six decimals. Tolerance: half a unit
of the last decimal plus float32 noise of logits of about 10 through five layers (2e-6 relative, 2e-5 absolute).
"""

import json

import pytest
import torch

from checkpoints.pretrained import load_pretrained

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
def test_logits_after_a_prompt_and_the_loss_of_its_greedy_continuation_are_as_expected(decoder, golden, prompt):
    expected = golden[prompt]
    logits = decoder(torch.tensor([expected["prompt_ids"]]))[0]
    assert logits.mean().item() == pytest.approx(expected["logits_mean"], abs=LOGIT)
    assert logits.std().item() == pytest.approx(expected["logits_std"], abs=LOGIT)
    first = torch.tensor(expected["last_prompt_logits_first8"])
    torch.testing.assert_close(logits[-1, :8], first, rtol=0, atol=LOGIT)
    values, ids = logits[-1].topk(5)
    assert ids.tolist() == [token for token, _ in expected["last_prompt_top5"]]
    highest = torch.tensor([value for _, value in expected["last_prompt_top5"]])
    torch.testing.assert_close(values, highest, rtol=0, atol=LOGIT)
    ids = torch.tensor([expected["greedy_ids"]])
    loss = decoder(ids[:, :-1], ids[:, 1:]).mean().item()
    assert loss == pytest.approx(expected["mean_nll_of_greedy_ids"], abs=LOSS)
