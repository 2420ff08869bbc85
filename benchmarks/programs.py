"""The programs that `benchmarks.decoding` compares, each as a function that prepares it for one setting.

All have the same shape and random weights. What such a function returns decodes once, greedily, and returns the seconds
of a step, without what the prompt takes.
"""

import dataclasses
import functools
import importlib.util
import re
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from generation.weights import cast_weights, quantize_matrices
from model.cache import KeyValueCache
from model.config import ModelConfig
from model.decoder import Decoder
from model.fused_decode import DecodeStep

SHAPES = {
    "260k": ModelConfig(512, 64, 172, 5, 8, 4, max_position_embeddings=512),  # stories260K of llama2.c
    "15m": ModelConfig(32000, 288, 768, 6, 6, 6, max_position_embeddings=256),  # stories15M of llama2.c
    "26m": ModelConfig(6400, 512, 1408, 8, 8, 2, max_position_embeddings=512),  # MiniMind, and configs/small.toml
    "135m": ModelConfig(32000, 768, 2048, 16, 12, 12, max_position_embeddings=256),
    "1b": ModelConfig(128256, 2048, 8192, 16, 32, 8, max_position_embeddings=256),  # Llama-3.2-1B
}
OURS, DECODER, TRANSFORMERS, LLAMA2C, LLAMA_CPP = "ours", "plain decoder", "transformers", "llama2.c", "llama.cpp"
COMPILED = f"{TRANSFORMERS} compiled"
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "int8": "q8_0"}  # and what llama.cpp's file has


class Case(NamedTuple):
    """One program in one setting, as its process receives it."""

    shape: str  # a key of SHAPES
    prompt: int  # tokens
    sequences: int
    program: str  # a key of PROGRAMS
    dtype: str  # a key of DTYPES
    tokens: int = 128  # of each sequence, to decode in a turn
    device: str = "cpu"
    path: Path | None = None  # of llama2.c's program

    @property
    def config(self) -> ModelConfig:
        """The shape, with positions for prompt and new tokens."""
        shape, positions = SHAPES[self.shape], self.prompt + self.tokens
        return dataclasses.replace(shape, max_position_embeddings=max(shape.max_position_embeddings, positions))


def our_decoder(case: Case) -> Decoder:
    """Our decoder with random weights, as `generate.py --dtype` stores it."""
    with torch.device(case.device):
        decoder = Decoder(case.config, seed=None).eval()
        for parameter in decoder.parameters():
            parameter.data.normal_(0.0, 0.02) if parameter.ndim > 1 else parameter.data.fill_(1.0)
        cast_weights(decoder, torch.float32 if case.dtype == "float32" else torch.bfloat16)
        if case.dtype == "int8":
            quantize_matrices(decoder)
    return decoder.to(case.device)  # tables of angles are made on the CPU


def transformers_model(config: ModelConfig) -> torch.nn.Module:
    """A LLaMA of the same shape with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fields += ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings")
    return LlamaForCausalLM(LlamaConfig(**{name: getattr(config, name) for name in fields}))


class Clock(list):
    """When each token came. transformers takes it for a streamer, which gets the prompt first."""

    def put(self, tokens: object) -> None:
        self.append(time.perf_counter())

    def end(self) -> None:
        """Called after the last token."""

    def seconds_per_step(self, tokens: int) -> float:
        """Between the last `tokens`."""
        return (self[-1] - self[-tokens]) / (tokens - 1)


def decode_ours(case: Case) -> Callable[[], float]:
    """`generate` on a CPU, and on a GPU the step that it uses there, the fused one: `generate` needs more packages."""
    if case.device != "cpu":
        return decode_in_steps(case, fused=True)
    from generation.generate import generate
    from generation.settings import Sampling

    decoder, prompts = our_decoder(case), [[0] * case.prompt] * case.sequences

    def run() -> float:
        clock = Clock()
        options = {"max_new_tokens": case.tokens, "sampling": Sampling(temperature=0)}
        generate(decoder, prompts, on_token=lambda i, token: clock.put(token) if i == 0 else None, **options)
        return clock.seconds_per_step(case.tokens)

    return run


def decode_in_steps(case: Case, fused: bool = False) -> Callable[[], float]:
    """The decoder called token by token, or its fused step."""
    decoder, device = our_decoder(case), torch.device(case.device)
    room = case.prompt + case.tokens
    cache = KeyValueCache(case.config, case.sequences, room, device=device, dtype=decoder.compute_dtype)
    step = DecodeStep(decoder, cache) if fused else functools.partial(decoder, cache=cache, last_only=True)

    @torch.inference_mode()
    def run() -> float:
        clock, cache.length = Clock(), 0
        logits = decoder(torch.full((case.sequences, case.prompt), 0, device=device), cache=cache, last_only=True)
        for _ in range(case.tokens - 1):
            tokens = logits.argmax(-1)
            clock.put(tokens.tolist())
            logits = step(tokens, padding=None)
        clock.put(logits.argmax(-1).tolist())
        if fused and step.unavailable_reason is not None:  # what was timed is the decoder
            raise RuntimeError(step.unavailable_reason)
        return clock.seconds_per_step(case.tokens)

    return run


def decode_transformers(case: Case, compiled: bool = False) -> Callable[[], float]:
    """transformers' `generate`: eager with its usual cache, or compiled with a static one."""
    with torch.device(case.device):
        model = transformers_model(case.config).to(getattr(torch, case.dtype)).eval()
        tokens = torch.full((case.sequences, case.prompt), 0)
    options = {"max_new_tokens": case.tokens, "min_new_tokens": case.tokens, "do_sample": False, "pad_token_id": 0}
    if compiled:
        options["cache_implementation"] = "static"  # on a GPU, generate itself then compiles into CUDA graphs
        model.forward = torch.compile(model.forward) if case.device == "cpu" else model.forward

    def run() -> float:
        clock = Clock()
        model.generate(tokens, attention_mask=torch.ones_like(tokens), streamer=clock, **options)
        return clock.seconds_per_step(case.tokens)

    return run


def decode_llama2c(case: Case) -> Callable[[], float]:
    """llama2.c prints its own tokens per second. It is given random weights, and a tokenizer of numbers."""
    config, folder = case.config, tempfile.TemporaryDirectory(prefix="benchmark")
    width, kv_width = config.hidden_size, config.num_key_value_heads * config.resolved_head_dim
    matrices = 2 * width * (width + kv_width) + 3 * width * config.intermediate_size
    layers = config.num_hidden_layers * (2 * width + matrices)
    tables = config.max_position_embeddings * config.resolved_head_dim
    weights = np.random.default_rng(1).normal(0, 0.02, config.vocab_size * width + layers + width + tables)
    weights[width : 2 * width] = 0  # token 1, <s>, ends the program's loop: with a logit of 0 it is never the likeliest
    sizes = (width, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads)
    sizes += (config.num_key_value_heads, config.vocab_size, config.max_position_embeddings)
    Path(folder.name, "model.bin").write_bytes(struct.pack("7i", *sizes) + weights.astype(np.float32).tobytes())
    pieces = b"".join(struct.pack("fi", 0, 7) + b"%07d" % index for index in range(config.vocab_size))
    Path(folder.name, "tokenizer.bin").write_bytes(struct.pack("i", 7) + pieces)
    command = [case.path, "model.bin", "-t", "0", "-n", str(max(case.tokens, 128)), "-z", "tokenizer.bin"]

    def run() -> float:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=folder.name)
        return 1 / float(re.search(r"achieved tok/s: ([\d.]+)", done.stderr)[1])

    return run


def decode_llama_cpp(case: Case) -> Callable[[], float]:
    """llama.cpp's server in this process, with a file that `contrib.gguf` wrote; all sequences are asked for at once.

    Its settings are its own, except for the number of threads, which is torch's.
    """
    import xllamacpp

    from checkpoints.pretrained import save_pretrained
    from contrib.gguf import write_gguf
    from data.corpus import train_tokenizer

    with tempfile.TemporaryDirectory(prefix="benchmark") as folder:  # the server has read the file when it is deleted
        train_tokenizer([" ".join(map(str, range(1000)))], 300, Path(folder, "tokenizer.model")).save(folder)
        save_pretrained(our_decoder(case._replace(dtype="float32")), folder, bos_token_id=1, eos_token_id=2)
        write_gguf(Path(folder), Path(folder, "model.gguf"), DTYPES[case.dtype])
        settings = xllamacpp.CommonParams()
        settings.model.path = str(Path(folder, "model.gguf"))
        settings.n_parallel, settings.n_ctx = case.sequences, case.sequences * case.config.max_position_embeddings
        settings.verbosity = -1
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
        server = xllamacpp.Server(settings)
    question = {"prompt": [1] * case.prompt, "n_predict": case.tokens, "temperature": 0}
    question |= {"ignore_eos": True, "cache_prompt": False}

    def run() -> float:
        with ThreadPoolExecutor(case.sequences) as pool:
            answers = [*pool.map(lambda _: server.handle_completions(question), range(case.sequences))]
        assert all(answer["usage"]["completion_tokens"] == case.tokens for answer in answers)
        return max(answer["timings"]["predicted_per_token_ms"] for answer in answers) / 1e3

    return run


# The first that runs is what the speed of the others is relative to.
PROGRAMS: dict[str, Callable[[Case], Callable[[], float]]] = {
    TRANSFORMERS: decode_transformers,
    COMPILED: functools.partial(decode_transformers, compiled=True),
    LLAMA2C: decode_llama2c,
    LLAMA_CPP: decode_llama_cpp,
    DECODER: decode_in_steps,
    OURS: decode_ours,
}
USUAL = [name for name in PROGRAMS if name != COMPILED]  # which compiles for minutes on a CPU


def is_possible(case: Case) -> bool:
    """Whether a program is here and has a setting: llama2.c decodes one sequence in float32, ours up to 16 in int8."""
    if case.program == LLAMA2C:
        return case.path is not None and (case.prompt, case.sequences, case.dtype) == (1, 1, "float32")
    if case.program == LLAMA_CPP:
        installed = all(map(importlib.util.find_spec, ("xllamacpp", "gguf"))) and case.device == "cpu"
        return installed and (case.dtype != "int8" or case.config.intermediate_size % 32 == 0)  # blocks of q8_0
    return case.dtype != "int8" or (case.program == OURS and case.device == "cpu" and case.sequences <= 16)
