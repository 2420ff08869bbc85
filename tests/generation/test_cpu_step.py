"""The decoding step for a CPU against `Decoder.forward`.

Tolerance: the two add the same float32 numbers in different orders, through three layers: 3e-6.
"""

import copy
import itertools
import os
import random
import shutil

import numba
import pytest
import torch

import kernels
from generation.cpu_step import CpuDecodeStep
from generation.generate import PrefixCache, generate
from generation.settings import Sampling
from generation.steps import MAX_CPU_SEQUENCES, decode_step, quantize_matrices
from kernels.compiled import compiled
from model.cache import KeyValueCache
from model.linear import Linear
from tests.conftest import ROOT, run_python
from tests.generation.conftest import generate_all

BIASES = {"attention_bias": True, "attention_output_bias": True}
LAYER = {"norm": "layer", "attention_bias": True, "qk_norm": True}
VARIANTS = {
    "rms": {},
    "rms with bias, biases of q, k, v and o": {"norm_bias": True, **BIASES},
    "rms, qk norm, wide heads": {"qk_norm": True, "head_dim": 20},
    "layer, biases, qk norm, untied": LAYER | {"tie_word_embeddings": False},
    "layer without bias, one kv head": {"norm": "layer", "norm_bias": False, "num_key_value_heads": 1},
    "a kv head for each head": {"num_key_value_heads": 6},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}


def steps(decoder, lengths, count=3, kind=CpuDecodeStep):
    """Logits and caches of `count` tokens after left-padded prompts of these lengths, from the step and the decoder."""
    padding = torch.tensor([max(lengths) - length for length in lengths])
    padding = padding if padding.any() else None
    tokens = torch.randint(97, (len(lengths), max(lengths) + count), generator=torch.Generator().manual_seed(3))
    shape = len(lengths), max(lengths) + count + 2
    caches = [KeyValueCache(decoder.config, *shape) for _ in range(2)]
    for cache in caches:
        cache.keys.fill_(float("nan"))  # positions that are not filled must not be read
        cache.values.fill_(float("nan"))
        decoder(tokens[:, : max(lengths)], cache=cache, padding=padding)
    step, logits, expected = kind(decoder, caches[1]), [], []
    for token in tokens[:, max(lengths) :].split(1, 1):
        expected.append(decoder(token, cache=caches[0], padding=padding))
        logits.append(step(token, padding).clone())
        assert caches[0].length == caches[1].length
    assert kind is CpuDecodeStep or step.unavailable_reason is None  # else the decoder is compared with itself
    return torch.cat(logits, 1), torch.cat(expected, 1), caches


def cache_error(relative, caches, lengths) -> float:
    """The largest of the errors of filled positions."""
    errors = []
    for sequence, length in enumerate(lengths):
        filled = slice(max(lengths) - length, caches[0].length)
        for kind in ("keys", "values"):
            expected, ours = (getattr(cache, kind)[:, sequence, :, filled] for cache in caches)
            errors.append(relative(ours, expected))
    return max(errors)


@pytest.mark.parametrize("lengths", [[4], [5, 2, 1]], ids=str)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@torch.inference_mode()
def test_logits_and_cache_equal_the_decoders(make_decoder, relative, variant, lengths):
    logits, expected, caches = steps(make_decoder(**variant).eval(), lengths)
    assert logits.shape == (len(lengths), 3, 97) and logits.dtype == torch.float32
    assert relative(logits, expected) < 3e-6
    assert cache_error(relative, caches, lengths) < 3e-6


@torch.inference_mode()
def test_positions_after_the_first_table_of_angles_and_scores_too_large_for_exp_are_right(make_decoder, relative):
    decoder = make_decoder(attention_bias=True).eval()
    decoder.rope.cos, decoder.rope.sin = decoder.rope.cos[:4].clone(), decoder.rope.sin[:4].clone()
    for layer in decoder.layers:
        layer.self_attn.qkv_proj.bias *= 50
    logits, expected, _ = steps(decoder, [4])
    assert relative(logits, expected) < 3e-6


@torch.inference_mode()
def test_bfloat16_errs_less_than_the_decoder_does(make_decoder, relative):
    decoder = make_decoder(**LAYER).eval()
    exact, _, _ = steps(decoder, [5, 2, 1])
    decoder.compute_dtype = torch.bfloat16  # the weights stay float32, as in training: the step casts them once
    logits, expected, _ = steps(decoder, [5, 2, 1])
    assert 0 < relative(logits, exact) < relative(expected, exact)


@torch.inference_mode()
def test_int8_matrices_are_rounded_to_the_closest_integers_and_computed_with_exactly(make_decoder, relative):
    decoder = make_decoder(attention_bias=True, tie_word_embeddings=False).eval()
    head = decoder.lm_head.weight.data
    head[0], head[1] = 0, 1e-42
    quantize_matrices(decoder)
    assert (decoder.lm_head.int8[1] > 0).all() and not decoder.lm_head.int8[0][:2].any()
    expected = copy.deepcopy(decoder)
    for module in expected.modules():
        if isinstance(module, Linear) and module.int8 is not None:
            values, scales = module.int8
            rounded = values * scales[:, None]
            assert ((module.weight - rounded).abs() <= 0.5001 * scales[:, None]).all()
            assert (values[2:].abs().amax(1) == 127).all()
            module.weight.data, module.int8 = rounded, None
    assert decoder.embed_tokens.int8 is None and decoder.lm_head.int8 is not None
    tokens = torch.randint(97, (2, 6), generator=torch.Generator().manual_seed(3))
    step = CpuDecodeStep(decoder, KeyValueCache(decoder.config, 2, 6))
    logits = torch.cat([step(token, None) for token in tokens.split(1, 1)], 1)
    assert relative(logits, expected(tokens)) < 3e-6 < relative(logits, decoder(tokens))


@torch.inference_mode()
def test_sequences_in_a_batch_have_the_logits_that_they_have_alone_whatever_the_threads(make_decoder):
    decoder = make_decoder().eval()
    tokens = torch.randint(97, (5, 1), generator=torch.Generator().manual_seed(3))
    alone = [CpuDecodeStep(decoder, KeyValueCache(decoder.config, 1, 2))(token[None], None) for token in tokens]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = CpuDecodeStep(decoder, KeyValueCache(decoder.config, 5, 2))(tokens, None)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, torch.cat(alone))


def cast(decoder, dtype):
    """The decoder as generate.py computes with it in this dtype."""
    if dtype == "int8":
        quantize_matrices(decoder)
    decoder.compute_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
    return decoder.eval()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@torch.inference_mode()
def test_logits_have_the_same_bits_for_any_number_of_tokens_in_a_call(make_decoder, variant, dtype):
    decoder = cast(make_decoder(**variant), dtype)
    tokens = torch.randint(97, (1, 60), generator=torch.Generator().manual_seed(3))
    steps = [CpuDecodeStep(decoder, KeyValueCache(decoder.config, 1, 60)) for _ in range(2)]
    single = [steps[0](token, None) for token in tokens.split(1, 1)]
    several = [steps[1](rows, None) for rows in tokens.split([1, 2, 3, 5, 17, 9, 4, 8, 11], 1)]
    assert torch.equal(torch.cat(single, 1), torch.cat(several, 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_conversations_at_temperature_0_are_equal_with_and_without_drafts(make_decoder, monkeypatch, dtype):
    rng, calls, compute, ends = random.Random(4), ([], []), CpuDecodeStep.__call__, set()
    for norm, seed in itertools.product(["rms", "layer"], range(20)):
        context = rng.choice([24, 64, 200])
        decoder = cast(make_decoder(seed, norm=norm, qk_norm=seed % 2 == 0, max_position_embeddings=context), dtype)
        phrase = rng.choices(range(97), k=rng.randint(1, 6))
        turns = ((phrase * 9)[: rng.randint(1, 20)], rng.randint(1, 20)), ([*range(4), *phrase], None)
        options = dict(
            sampling=Sampling(temperature=0, repetition_penalty=rng.choice([1.0, 1.2])),
            max_new_tokens=rng.choice([9, 90]), first_tokens=rng.choice([None, [range(50)]]),
            eos_ids=rng.sample(range(97), rng.choice([0, 20])),
        )  # fmt: skip
        results = [], []
        for drafts in (False, True):
            count = lambda *inputs: calls[drafts].append(inputs[1].numel()) or compute(*inputs)  # noqa: B023, E731
            monkeypatch.setattr(CpuDecodeStep, "__call__", count)
            prefix, text = PrefixCache(), []
            for turn, interrupted_after in turns:
                text = [*text, *turn][: context - 1]
                tokens = generate(decoder, [text], prefix=prefix, drafts=drafts, **options)
                for token in itertools.islice(tokens, interrupted_after):
                    results[drafts].append((token.id, token.end, token.logits.tolist()))
                    text.append(token.id)
        assert results[True] == results[False]
        ends.update(end for _, end, _ in results[True])
    assert set(calls[False]) == {1} and len(calls[True]) < 0.6 * len(calls[False])
    assert sum(calls[True]) > len(calls[False])  # some drafted tokens were refused
    assert ends == {None, "eos", "length", "context"}


def test_where_numba_is_missing_the_decoder_gives_the_same_text(make_decoder, monkeypatch):
    decoder = make_decoder(attention_bias=True, qk_norm=True).eval()
    prompts = [[1, 2, 3], [4], list(range(30))]
    texts, _ = generate_all(decoder, prompts, max_new_tokens=50)
    assert [len(text) for text in texts] == [50, 50, 34]  # the last one has filled the context
    monkeypatch.setattr(kernels, "cpu", None)
    assert generate_all(decoder, prompts, max_new_tokens=50)[0] == texts
    code = "import sys; sys.modules['numba'] = None; import kernels, generation.steps; print(kernels.cpu)"
    done = run_python("-c", code)
    assert done.stdout == "None\n" and done.stderr.count("pip install numba") == 1


def test_there_is_a_step_for_small_batches_and_the_layers_that_it_computes(make_decoder):
    def exists(batch_size=1, **changes):
        return isinstance(decode_step(make_decoder(**changes).eval(), batch_size, 4), CpuDecodeStep)

    assert exists(MAX_CPU_SEQUENCES) and not exists(MAX_CPU_SEQUENCES + 1)
    assert not any(exists(norm=norm) for norm in ("none", "srms", "offset")) and not exists(mlp="geglu")
    assert not any(exists(norm_placement=placement) for placement in ("post", "sandwich", "output"))


def add_one(x):
    return x + 1


def test_where_the_disk_is_full_or_a_file_of_the_cache_is_cut_short_or_stale_it_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: os.stat("/dev/null/full"))
        assert compiled(add_one)(1) == 2
    assert compiled(add_one)(1) == 2
    files = [*tmp_path.rglob("*.nb?")]
    for path, size in itertools.product(files, (0, 30)):
        content = path.read_bytes()
        path.write_bytes(content[:size])
        assert compiled(add_one)(1) == 2 and len(path.read_bytes()) == len(content)
    assert len(files) == 2
    monkeypatch.setattr("kernels.compiled.__file__", __file__)  # what widens and stores numbers has changed
    before = [path.read_bytes() for path in files]
    assert compiled(add_one)(1) == 2 and before != [path.read_bytes() for path in files]


def test_the_process_that_compiles_computes_the_same_bits_as_those_that_load_its_loops(tmp_path):
    code = """
import hashlib, torch
from kernels import cpu
x, angles = torch.linspace(-3, 9, 512 * 320).view(512, 320), torch.linspace(0, 20, 64 * 32).view(64, 32)
y, _ = cpu.normalize(x.requires_grad_(), torch.linspace(0.5, 2, 320), kind="rms", eps=1e-5)
heads = cpu.rotary(torch.linspace(-2, 3, 64 * 192).view(1, 64, 192).bfloat16(), angles.cos(), angles.sin(), 1, 1)
for result in (y, *torch.autograd.grad((y**3).sum(), x), *heads):
    print(hashlib.sha256(result.detach().float().numpy().tobytes()).hexdigest())
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = [run_python("-c", code, env=environment) for _ in range(2)]
    assert ["compiling" in process.stderr for process in done] == [True, False]
    assert done[0].stdout == done[1].stdout and done[0].stdout.count("\n") == 5


@pytest.mark.slow
def test_where_no_cache_can_be_written_every_process_compiles(tmp_path):
    for folder in ("generation", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / folder / "__pycache__").touch()  # no folder
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from generation.cpu_step import rotate; "
    code += "import numpy as np; x = np.ones(4, np.float32); rotate(x, x[:2], x[2:]); print(x)"
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"} | {"HOME": "/dev/null"}
    done = run_python("-c", code, env=environment)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 1 and "in each process" in done.stderr
