"""Devices: what `auto` chooses, which devices are fast at bfloat16, the number of threads, and peak FLOP/s."""

import pytest
import torch

from errors import UserError
from generation.generate import generate
from model.config import ModelConfig
from model.decoder import Decoder
from model.device import allocate, choose_device, choose_inference_dtype, fast_at_bfloat16, peak_flops, threads_for

CPU = torch.device("cpu")


def test_a_device_that_this_machine_lacks_is_a_user_error():
    for name in ("cuda:99", "toaster"):
        with pytest.raises(UserError, match=f"--device {name} cannot be used here"):
            choose_device(name)
    assert choose_device("cpu") == CPU


@pytest.mark.parametrize(("cuda", "mps", "name"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")])
def test_auto_chooses_cuda_before_mps_before_the_cpu(monkeypatch, cuda, mps, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    assert choose_device("auto").type == name


def test_auto_on_a_cpu_is_bfloat16_only_where_the_weights_are_and_the_cpu_and_torch_have_instructions(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    for capability, native in (("AVX512", torch.bfloat16), ("AVX2", torch.float32)):  # by ATEN_CPU_CAPABILITY=avx2
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        assert choose_inference_dtype("auto", CPU, torch.bfloat16) == native
        assert choose_inference_dtype("auto", CPU, torch.float32) == torch.float32
        assert choose_inference_dtype("float16", CPU, torch.float32) == torch.float16


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_cuda_is_fast_at_bfloat16_from_compute_capability_8_on(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_inference_dtype("auto", torch.device("cuda"), torch.float32) == dtype
    assert fast_at_bfloat16(torch.device("cuda")) is (dtype == torch.bfloat16)


def test_a_small_step_uses_one_thread_and_the_number_is_restored_even_after_an_error():
    before, threads = torch.get_num_threads(), []
    torch.set_num_threads(2)
    decoder = Decoder(ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1))
    with pytest.raises(KeyError), threads_for(decoder, 1):
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 2
    generate(decoder, [[1]], max_new_tokens=2, on_finish=lambda *_: threads.append(torch.get_num_threads()))
    assert threads == [1] and torch.get_num_threads() == 2
    with threads_for(decoder, 10_000_000):
        assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_the_peak_is_known_only_for_devices_in_the_table(monkeypatch):
    for name, peak in {"NVIDIA H200": 989e12, "NVIDIA L4": 121e12, "NVIDIA L40": None}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(torch.device("cuda"), torch.bfloat16) == peak
    assert peak_flops(torch.device("cuda"), torch.float32) is None
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_weights_lie_side_by_side_without_overlap_and_begin_cache_lines():
    sizes = [((3, 5), torch.bfloat16), ((7,), torch.int8), ((2, 2), torch.float32)]
    tensors = allocate([(torch.Size(shape), dtype) for shape, dtype in sizes], torch.device("cpu"))
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, sizes, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype) and (tensor == number).all()
        assert tensor.is_contiguous() and (tensor.data_ptr() - tensors[0].data_ptr()) % 64 == 0
    (meta,) = allocate([(torch.Size((2, 3)), torch.int8)], torch.device("meta"))
    assert (meta.shape, meta.dtype, meta.device.type) == ((2, 3), torch.int8, "meta")
