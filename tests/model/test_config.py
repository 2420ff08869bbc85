"""ModelConfig: which values it refuses, and counts of the real modules; devices, and their dtypes and threads."""

import pytest
import torch

import kernels
from errors import UserError
from generation.generate import generate
from model.config import ROPE_SCALING, ModelConfig
from model.count import flops_per_token, num_parameters
from model.decoder import Decoder
from model.device import allocate, choose_dtype, threads_for

NUMBERS = dict.fromkeys(sum(ROPE_SCALING.values(), ()), 4)  # of any rope_scaling


def test_the_default_model_has_four_million_parameters():
    assert num_parameters(ModelConfig()) == 4_000_000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 50}, "hidden_size 50 is no multiple of 6 heads; set head_dim"),
        ({"head_dim": 7}, "heads are 7 wide"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor 0 and needs a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor '4' and needs a number"),
        ({"rope_scaling": NUMBERS | {"rope_type": "llama3"}}, "needs a high_freq_factor above low_freq_factor"),
        ({"rope_scaling": NUMBERS | {"rope_type": "yarn"}}, "needs truncate, true or false"),
    ],
)
def test_an_impossible_configuration_is_an_error_that_says_how_to_fix_it(make_config, changes, words):
    with pytest.raises(UserError, match=words):
        make_config(**changes)


@pytest.mark.parametrize("tied", [True, False])
def test_flops_per_token_are_three_times_the_forward_products_that_torch_counts(make_config, tied, monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(kernels, "_choice", "reference")  # it knows no products of oneDNN's
    config = make_config(tie_word_embeddings=tied)
    length = 16
    decoder, tokens = Decoder(config), torch.zeros(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        decoder(tokens, torch.zeros_like(tokens))
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(flops for op, flops in counts.items() if "attention" in op)
    products = sum(flops for op, flops in counts.items() if "attention" not in op)
    heads = config.num_attention_heads * config.resolved_head_dim
    exact_attention = 4 * config.num_hidden_layers * heads * length * length  # q k^T and p v, without causality
    assert attention in (0, exact_attention)  # fused kernels for a CPU are not all counted
    assert flops_per_token(config, length) * length == 3 * (products + exact_attention)


def test_auto_on_a_cpu_is_bfloat16_only_where_the_weights_are_and_the_cpu_and_torch_have_instructions(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    for capability, native in (("AVX512", torch.bfloat16), ("AVX2", torch.float32)):  # by ATEN_CPU_CAPABILITY=avx2
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        assert choose_dtype("auto", cpu, torch.bfloat16) == native
        assert choose_dtype("auto", cpu, torch.float32) == torch.float32
        assert choose_dtype("float16", cpu, torch.float32) == torch.float16


def test_a_small_step_uses_one_thread_and_the_number_is_restored_even_after_an_error():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    decoder = Decoder(ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1))
    with pytest.raises(KeyError), threads_for(decoder, 1):
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 2
    threads = [torch.get_num_threads() for _ in generate(decoder, [[1]], max_new_tokens=2)]
    assert threads == [1, 1] and torch.get_num_threads() == 2
    for _ in generate(decoder, [[1]], max_new_tokens=2):
        break
    assert torch.get_num_threads() == 2
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
