"""The loss curves of a run."""

from training import plot


def test_a_run_with_a_loss_that_is_not_finite_can_be_plotted(run, tmp_path):
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 41, "loss": "nan", "gradient_norm": "nan"}\n')
    plot.draw([run, run], tmp_path / "two.png")
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
