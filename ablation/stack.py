"""Train all seeds of a comparison together on one GPU: their models are stacked by `torch.func.vmap`.

One model of this size leaves a GPU mostly idle. A stacked model has the initial weights and batches that `ablate.py`
gives to its seed, and differs by rounding alone. AdamW only: Muon would orthogonalize the matrices of all seeds as one.
"""

import dataclasses
import hashlib
import math
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import kernels
from ablation import report, study
from ablation.plan import Plan, Run, arm_settings, load_plan, replace_settings, run_settings, save_plan
from ablation.records import Row, append
from ablation.run import count_spikes, hardware, settings_hash, weights_hash
from errors import UserError, exit_on_user_error, printable
from files import locked
from training.evaluate import Evaluation
from training.schedule import learning_rate
from training.session import Session, initial_model, no_log, set_up
from training.settings import Settings

EAGER_STEPS = 3  # before the step is captured as a CUDA graph: most of its time would be the host's


class Stack:
    """One arm: a session, whose model is only the structure, and the weights of all seeds, (S, ...) each."""

    def __init__(self, session: Session, seeds: range, pool: tuple | None):
        self.session, self.pool, self.graph = session, pool, None
        model, device = session.model, session.device
        models = [initial_model(replace_settings(session.settings, {"seed": s}), session.dtype, no_log) for s in seeds]
        states = [dict(each.named_parameters()) for each in models]
        self.weights = {name: torch.stack([s[name].detach() for s in states]).to(device) for name in states[0]}
        names = {parameter: name for name, parameter in model.named_parameters()}
        for group in session.optimizer.param_groups:
            group["params"] = [self.weights[names[parameter]].requires_grad_() for parameter in group["params"]]
            group["lr"], group["capturable"] = torch.zeros((), device=device), device.type == "cuda"
        shape = (len(seeds), session.settings.data.batch_size, session.settings.data.sequence_length)
        self.batch = [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2)]

    def losses(self, tokens: Tensor, targets: Tensor, over_seeds: int | None = 0) -> Tensor:
        """The loss of each token, (S, B, T), of tokens that each seed has, (S, B, T), or all share, (B, T)."""

        def of_one(weights: dict[str, Tensor], *batch: Tensor) -> Tensor:
            return functional_call(self.session.model, weights, batch)

        with sdpa_kernel(SDPBackend.MATH):  # with the fused ones, bfloat16 ended at NaN on an H200 (torch 2.11)
            return vmap(of_one, (0, over_seeds, over_seeds))(self.weights, tokens, targets)

    def update(self) -> Tensor:
        """A step on `self.batch`, whose gradients are clipped for each seed by itself; the mean losses (S,)."""
        tokens, targets = self.batch
        means = self.losses(tokens, targets).sum((1, 2)) / (targets >= 0).sum((1, 2))
        means.sum().backward()
        gradients = [weight.grad for weight in self.weights.values()]
        norms = torch.stack([one.reshape(len(one), -1).norm(dim=1) for one in gradients]).norm(dim=0)  # (S,)
        scale = (self.session.settings.optimizer.clip / (norms + 1e-6)).clamp(max=1)
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *[1] * (gradient.ndim - 1)))
        self.session.optimizer.step()
        self.session.optimizer.zero_grad(set_to_none=True)
        return means.detach()

    def step(self, number: int, tokens: Tensor, targets: Tensor) -> Tensor:
        """Step `number` of the schedule on (S, B, T); the mean losses (S,)."""
        rate = learning_rate(number, self.session.steps, self.session.settings.optimizer)
        for group in self.session.optimizer.param_groups:
            group["lr"].fill_(rate * group["lr_multiplier"])
        for kept, given in zip(self.batch, (tokens, targets), strict=True):
            kept.copy_(given)
        if self.session.device.type != "cuda" or number < EAGER_STEPS:
            return self.update()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=self.pool, stream=torch.cuda.current_stream()):
                self.captured = self.update()
        self.graph.replay()
        return self.captured.clone()

    @torch.no_grad()
    def evaluate(self) -> list[Evaluation]:
        """Each seed on the whole validation set."""
        data, corpus, nats, tokens = self.session.settings.data, self.session.corpus, 0, 0
        for window in corpus.validation_batches(data.sequence_length, data.batch_size):
            losses = self.losses(*(torch.from_numpy(ids).to(self.session.device) for ids in window), over_seeds=None)
            nats, tokens = nats + losses.double().sum((1, 2)), tokens + int((window[1] >= 0).sum())
        return [Evaluation(each, tokens, corpus.validation_bytes) for each in nats.tolist()]


def batches(session: Session, seeds: range, hashes: list) -> Iterator[list[Tensor]]:
    """Tokens and targets (S, B, T) of every step; `hashes` of the seeds are updated with them."""
    sessions = [dataclasses.replace(session, settings=replace_settings(session.settings, {"seed": s})) for s in seeds]
    for step in range(session.steps):
        arrays = [each.batch(step)[:2] for each in sessions]
        for found, pair in zip(hashes, arrays, strict=True):
            for array in pair:
                found.update(array)
        tensors = [torch.from_numpy(np.stack(part)) for part in zip(*arrays, strict=True)]
        yield [t.pin_memory() if session.device.type == "cuda" else t for t in tensors]


def train_stacks(plan: Plan, device: str, seeds: range) -> list[Row]:
    """Train every arm with all seeds, side by side; the row of each model."""
    runs = {name: [Run(name, "final", s, plan.fixed_rate(arm)) for s in seeds] for name, arm in plan.compared.items()}
    settings = {arm: replace_settings(run_settings(plan, some[0]), {"device": device}) for arm, some in runs.items()}
    sessions = {arm: set_up(each, Path(), resume=False, log=no_log) for arm, each in settings.items()}
    first, hashes = next(iter(sessions.values())), [hashlib.blake2b(digest_size=16) for _ in seeds]
    kernels.use("reference", first.device)  # the only one that vmap can transform
    on_gpu = first.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_stream(torch.cuda.Stream())  # a graph cannot be captured on the default one
    pool = torch.cuda.graph_pool_handle() if on_gpu else None
    stacks = {arm: Stack(session, seeds, pool) for arm, session in sessions.items()}
    losses: dict[str, list[Tensor]] = {arm: [] for arm in stacks}
    start = time.perf_counter()
    options = {"total": first.steps, "unit": "step", "mininterval": 2, "disable": None}
    for step, pair in enumerate(tqdm(batches(first, seeds, hashes), **options)):
        tokens, targets = (t.to(first.device, non_blocking=True) for t in pair)
        for arm, stack in stacks.items():
            losses[arm].append(stack.step(step, tokens, targets))
    along = {arm: torch.stack(found).T.tolist() for arm, found in losses.items()}  # waits for the GPU
    data, seconds = first.settings.data, (time.perf_counter() - start) / len(stacks) / len(seeds)
    return [
        Row(
            **vars(run),
            status="completed" if math.isfinite(final.loss) else "diverged",
            loss=final.loss,  # null in runs.jsonl if it is not finite
            bits_per_byte=final.bits_per_byte,
            spikes=count_spikes(each),
            seconds=seconds,
            tokens=first.steps * data.batch_size * data.sequence_length,
            parameters=stack.session.model.num_parameters(),
            settings_hash=settings_hash(run_settings(plan, run)),
            weights_hash=weights_hash(run_settings(plan, run)),
            batches_hash=found.hexdigest(),
            text_hash=first.corpus.text_hash,
            device=hardware(str(first.device)),
            kernels=f"{kernels.describe(first.device)}, {len(seeds)} models stacked",
            dtype=first.settings.machine.dtype,
            torch=str(torch.__version__),
            python=platform.python_version(),
            threads=None if on_gpu else torch.get_num_threads(),
        )
        for arm, stack in stacks.items()
        for run, final, each, found in zip(runs[arm], stack.evaluate(), along[arm], hashes, strict=True)
    ]


def can_stack(arms: list[Settings]) -> bool:
    """Whether arms differ in the model alone, and steps depend on nothing but weights and batches that all share."""
    first, data = arms[0], arms[0].data
    alike = all(vars(arm) | {"model": None} == vars(first) | {"model": None} for arm in arms)
    models = {(arm.model.vocab_size, arm.model.norm == "batch") for arm in arms}
    fixed = first.optimizer.optimizer, first.run.train_only, data.document_mask, data.first_sequence_length
    return alike and models == {(first.model.vocab_size, False)} and fixed == ("adamw", "all", False, None)


def main(plan: tyro.conf.Positional[str], out: Path, device: str = "auto") -> None:
    """Train all final seeds of a comparison (a TOML file, or a name in configs/comparisons/) together on one GPU."""
    chosen = load_plan(plan)
    arms = [arm_settings(chosen, arm) for arm in chosen.compared.values()]
    if chosen.seeds is None or chosen.rates or not can_stack(arms):
        raise UserError(
            "models are stacked for a plan with seeds and one learning rate, whose arms differ in the model alone: "
            "with AdamW, sequences of one length, and no batch norm or document masks; for any other use ablate.py."
        )
    with locked(out):
        if (out / "runs.jsonl").exists():
            raise UserError(f"{out} has runs; give another --out.")
        save_plan(chosen, out / "plan.toml")
        append(out / "runs.jsonl", *train_stacks(chosen, device, chosen.phase_seeds["final"]))
        found = study.load(out)
        written = report.write(found, out)
    print(*report.headline(found), printable(f"report: {written[0]}"), sep="\n")


if __name__ == "__main__":
    with exit_on_user_error():
        tyro.cli(main, prog="python -m ablation.stack")
