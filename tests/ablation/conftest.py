"""Results of a made-up comparison, with everything that can go wrong in it, and its page."""

import math
import random
import re
import xml.etree.ElementTree as xml

import pytest

from ablation import report

ARMS = ("rms", "layer", "center", "prms", "l2", "group", "batch", "none")
WORSE = {
    "rms": -0.0012,
    "layer": 0,
    "center": 0.031,
    "prms": 0.002,
    "l2": 0.05,
    "group": 0.004,
    "batch": 0.9,
    "none": 0.4,
}
RATES = [0.0005, 0.001, 0.002, 0.004]


def a_run(arm: str, purpose: str, seed: int, rate: float, diverged: bool) -> dict:
    noise = random.Random(f"{arm} {seed} {rate}")
    level = 3.2 + WORSE[arm] + 0.05 * abs(math.log2(rate / 0.002))
    loss = None if diverged else level + noise.gauss(0, 0.004)
    steps = range(1, 230 if diverged else 400, 7)
    fall = [[s, level + 5.1 * math.exp(-s / 60) + noise.gauss(0, 0.02)] for s in steps]
    depths = range(9)
    probes = {
        "mean_over_deviation": [noise.gauss(0.05, 0.03) * (d + 1) for d in depths],
        "cosine_with_ones": [noise.gauss(0.02, 0.03) for d in depths],
        "gradient_norm": [[s, 0.4 + 6 * math.exp(-s / 50) + noise.random() / 20] for s in steps],
        "largest_activation": 12.3 + noise.random(),
        "update_share": [[s, 0.002 * math.exp(-s / 200)] for s in steps],
    }
    return {
        **{"arm": arm, "purpose": purpose, "seed": seed, "learning_rate": rate},
        **{"status": "diverged" if diverged else "done", "validation_loss": loss},
        **{"bits_per_byte": loss and loss * 0.4156, "spikes": seed % 2, "seconds": 21.3 + seed, "curve": fall},
        **{"validation": [[s, level + 5.1 * math.exp(-s / 60)] for s in range(50, 400, 50)], "probes": probes},
    }


def make_results() -> dict:
    runs = [a_run(arm, "rate", 99, rate, arm in ("none", "l2") and rate > 0.002) for arm in ARMS for rate in RATES]
    runs += [a_run(arm, "final", s, 0.002, arm == "none" and s > 3) for arm in ARMS for s in range(1, 6)]
    arms, comparisons = [], []
    for i, arm in enumerate(ARMS):
        mean, n = 3.2 + WORSE[arm], 3 if arm == "none" else 5
        arms.append(
            {
                **{"arm": arm, "learning_rate": 0.002, "n": n, "of": 5, "mean": mean, "bits_per_byte": mean * 0.4156},
                **{"interval": [mean - 0.0051, mean + 0.0051] if n == 5 else None},
                **{"parameters": 1234567 + i, "norm_parameters": 1152},
            }
        )
        if arm == "layer":
            continue
        half, small = 0.0031 + 0.0007 * i, abs(WORSE[arm]) < 0.003
        verdict = "equivalent" if small else "not resolved, needs 12 seeds" if arm == "group" else "higher"
        comparisons.append(
            {
                **{"arm": arm, "baseline": "layer", "n": n, "mean": WORSE[arm], "verdict": verdict},
                **{"interval": [WORSE[arm] - half, WORSE[arm] + half] if n == 5 else None},
                **{"interval_90": [WORSE[arm] - 0.8 * half, WORSE[arm] + 0.8 * half] if n == 5 else None},
                **{"standard_deviation": 0.0025, "correlation": 0.971, "p_value": 0.4, "p_holm": 0.0002},
                **{"resolvable": 0.0042, "seeds_needed": 3},
                **{"bits_per_byte": {"mean": WORSE[arm] * 0.41, "interval": [-0.0021, 0.0009] if n == 5 else None}},
            }
        )
    builds, parts = ("eager", "torch.compile"), ("norm forward", "norm backward", "forward", "backward", "step")
    return {
        **{"name": "norms", "command": "python ablate.py --config configs/ablation.toml --seeds 5", "bound": 0.01},
        **{"metric": "validation loss, nats per token", "baseline": "layer", "hours": 0.71},
        "machine": {
            **{"device": "cpu", "processor": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "threads": 2},
            **{"torch": "2.13.0+cpu", "python": "3.11.2", "system": "Linux 6.1", "kernels": "composed"},
            "dtype": "bfloat16",
        },
        "text": {"hash": "5c0c21f7", "bytes": 8504019, "validation_tokens": 124358, "validation_bytes": 431402},
        "shape": {"parameters": 1234567, "layers": 4, "hidden_size": 128, "steps": 400, "tokens": 819200},
        **{"runs": runs, "arms": arms, "comparisons": comparisons},
        "valleys": [
            {
                **{"arm": arm, "rates": RATES, "best": 0.002, "at_edge": arm == "group"},
                "losses": [r["validation_loss"] for r in runs if r["arm"] == arm and r["purpose"] == "rate"],
            }
            for arm in ARMS
        ],
        "speed": [
            {
                **{"build": build, "part": part, "rms": 0.0213 * (i + 1), "layer": 0.0215 * (i + 1), "n": 20},
                **{"ratio": 0.99 + 0.01 * i * j, "interval": [0.98 + 0.01 * i * j, 1.0021 + 0.01 * i * j]},
            }
            for j, build in enumerate(builds)
            for i, part in enumerate(parts)
        ],
        "switched": [
            {
                **{"seed": seed, "before": 3.2, "variant": variant, "steps": steps},
                **{"status": "diverged" if loss is None else "done", "validation_loss": loss},
            }
            for variant, steps, losses in (
                ("rms at once", 0, (5.4, 5.0)),
                ("rms, norms trained", 50, (3.3, 3.2)),
                ("layer, all trained", 50, (3.1, None)),
            )
            for seed, loss in enumerate(losses, start=1)
        ],
        "demonstrations": {
            **{"rms_change_by_scale": 4.63e-6, "rms_cosine_with_input": 1.0, "rms_gradient_by_scale": 0.1},
            **{"layer_change_by_scale": 5.05e-6, "layer_cosine_with_input": 0.957248, "layer_gradient_by_scale": 0.1},
            **{"float16_error_with_upcast": 2.08e-4, "float16_rows_lost_without_upcast": 0.996},
        },
        "norm_share": {"rms": 0.0612, "layer": 0.0641},
        "memory": {"rms": 104857600, "layer": None},
        "claims": [
            {
                "id": "C1",
                "claim": "RMSNorm trains 7 to 15% faster than LayerNorm end to end",
                "verdict": "does not hold",
            }
            | {"measured": "ratio of step times 0.990 [0.980, 1.002]"},
            {"id": "C2", "claim": "RMSNorm and LayerNorm reach the same loss", "measured": "", "verdict": "holds"},
            {"id": "C10", "claim": "Pre-norm trains more stably than post-norm", "verdict": "not tested"},
        ],
        "notes": ["Nothing here says how a model of a thousand times the size behaves.", "One corpus, one shape."],
    }


@pytest.fixture(scope="module")
def results() -> dict:
    return make_results()


@pytest.fixture(scope="module")
def page(results) -> str:
    return report.html(results)


@pytest.fixture
def svgs():
    """The charts of a page, each parsed."""

    def found(page: str) -> list[xml.Element]:
        return [xml.fromstring(svg) for svg in re.findall("<svg.*?</svg>", page, re.DOTALL)]

    return found
