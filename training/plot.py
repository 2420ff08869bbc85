"""Loss curves of one or more runs: training loss, validation loss, and the final bits per byte in the legend.

`python -m training.plot runs/tiny-rms runs/tiny-layer --out norms.png` draws several runs into one plot.
"""

import argparse
from pathlib import Path

from errors import UserError, exit_on_user_error, printable
from files import replacing
from training import metrics

# Distinguishable without colour vision (Okabe and Ito 2008); the line style differs as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
DASHES = ("-", "--", "-.", ":")


def draw(runs: list[Path], path: Path) -> None:
    """Draw the loss curves of `runs` into the PNG or SVG file `path`."""
    from matplotlib.figure import Figure  # takes half a second to import: only when something is drawn

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for i, run in enumerate(runs):
        lines = metrics.read(run)
        training = [(line["step"], line["loss"]) for line in lines if isinstance(line.get("loss"), float)]
        evaluations = [line for line in lines if "validation_loss" in line]
        validation = [(line["step"], line["validation_loss"]) for line in evaluations]
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)]
        if training:
            axes.plot(*zip(*smooth(training), strict=True), color=colour, alpha=0.45, linewidth=1, linestyle=dash)
        if validation:
            (step, loss), bits = validation[-1], evaluations[-1].get("bits_per_byte")
            label = f"{run.name}: {step:,} steps, {loss:.3f} nats per token"
            label += "" if bits is None else f", {bits:.3f} bits per byte"
            axes.plot(*zip(*validation, strict=True), "o", color=colour, linestyle=dash, markersize=4, label=label)
    # On a linear axis the steep first steps would press the rest of the curve into a flat line.
    axes.set(yscale="log", xlabel="step", ylabel="loss (nats per token)")
    axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, title="thin: training, smoothed     dots: validation")
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:])


def smooth(points: list[tuple[int, float]], keep: float = 0.95) -> list[tuple[int, float]]:
    """Exponential moving average with bias correction (Kingma and Ba 2015, section 3)."""
    average, weight, out = 0.0, 0.0, []
    for step, value in points:
        average = keep * average + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        out.append((step, average / weight))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.plot", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder, such as runs/tiny-rms")
    parser.add_argument("--out", type=Path, default="loss.png", help="the picture to write, PNG or SVG (loss.png)")
    arguments = parser.parse_args()
    for run in arguments.runs:
        if not (run / "metrics.jsonl").is_file():
            raise UserError(f"{run} has no metrics.jsonl; give the folder of a run, such as runs/tiny-rms.")
    if arguments.out.suffix not in (".png", ".svg"):
        raise UserError(f"--out {arguments.out} must end in .png or .svg.")
    draw(arguments.runs, arguments.out)
    print(printable(f"written: {arguments.out}"))


if __name__ == "__main__":
    with exit_on_user_error():
        main()
