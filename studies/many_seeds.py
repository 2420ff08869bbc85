"""Train all final seeds of a study together on one GPU.

One model of this size leaves a GPU mostly idle. `torch.func.vmap` stacks those of an arm: each has the initial weights
and batches that `ablate.py` gives to its seed. AdamW only: Muon would orthogonalize the matrices of all seeds as one.
"""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import kernels
from ablation.plan import Plan, Run, arm_settings, run_settings
from ablation.records import Row
from ablation.run import measure, settings_hash
from ablation.settings import replace_settings
from errors import UserError
from training.schedule import learning_rate
from training.session import Session, initial_model, no_log, set_up
from training.settings import Settings


class Stack:
    """One arm: a session, whose model is only the structure, and the weights of all seeds, (S, ...) each."""

    def __init__(self, session: Session, seeds: range):
        self.session, self.weights = session, {}
        of_seeds = [replace_settings(session.settings, {"seed": seed}) for seed in seeds]
        self.sessions = [dataclasses.replace(session, settings=settings) for settings in of_seeds]
        states = [
            dict(initial_model(settings, session.model.compute_dtype, no_log).named_parameters())
            for settings in of_seeds
        ]
        for name in states[0]:
            stacked = torch.stack([state[name].detach() for state in states])
            self.weights[name] = stacked.to(session.device).requires_grad_()
        names = {parameter: name for name, parameter in session.model.named_parameters()}
        for group in session.optimizer.param_groups:
            group["params"] = [self.weights[names[parameter]] for parameter in group["params"]]

    def step(self, index: int) -> Tensor:
        """Train by step `index` of the schedule; the mean losses (S,)."""

        def losses_of_one(weights: dict[str, Tensor], *batch: Tensor) -> Tensor:
            return functional_call(self.session.model, weights, batch)

        pairs = [session.batch(index)[:2] for session in self.sessions]
        arrays = (np.stack(of_seeds) for of_seeds in zip(*pairs, strict=True))
        tokens, targets = (torch.from_numpy(array).to(self.session.device) for array in arrays)  # (S, B, T)
        settings, optimizer = self.session.settings.optimizer, self.session.optimizer
        with sdpa_kernel(SDPBackend.MATH):  # with the fused ones, bfloat16 ended at NaN on an H200 (torch 2.11)
            losses = vmap(losses_of_one)(self.weights, tokens, targets)  # (S, B, T)
        means = losses.sum((1, 2)) / (targets >= 0).sum((1, 2))
        means.sum().backward()
        gradients = [weight.grad for weight in self.weights.values()]
        norms = torch.stack([one.reshape(len(one), -1).norm(dim=1) for one in gradients]).norm(dim=0)  # (S,)
        scale = (settings.clip / (norms + 1e-6)).clamp(max=1)  # each seed by itself
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *[1] * (gradient.ndim - 1)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(index, self.session.steps, settings) * group["lr_multiplier"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return means.detach()


def train_stack(plan: Plan, arm: str, device: str) -> list[Row]:
    """Train the models of an arm side by side; the row of each."""
    seeds, rate = plan.phase_seeds["final"], plan.candidate_learning_rates[arm][0]
    runs = [Run(arm, "final", seed, rate) for seed in seeds]
    settings = replace_settings(run_settings(plan, runs[0]), {"device": device})
    session = set_up(settings, Path(), resume=False, log=no_log)
    kernels.use("reference", session.device)  # the only one that vmap can transform
    stack, start = Stack(session, seeds), time.perf_counter()
    steps = tqdm(range(session.steps), desc=arm, unit="step", disable=None)
    for step in steps:
        losses = stack.step(step)
    losses.tolist()  # waits for the GPU
    seconds = (time.perf_counter() - start) / len(seeds)
    tokens = session.steps * settings.data.batch_size * settings.data.sequence_length
    rows = []
    for i, run in enumerate(runs):
        session.model.load_state_dict({name: weights[i] for name, weights in stack.weights.items()}, strict=False)
        state = dataclasses.replace(session.state, step=session.steps, tokens=tokens, seconds=seconds)
        trained = dataclasses.replace(stack.sessions[i], state=state)
        row = measure(trained, run, settings_hash(run_settings(plan, run)), 1, train=False)
        rows.append(dataclasses.replace(row, kernels=f"{row.kernels}, stacked"))
    return rows


def can_stack(arm: Settings, first: Settings) -> bool:
    """Whether `Stack` trains this arm as `ablate.py` would, beside the first one."""
    fixed = arm.optimizer.optimizer, arm.run.freeze, arm.data.document_mask, arm.data.first_sequence_length
    alike = dataclasses.replace(arm, model=first.model) == first and arm.model.vocab_size == first.model.vocab_size
    return alike and arm.model.norm != "batch" and fixed == ("adamw", (), False, None)


def train(plan: Plan, earlier: list[Row], device: str) -> Iterator[list[Row]]:
    """Train all final seeds of the arms that have no runs yet: the rows of each arm."""
    arms = [arm_settings(plan, arm) for arm in plan.all_arms.values()]
    swept = any(len(rates) > 1 for rates in plan.candidate_learning_rates.values())
    if plan.seeds is None or swept or not all(can_stack(arm, arms[0]) for arm in arms):
        raise UserError(
            "models are stacked for a plan with seeds and one learning rate, whose arms differ in the model alone: "
            "with AdamW, sequences of one length, and no batch norm or document masks; for any other use ablate.py."
        )
    for arm in plan.all_arms:
        if arm not in {row.arm for row in earlier}:
            yield train_stack(plan, arm, device)
