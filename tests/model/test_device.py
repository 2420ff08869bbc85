"""Devices: what `auto` chooses, which CPUs are fast at bfloat16, and the number of threads."""

import pytest
import torch

from errors import UserError
from generation.generate import generate
from model.config import ModelConfig
from model.decoder import Decoder
from model.device import allocate, choose_device, choose_inference_dtype, threads_for

CPU = torch.device("cpu")


def test_a_device_that_this_machine_lacks_is_a_user_error():
    for name in ("cuda:99", "toaster"):
        with pytest.raises(UserError, match=f"--device {name} cannot be used here"):
            choose_device(name)
    assert choose_device("cpu") == CPU


def test_auto_on_a_cpu_is_bfloat16_only_where_the_weights_are_and_the_cpu_and_torch_have_instructions(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    for capability, native in (("AVX512", torch.bfloat16), ("AVX2", torch.float32)):  # by ATEN_CPU_CAPABILITY=avx2
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        assert choose_inference_dtype("auto", CPU, torch.bfloat16) == native
        assert choose_inference_dtype("auto", CPU, torch.float32) == torch.float32
        assert choose_inference_dtype("float16", CPU, torch.float32) == torch.float16


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
