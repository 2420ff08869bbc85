"""`attention` against a loop over positions in float64 with keys and values repeated explicitly.

Tolerances: float32: 1e-6. In bfloat16 the output's rounding (1.66e-3), that of the probabilities (1.66e-3, averaged
over the keys) and on a CPU that of the scores (relative 1.66e-3 of scores of a few units): 5e-3; gradients 1e-2.
"""

import pytest
import torch

B, H, K, T, D = 2, 6, 2, 19, 64  # heads wide enough for the CPU's own path in bfloat16
DTYPES = pytest.mark.parametrize(("dtype", "out"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])


def definition(q, k, v):
    k, v = k.repeat_interleave(H // K, dim=1), v.repeat_interleave(H // K, dim=1)
    rows = []
    for t in range(q.shape[2]):
        scores = (q[:, :, t, None] * k[:, :, : t + 1]).sum(-1) / D**0.5  # (B, H, t + 1)
        rows.append((torch.softmax(scores, -1)[..., None] * v[:, :, : t + 1]).sum(2))
    return torch.stack(rows, dim=2)


@DTYPES
@pytest.mark.parametrize("lengths", [None, ((7, 12), (1, 18))], ids=["causal", "documents"])
def test_output_and_gradients_equal_the_float64_definition(kernel, draw, evaluate, relative, dtype, out, lengths):
    """Of each document as if it were alone, too."""
    inputs = [draw(B, T, heads, D).to(dtype).transpose(1, 2) for heads in (H, K, K)]
    upstream, mask = draw(B, H, T, D).to(dtype), None
    if lengths is not None:
        documents = torch.stack([torch.repeat_interleave(torch.arange(2), torch.tensor(row)) for row in lengths])
        mask = (documents[:, None, :, None] == documents[:, None, None, :]) & torch.ones(T, T, dtype=torch.bool).tril()

    def exact(*inputs):
        if lengths is None:
            return definition(*inputs)
        rows = []
        for i, row in enumerate(lengths):
            parts = zip(*(x[i : i + 1].split(row, 2) for x in inputs), strict=True)
            rows.append(torch.cat([definition(*part) for part in parts], 2))
        return torch.cat(rows)

    found = evaluate(lambda *inputs: kernel.attention(*inputs, mask), inputs, (upstream,))
    expected = evaluate(exact, [t.double() for t in inputs], (upstream.double(),))
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert relative(ours, theirs) < (out if i == 0 or dtype == torch.float32 else 1e-2)


@DTYPES
def test_a_query_sees_the_positions_of_its_mask_and_a_single_one_without_mask_all(kernel, draw, relative, dtype, out):
    k, v = (draw(B, K, T, D).to(dtype) for _ in range(2))
    for length, masks in ((5, B), (1, B), (1, None), (T, 1)):  # the last for all sequences
        q = draw(B, H, length, D).to(dtype)
        mask = draw(masks or 1, 1, length, T) > (0 if masks else -100)
        mask[..., 3] = True  # each query sees at least one position
        scores = q.double() @ k.double().repeat_interleave(H // K, dim=1).transpose(2, 3) / D**0.5
        p = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
        expected = p @ v.double().repeat_interleave(H // K, dim=1)
        assert relative(kernel.attention(q, k, v, mask if masks else None), expected) < out
