"""Draw what `model.inspect` measures on a text: `python -m studies.inside runs/tiny-rms "a text" --show kurtosis`.

Without a text it draws how the stream of a run with RMSNorm grows from block to block, with and without the
norm's division, on 4,096 tokens of the source of Python's argparse.
"""

if __name__ == "__main__":
    from errors import run_main

    run_main("studies.inside")

import argparse
from pathlib import Path
from typing import Literal

import torch
from matplotlib import rcParams
from matplotlib.figure import Figure
from tyro.conf import Positional

from checkpoints.find import find_checkpoint
from checkpoints.pretrained import load_pretrained
from data.tokenizer import load_tokenizer
from errors import UserError, printable
from model.inspect import Inspection, inspect
from training.plot import COLOURS, panels

LEGENDS = {
    "rms": "root mean square of what the norm reads",
    "mean_over_std": "|mean| / standard deviation (chance: {chance:.2g})",
    "kurtosis": "kurtosis over the channels (normal: 3)",
    "largest_share": "share of the largest channel in the sum of squares",
}


def growth(rms: torch.Tensor, eps: float) -> Figure:
    """Medians of (N, tokens) over the tokens, with bands of 5% to 95% of them, and of rms after the norm's division."""
    blocks = [f"+ {block}\n{layer + 1}" for layer in range(len(rms) // 2) for block in ("attention", "MLP")]
    figure, [axes] = panels(3.4)
    lines = {"the residual stream itself": rms, "divided by the norm": rms / (rms.square() + eps).sqrt()}
    for i, (name, values) in enumerate(lines.items()):
        low, median, high = values.quantile(torch.tensor([0.05, 0.5, 0.95]), -1)
        print(name, *(f"{value:.3f}" for value in median))
        axes.fill_between(["embedding", *blocks], low, high, color=COLOURS[i], alpha=0.25, linewidth=0)
        axes.plot(median, "os"[i] + "-", color=COLOURS[i], label=name)
    axes.set(title="How large is what a block would read?", ylim=(0, 1.15), ylabel="root mean square over channels")
    figure.legend(loc="outside lower center", frameon=False, fontsize=10, ncols=2)
    return figure


def grid(inside: Inspection, tokens: list[str], show: str) -> Figure:
    """A cell for each norm (upwards) and token, coloured on a logarithmic scale."""
    figure, [axes] = panels(1.6 + 0.22 * len(inside.norms), width=max(6, 3 + 0.16 * len(tokens)), texts=tokens)
    shown = getattr(inside, show)
    low, high = shown.quantile(torch.tensor([0.05, 1])).tolist()  # single values near 0 would take most of the scale
    image = axes.imshow(shown.numpy(), norm="log", vmin=low, vmax=high, origin="lower", aspect="auto")
    axes.grid(False)
    family = ["monospace", *rcParams["font.family"]]
    axes.set_xticks(range(len(tokens)), tokens, rotation=90, family=family, fontsize=7, parse_math=False)
    axes.set_yticks(range(len(inside.norms)), inside.norms)
    ticks = [low, (low * high) ** 0.5, high]
    label = LEGENDS[show].format(chance=inside.chance)
    figure.colorbar(image, location="bottom", extend="min", ticks=ticks, format="%.2g", label=label).minorticks_off()
    return figure


def main(
    run: Positional[Path], text: Positional[str] = "", show: Literal[*LEGENDS] = "rms", out: Path = Path("inside.png")
) -> None:
    """Draw what happens inside a run while it reads a text; without one, how the stream of a run with RMSNorm grows."""
    directory = find_checkpoint(run)
    decoder, tokenizer = load_pretrained(directory), load_tokenizer(directory)
    if text:
        ids = [tokenizer.document_start, *tokenizer.encode(text)]
        figure = grid(inspect(decoder, ids), [repr(tokenizer.decode([i], special=True))[1:-1] for i in ids], show)
    elif (decoder.config.norm, decoder.config.norm_placement) != ("rms", "pre"):
        raise UserError(f"{run} is no pre-norm model with RMSNorm; give a text, to draw what its norms read.")
    else:
        ids = tokenizer.encode(Path(argparse.__file__).read_text(encoding="utf-8"))[:4096]
        rms = [inspect(decoder, ids[start : start + 512]).rms for start in range(0, 4096, 512)]
        print("read: argparse.py, the beginning")
        figure = growth(torch.cat(rms, dim=1), decoder.config.norm_eps)
    figure.savefig(out)
    print(printable(f"written: {out}"))
