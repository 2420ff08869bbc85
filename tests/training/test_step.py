"""One step of training, its learning rate and length of sequences, and the loss on a complete text."""

import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from checkpoints.pretrained import load_pretrained
from data.batches import Batch, validation_windows
from data.corpus import prepare
from data.settings import DataSettings
from data.tokenizer import load_tokenizer
from model.config import ModelConfig
from model.decoder import Decoder
from tests.training.runs import open_session
from training.evaluate import evaluate
from training.loop import train_steps
from training.optimizer import learning_rate
from training.processes import Processes
from training.session import sequence_length
from training.settings import OptimizerSettings
from training.step import Diverged, split_batch, train_step

CPU = torch.device("cpu")
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)
CONFIG = ModelConfig(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, attention_bias=True)


class KeepsGradients(torch.optim.SGD):
    """An optimizer that leaves the gradients for a test to read; without a learning rate it changes no weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


def a_batch() -> Batch:
    random = np.random.default_rng(5)
    inputs, targets = random.integers(0, 61, (2, 8, 12))
    targets[1:4] = np.where(random.random((3, 12)) < 0.8, -100, targets[1:4])  # very unequal micro-batches
    return Batch(inputs, targets)


def step(model, micro_batches, optimizer, clip=float("inf"), scaler=NO_SCALER, processes=None) -> tuple[float, float]:
    return train_step(model, micro_batches, optimizer, scaler, clip, processes or Processes(), CPU)


@pytest.mark.parametrize("size", [8, 2])
def test_the_gradient_is_that_of_the_mean_over_all_predicted_tokens_in_any_number_of_micro_batches(relative, size):
    model = Decoder(CONFIG, seed=3)
    inputs, targets = map(torch.from_numpy, a_batch()[:2])
    expected = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
    expected.backward()
    other = Decoder(CONFIG, seed=3)
    loss, _ = step(other, split_batch(a_batch(), size, CPU), KeepsGradients(other))
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for (name, ours), parameter in zip(other.named_parameters(), model.parameters(), strict=True):
        assert relative(ours.grad, parameter.grad) < 5e-6, name  # float32 sums in another order


def test_a_batch_without_any_predicted_token_gives_zero_gradients():
    model = Decoder(CONFIG, seed=3)
    batch = a_batch()
    micro_batches = split_batch(batch._replace(targets=np.full_like(batch.targets, -100)), 4, CPU)
    assert step(model, micro_batches, KeepsGradients(model)) == (0.0, 0.0)
    assert all(not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 2e-3)])
def test_clipping_scales_the_gradient_of_all_parameters_to_the_limit(dtype, tolerance):
    """In float16 backward gives the gradient of the scaled loss; norm, limit and update are those without the scale."""
    model = Decoder(CONFIG, seed=3)
    step(model, split_batch(a_batch(), 8, CPU), KeepsGradients(model))
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    for clip in (0.01, 1e6):
        model = Decoder(CONFIG, seed=3, compute_dtype=dtype)
        scaler = torch.amp.GradScaler("cpu", init_scale=2**12, enabled=dtype == torch.float16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
        _, norm = step(model, split_batch(a_batch(), 8, CPU), optimizer, clip, scaler)
        moved = before - torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        clipped = gradient * min(1, clip / gradient.norm())
        assert (moved - clipped).norm() < tolerance * clipped.norm()
        assert norm == pytest.approx(gradient.norm().item(), rel=tolerance / 10)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone():
    model = Decoder(CONFIG, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    parameter = list(model.parameters())[3]
    parameter.register_hook(lambda gradient: torch.where(gradient == gradient.max(), torch.inf, gradient))
    with pytest.raises(Diverged, match="norm of the gradient inf"):
        step(model, split_batch(a_batch(), 8, CPU), optimizer, clip=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # float16: the step is skipped, unless the loss is NaN as well
    parameter.register_hook(lambda gradient: gradient * torch.nan)
    assert step(model, split_batch(a_batch(), 8, CPU), optimizer, clip=1.0, scaler=scaler)[1] == torch.inf
    assert scaler.get_scale() == 2.0
    assert all(map(torch.equal, before, model.parameters()))
    model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(Diverged, match="loss is nan"):
        step(model, split_batch(a_batch(), 8, CPU), optimizer, clip=1.0, scaler=scaler)


def test_an_evaluation_is_the_mean_over_every_token_of_the_text(finished_run, text_folder, tmp_path):
    tokenizer, model = load_tokenizer(finished_run / "last"), load_pretrained(finished_run / "last")
    text = (text_folder / "07.txt").read_text(encoding="utf-8")
    ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 32):
            window = torch.tensor([ids[start : start + 33]])
            log_p = model(window[:, :-1]).double().log_softmax(-1)
            nats -= log_p.gather(2, window[:, 1:, None]).sum().item()
    settings = DataSettings(data=(str(text_folder / "07.txt"),), cache=str(tmp_path))
    corpus = prepare(settings, finished_run / "last")
    result = evaluate(model, corpus.all_batches(32, 4), corpus.everything_bytes, torch.device("cpu"))
    assert result.tokens == len(ids) - 1 and result.text_bytes == len(text.encode())
    assert result.nats == pytest.approx(nats, rel=1e-6)
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-6)


def test_with_document_mask_the_loss_of_a_document_does_not_depend_on_those_before_it(finished_run):
    tokenizer, model = load_tokenizer(finished_run / "last"), load_pretrained(finished_run / "last")
    random = np.random.default_rng(1)
    documents = [np.array([tokenizer.bos_id, *random.integers(10, 300, length)]) for length in (9, 14, 7)]
    (window,) = validation_windows(np.concatenate(documents), 32, 1)
    batch = window.with_documents(tokenizer.document_start)
    batch.targets[batch.targets == tokenizer.bos_id] = -100
    alone = [evaluate(model, validation_windows(one, 32, 1), 1, torch.device("cpu")).nats for one in documents]
    assert evaluate(model, [batch], 1, torch.device("cpu")).nats == pytest.approx(sum(alone), rel=1e-6)
    assert abs(evaluate(model, [batch._replace(documents=None)], 1, torch.device("cpu")).nats - sum(alone)) > 1e-3


def test_the_learning_rate_rises_linearly_to_its_peak_and_falls_as_the_schedule_says():
    def learning_rates(steps: int = 100, **settings) -> list[float]:
        settings = OptimizerSettings(steps=steps, learning_rate=2.0, **settings)
        return [learning_rate(step, steps, settings) for step in range(steps)]

    assert learning_rates(warmup_steps=10)[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert max(learning_rates(steps=5, warmup_steps=50)) == 2.0  # never above it
    rates = learning_rates(schedule="wsd", warmup_steps=10, decay_fraction=0.2, final_learning_rate=0.1)
    assert rates[10:80] == [2.0] * 70
    assert rates[80:] == pytest.approx([2.0 * (1 - 0.9 * (i + 1) / 20) for i in range(20)])
    rates = learning_rates(schedule="cosine", warmup_steps=10, final_learning_rate=0.1)
    expected = [2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * (i + 1) / 90)) / 2) for i in range(90)]
    assert rates[10:] == pytest.approx(expected)


def test_sequences_double_in_equal_parts_of_40_percent_of_the_steps():
    def sequence_lengths(steps: int, **data: int) -> list[int]:
        return [sequence_length(step, steps, DataSettings(**data)) for step in range(steps)]

    growing = sequence_lengths(100, first_sequence_length=64, sequence_length=256)
    assert growing == [64] * 20 + [128] * 20 + [256] * 60
    assert sequence_lengths(20, first_sequence_length=256, sequence_length=256) == [256] * 20 == sequence_lengths(20)


def test_every_step_has_as_many_tokens_in_as_many_micro_batches(flags, tmp_path, monkeypatch):
    growing = ["--first-sequence-length", "8", "--micro-batch-size", "4", "--steps", "10"]
    session = open_session(tmp_path, *flags, *growing)
    monkeypatch.setattr("training.loop.train_step", step := Mock(return_value=(1.0, 1.0)))
    assert [result.step for result in train_steps(session)] == [*range(1, 11)]
    shapes = [[inputs.shape for inputs, _ in call.args[1]] for call in step.call_args_list]
    assert shapes == [[(16, 8)] * 2] * 2 + [[(8, 16)] * 2] * 2 + [[(4, 32)] * 2] * 6
    assert session.state.tokens == 10 * 8 * 32


def test_shorter_sequences_read_the_same_text_in_the_same_order(flags, tmp_path):
    """Step by step the tokens are those of a run without the schedule, and so are the targets."""
    whole, growing = (open_session(tmp_path, *flags, *more) for more in ([], ["--first-sequence-length", "8"]))
    for step in range(whole.steps):
        for expected, cut in zip(whole.batch(step)[:2], growing.batch(step)[:2], strict=True):
            assert cut.tolist() == expected.reshape(cut.shape).tolist()
    assert growing.batch(0).inputs.shape == (32, 8) and whole.batch(0).inputs.shape == (8, 32)
