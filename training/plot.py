"""Loss curves of runs: `python -m training.plot runs/tiny-rms runs/tiny-layer --out norms.png` draws two into one."""

import glob
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from errors import UserError, note, printable, run_main
from files import read_json, replacing
from training import metrics

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # told apart without colour vision: Okabe and Ito 2008
MUTED = "0.45"
DASHES = ("-", "--", "-.", ":")
CHINESE = ("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "Microsoft YaHei", "SimHei", "PingFang SC")
SMOOTHED = 20  # steps whose mean is a point of the training loss, but at most a tenth of all


def use_chinese_fonts(*texts: str) -> None:
    """Draw Chinese in a font of this machine; where there is none, as boxes, and with a note if texts have some."""
    from matplotlib import font_manager, rcParams

    fonts = [font for font in CHINESE if font in font_manager.get_font_names()]
    rcParams["font.family"] = ["DejaVu Sans", *fonts]
    if not fonts and max("".join(texts), default="") >= "\u2e80":
        note("no font for Chinese is installed, so pictures have boxes (Debian, Ubuntu: apt install fonts-noto-cjk)")
    warnings.filterwarnings("ignore", "Glyph .* missing from font")


def panels(height: float, rows: int = 1, width: float = 5.4, texts: Iterable[str] = ()) -> tuple[Any, list[Any]]:
    """A figure of this size in inches, by default to be read on a phone, and its axes, one below the other."""
    from matplotlib.figure import Figure  # takes half a second to import: only when something is drawn

    use_chinese_fonts(*texts)
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")  # by default 594 pixels wide
    every = [*figure.subplots(rows, sharex=True, squeeze=False).flat]
    for axes in every:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    return figure, every


def draw(runs: Sequence[Path], path: Path) -> None:
    figure, [axes] = panels(4.5, width=8, texts=map(str, runs))
    for i, run in enumerate(runs):
        style = {"color": COLOURS[i % 4], "linestyle": DASHES[i % 4]}
        lines = metrics.read(run)
        training = [line for line in lines if isinstance(line.get("loss"), float)]
        if training:
            size = max(1, min(SMOOTHED, len(training) // 10))
            means = np.convolve([line["loss"] for line in training], np.full(size, 1 / size), "valid")
            steps = [line["step"] for line in training[size - 1 :]]
            axes.plot(steps, means, alpha=0.45, linewidth=1, **style)
        evaluations = [line for line in lines if "validation_loss" in line]
        if evaluations:
            losses = metrics.validation_losses(run)
            last = evaluations[-1]
            label = f"run {run.name}: {last['step']:,} steps, {last['validation_loss']:.3f} nats per token"
            if "bits_per_byte" in last:  # not of conversations
                label += f", {last['bits_per_byte']:.3f} bits per byte"
            axes.plot([*losses], [*losses.values()], marker="o", markersize=4, label=label, **style)
            axes.legend(title="thin: training, smoothed     dots: validation")
    # On a linear axis the steep first steps would press the rest of the curve into a flat line.
    axes.set(yscale="log", xlabel="step", ylabel="loss (nats per token)")
    low, high = axes.get_ylim()
    axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}" if high < 100 * low else "")  # labels need room
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:])


def main(runs: tyro.conf.Positional[tuple[Path, ...]], out: Path | None = None) -> None:
    """Draw the losses of runs into a picture, PNG, SVG or PDF; --out is needed unless it is loss.png of one run."""
    if not runs:
        raise UserError("no run is given; give folders of runs, such as runs/tiny-rms.")
    runs = [Path(path) for run in runs for path in sorted(glob.glob(str(run))) or [run]]
    if len(runs) > 1 and out is None:
        raise UserError("several runs need --out, such as --out losses.png; give it, or one run.")
    for run in runs:
        if not (run / metrics.NAME).is_file():
            raise UserError(f"{run} has no {metrics.NAME}; give the folder of a run, such as runs/tiny-rms.")
    if len({read_json(run / "last" / "state.json").get("text_hash") for run in runs} - {None}) > 1:
        note("the runs have different texts, whose losses cannot be compared")
    path = out or runs[0] / "loss.png"
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--out {path} must end in .png, .svg or .pdf.")
    draw(runs, path)
    print(printable(f"written: {path}"))


if __name__ == "__main__":
    run_main("training.plot")
