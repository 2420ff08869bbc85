"""How the residual stream of a run with RMSNorm grows from block to block, with and without the norm's division:
`python -m studies.stream runs/tiny-rms --out docs/stream.png`, on 4,096 tokens of the source of Python's argparse."""

import argparse
import inspect
from pathlib import Path

import torch
import tyro

from ablation.plots import COLOURS, panels
from checkpoints.find import find_checkpoint
from checkpoints.pretrained import load_pretrained
from data.tokenizer import load_tokenizer
from errors import exit_on_user_error
from kernels import reference
from model.decoder import Decoder
from model.norm import Norm


@torch.no_grad()
def sizes(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Root mean squares over the channels, of what each norm reads and of that after its division: (norms, 2, N)."""
    streams = []
    for norm in filter(lambda module: isinstance(module, Norm), model.modules()):
        norm.register_forward_hook(lambda norm, _, outputs: streams.append(outputs[1]))
    model(tokens)
    pairs = [(s, reference.normalize(s, kind="rms", eps=model.config.norm_eps)[0]) for s in streams]
    return torch.stack([torch.stack(pair).square().mean(-1).sqrt().flatten(1) for pair in pairs])


def main(run: tyro.conf.Positional[Path], out: Path = Path("docs/stream.png")) -> None:
    """Draw the medians over the tokens of a run, with bands of 5% to 95% of the tokens, and print the medians."""
    directory = find_checkpoint(run)
    model = load_pretrained(directory, device=torch.device("cpu"), compute_dtype=torch.float32)
    tokens = load_tokenizer(directory).encode(inspect.getsource(argparse))[:4096]
    of_norms = sizes(model, torch.tensor(tokens).view(8, 512))
    blocks = [f"+ {block}\n{layer + 1}" for layer in range(len(of_norms) // 2) for block in ("attention", "MLP")]
    figure, [axes] = panels(3.4)
    for i, name in enumerate(("the residual stream itself", "divided by the norm")):
        low, median, high = of_norms[:, i].quantile(torch.tensor([0.05, 0.5, 0.95]), -1)
        print(name, *(f"{value:.3f}" for value in median))
        axes.fill_between(["embedding", *blocks], low, high, color=COLOURS[i], alpha=0.25, linewidth=0)
        axes.plot(median, "os"[i] + "-", color=COLOURS[i], label=name)
    axes.set(title="How large is what a block would read?", ylim=(0, 1.15), ylabel="root mean square over channels")
    figure.legend(loc="outside lower center", frameon=False, fontsize=10, ncols=2)
    figure.savefig(out)


if __name__ == "__main__":
    with exit_on_user_error():
        tyro.cli(main, prog="python -m studies.stream")
