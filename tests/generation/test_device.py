"""Dtypes and threads: what `auto` takes, and that weights held in the dtype of the activations change nothing else."""

import pytest
import torch

from generation import device
from generation.generate import generate
from model.config import ModelConfig
from model.decoder import Decoder

CPU = torch.device("cpu")


@pytest.mark.parametrize("native", [True, False])
def test_on_a_cpu_auto_takes_bfloat16_where_it_is_both_stored_and_native(monkeypatch, native):
    monkeypatch.setattr(device, "fast_at_bfloat16", lambda _: native)
    assert device.choose_dtype("auto", CPU, torch.bfloat16) == (torch.bfloat16 if native else torch.float32)
    assert device.choose_dtype("auto", CPU, torch.float32) == torch.float32
    assert device.choose_dtype("float16", CPU, torch.float32) == torch.float16


def test_on_cuda_auto_takes_bfloat16_from_compute_capability_8_on(monkeypatch):
    for capability, dtype in (((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert device.choose_dtype("auto", torch.device("cuda"), torch.float32) == dtype


def test_matrices_held_in_bfloat16_give_what_matrices_cast_at_each_step_give():
    config = ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, attention_bias=True, initializer_range=0.3)
    cast = Decoder(config, seed=2, compute_dtype=torch.bfloat16)
    held = Decoder(config, seed=2)
    with torch.no_grad():
        for decoder in (cast, held):
            for index, parameter in enumerate(p for p in decoder.parameters() if p.ndim < 2):
                parameter += torch.randn(len(parameter), generator=torch.Generator().manual_seed(index))
    device.hold_weights_in(held, torch.bfloat16)
    tokens = torch.tensor([[1, 5, 9, 33, 2]])
    assert torch.equal(held(tokens), cast(tokens))
    assert {p.dtype for p in held.parameters() if p.ndim == 2} == {torch.bfloat16}
    assert {p.dtype for p in held.parameters() if p.ndim == 1} == {torch.float32}


def test_bytes_per_step_leave_out_an_embedding_that_is_only_looked_up():
    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    tied = Decoder(ModelConfig(**shape))
    untied = Decoder(ModelConfig(**shape, tie_word_embeddings=False))
    assert device.bytes_per_step(tied) == 4 * tied.num_parameters() == device.bytes_per_step(untied)
    device.hold_weights_in(untied, torch.bfloat16)
    vectors = sum(p.numel() for p in untied.parameters() if p.ndim == 1)
    assert device.bytes_per_step(untied) == 2 * tied.num_parameters() + 2 * vectors


def test_a_small_step_gets_one_thread_and_the_others_come_back_also_after_an_error():
    before, threads = torch.get_num_threads(), []
    torch.set_num_threads(2)
    decoder = Decoder(ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1))
    with pytest.raises(KeyError), device.threads_for(decoder, 1):
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 2
    generate(decoder, [[1]], max_new_tokens=2, on_end=lambda *_: threads.append(torch.get_num_threads()))
    assert threads == [1] and torch.get_num_threads() == 2
    with device.threads_for(decoder, 10_000_000):
        assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
