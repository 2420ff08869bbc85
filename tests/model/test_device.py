"""Devices: what `auto` takes, and the rule for bfloat16, which is asked of the device and not measured."""

import pytest
import torch

from errors import UserError
from model.device import choose_device, fast_at_bfloat16

CPU = torch.device("cpu")


def test_a_device_that_is_not_here_is_a_sentence():
    for name in ("cuda:99", "toaster"):
        with pytest.raises(UserError, match=f"--device {name} cannot be used here"):
            choose_device(name)
    assert choose_device("cpu") == CPU


@pytest.mark.parametrize("name", ["meta", "xla", "hpu:1"])
def test_a_device_of_a_type_that_models_do_not_run_on_is_a_sentence(name):
    with pytest.raises(UserError, match=f"--device {name} is of no type that models run on; use auto, cpu, cuda"):
        choose_device(name)


@pytest.mark.parametrize(("cuda", "mps", "name"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")])
def test_auto_takes_cuda_before_mps_before_the_cpu(monkeypatch, cuda, mps, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    assert choose_device("auto").type == name


@pytest.mark.parametrize(("avx512", "amx"), [(False, False), (True, False), (False, True)])
def test_a_cpu_is_fast_at_bfloat16_with_either_kind_of_instruction(monkeypatch, avx512, amx):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert fast_at_bfloat16(CPU) is (avx512 or amx)


def test_a_torch_that_does_not_say_is_not_fast_at_bfloat16(monkeypatch):
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported", raising=False)
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported", raising=False)
    assert fast_at_bfloat16(CPU) is False


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_cuda_is_fast_at_bfloat16_from_compute_capability_8_on(monkeypatch, capability, fast):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert fast_at_bfloat16(torch.device("cuda")) is fast
    assert fast_at_bfloat16(torch.device("mps")) is False
