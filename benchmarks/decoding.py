"""Decoding beside other programs and beside the time it takes to read the weights: `python -m benchmarks.decoding`.

All programs have the same shape and random weights, and take turns. Each is a function that prepares it for a case. The
block that it returns decodes once, greedily, and returns the seconds of a step, without the time of the prompt. A model
that fits into the processor's cache can exceed the limit. Exit status 1: a program did not run.
"""

import dataclasses
import importlib.util
import itertools
import re
import shutil
import struct
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from msgspec import Meta

import kernels
from benchmarks import timing
from checkpoints.families import to_json
from checkpoints.pretrained import save_pretrained
from errors import UserError
from flags import convert
from generation.generate import generate
from generation.settings import Sampling
from generation.steps import MAX_CPU_SEQUENCES, GpuDecodeStep, decode_step, quantize_matrices
from model.config import ModelConfig
from model.count import num_parameters
from model.decoder import Decoder
from model.device import allocate

SHAPES = {  # vocab_size, hidden_size, intermediate_size, layers, heads, key/value heads
    "260k": ModelConfig(512, 64, 172, 5, 8, 4, max_position_embeddings=512),  # stories260K of llama2.c
    "15m": ModelConfig(32000, 288, 768, 6, 6, 6, max_position_embeddings=256),  # stories15M of llama2.c
    "26m": ModelConfig(6400, 512, 1408, 8, 8, 2, max_position_embeddings=512),  # MiniMind, and configs/small.toml
    "124m": ModelConfig(32000, 768, 2560, 12, 12, 12, max_position_embeddings=256),  # configs/124m.toml
    "135m": ModelConfig(32000, 768, 2048, 16, 12, 12, max_position_embeddings=256),
    "1b": ModelConfig(128256, 2048, 8192, 16, 32, 8, max_position_embeddings=256),  # Llama-3.2-1B
}
TRANSFORMERS, COMPILED = "transformers", "transformers and torch.compile"
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


class Case(NamedTuple):
    shape: str  # a key of SHAPES
    prompt: int  # tokens
    sequences: int
    dtype: str  # a key of WEIGHT_BYTES
    tokens: int  # of each sequence that are decoded in a turn
    device: str
    llama2c: Path | None  # llama2.c's program

    @property
    def config(self) -> ModelConfig:
        """The shape, with positions for prompt and new tokens."""
        shape = SHAPES[self.shape]
        positions = max(shape.max_position_embeddings, self.prompt + self.tokens)
        return dataclasses.replace(shape, max_position_embeddings=positions)


def seconds_per_step(times: list[float], tokens: int) -> float:
    """Mean over the steps between the last `tokens` times, each taken after a token."""
    return (times[-1] - times[-tokens]) / (tokens - 1)


def cast_weights(decoder: Decoder, dtype: torch.dtype) -> None:
    """Compute in `dtype` and store the matrices in it, so that no step casts them. Norm weights and biases: float32."""
    decoder.compute_dtype = dtype
    parameters = [*decoder.parameters()]
    sizes = [(parameter.shape, dtype if parameter.ndim >= 2 else torch.float32) for parameter in parameters]
    for parameter, data in zip(parameters, allocate(sizes, parameters[0].device), strict=True):
        parameter.data = data.copy_(parameter.data)


def our_decoder(case: Case) -> Decoder:
    """Our decoder with random weights, as `generate.py --dtype` stores it."""
    decoder = Decoder(case.config, seed=1).eval()
    cast_weights(decoder, torch.float32 if case.dtype == "float32" else torch.bfloat16)
    if case.dtype == "int8":
        quantize_matrices(decoder)
    return decoder.to(case.device)


def transformers_model(config: ModelConfig) -> torch.nn.Module:
    """A LLaMA of the same shape with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**to_json(config, dtype="float32", bos_token_id=None, eos_token_id=None)))


def prenorm(case: Case, choice: str = "auto") -> timing.Blocks:
    """`generate` with the fast steps of the chosen kernels; the reference has none, so the decoder itself is called."""
    timing.use_kernels(choice, torch.device(case.device))
    decoder = our_decoder(case)
    prompts = [[0] * case.prompt] * case.sequences

    def run() -> float:
        kernels.use(choice, torch.device(case.device))
        # Without drafts: texts of random weights repeat themselves, and tokens would be counted that no step computed.
        options = {"max_new_tokens": case.tokens, "sampling": Sampling(temperature=0), "drafts": False}
        times = [time.perf_counter() for token in generate(decoder, prompts, **options) if token.sequence == 0]
        if case.device == "cuda":  # the step that was just timed: if its kernels failed, the decoder computed
            step = decode_step(decoder, case.sequences, case.prompt + case.tokens)
            if isinstance(step, GpuDecodeStep) and step.unavailable_reason is not None:
                raise RuntimeError(step.unavailable_reason)
        return seconds_per_step(times, case.tokens)

    return {"step": run}


def transformers(case: Case, compiled: bool = False) -> timing.Blocks:
    """transformers' `generate`: eager with its usual cache, or compiled with a static one."""
    with torch.device(case.device):
        model = transformers_model(case.config).to(getattr(torch, case.dtype)).eval()
        tokens = torch.full((case.sequences, case.prompt), 0)
    options = {"max_new_tokens": case.tokens, "min_new_tokens": case.tokens, "do_sample": False, "pad_token_id": 0}
    if compiled:
        options["cache_implementation"] = "static"  # on a GPU, generate itself then compiles into CUDA graphs
        if case.device == "cpu":
            model.forward = torch.compile(model.forward)

    def run() -> float:
        times = []
        streamer = SimpleNamespace(put=lambda _: times.append(time.perf_counter()), end=lambda: None)
        model.generate(tokens, attention_mask=torch.ones_like(tokens), streamer=streamer, **options)
        return seconds_per_step(times, case.tokens)

    return {"step": run}


def llama2c(case: Case) -> timing.Blocks:
    """llama2.c prints its own tokens per second. It is given random weights, and a tokenizer of numbers."""
    folder = tempfile.TemporaryDirectory(prefix="benchmark")
    config = case.config
    width = config.hidden_size
    tables = config.max_position_embeddings * config.resolved_head_dim  # tables of angles, which it skips
    weights = np.random.default_rng(1).normal(0, 0.02, num_parameters(config) + tables)
    weights[width : 2 * width] = 0  # token 1, <s>, ends the program's loop: with a logit of 0 it is never the likeliest
    sizes = (width, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads)
    sizes += (config.num_key_value_heads, config.vocab_size, config.max_position_embeddings)
    Path(folder.name, "model.bin").write_bytes(struct.pack("7i", *sizes) + weights.astype(np.float32).tobytes())
    pieces = b"".join(struct.pack("fi", 0, 7) + b"%07d" % index for index in range(config.vocab_size))
    Path(folder.name, "tokenizer.bin").write_bytes(struct.pack("i", 7) + pieces)
    command = [case.llama2c.resolve(), "model.bin", "-t", "0", "-n", str(max(case.tokens, 128)), "-z", "tokenizer.bin"]

    def run() -> float:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=folder.name)
        return 1 / float(re.search(r"achieved tok/s: ([\d.]+)", done.stderr)[1])

    return {"step": run}


def llama_cpp(case: Case) -> timing.Blocks:
    """llama.cpp's server in this process, with a file that `contrib.gguf` wrote and as many threads as torch; all other
    settings are its own. All sequences are asked for at once."""
    import xllamacpp

    from contrib.gguf_file import write_gguf
    from data.train_tokenizer import train_tokenizer

    with tempfile.TemporaryDirectory(prefix="benchmark") as folder:  # the server has read the file when it is deleted
        train_tokenizer([" ".join(map(str, range(1000)))], 300).save(folder)
        save_pretrained(our_decoder(case._replace(dtype="float32")), folder, bos_token_id=1, eos_token_id=2)
        write_gguf(Path(folder), Path(folder, "model.gguf"), "q8_0" if case.dtype == "int8" else case.dtype)
        settings = xllamacpp.CommonParams()
        settings.model.path = str(Path(folder, "model.gguf"))
        settings.n_parallel = case.sequences
        settings.n_ctx = case.sequences * case.config.max_position_embeddings
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

    return {"step": run}


PROGRAMS = {  # the speed of the others is relative to that of the first that runs
    TRANSFORMERS: transformers,
    COMPILED: partial(transformers, compiled=True),
    "llama2.c": llama2c,
    "llama.cpp": llama_cpp,
    "plain decoder": partial(prenorm, choice="reference"),
    "ours": prenorm,
}
USUAL = tuple(name for name in PROGRAMS if name != COMPILED)  # which compiles for minutes on a CPU


def is_possible(program: str, case: Case) -> bool:
    """Whether a program is installed and can decode a case."""
    if program == "llama2.c":
        return case.llama2c is not None and (case.prompt, case.sequences, case.dtype) == (1, 1, "float32")
    if program == "llama.cpp":
        installed = all(map(importlib.util.find_spec, ("xllamacpp", "gguf"))) and case.device == "cpu"
        return installed and (case.dtype != "int8" or case.config.intermediate_size % 32 == 0)  # blocks of q8_0
    if case.dtype == "int8":
        return program == "ours" and case.device == "cpu" and case.sequences <= MAX_CPU_SEQUENCES
    return True


def bytes_read(case: Case) -> float:
    """Bytes of weights, and of keys and values halfway through the steps, that a step of ours reads."""
    config = case.config
    weights = num_parameters(config) * WEIGHT_BYTES[case.dtype]
    width = 2 if case.dtype == "bfloat16" and case.device != "cpu" else 4
    keys = config.num_hidden_layers * config.num_key_value_heads * config.resolved_head_dim * width
    return weights + 2 * case.sequences * keys * (case.prompt + case.tokens // 2)


def measure(
    shapes: tuple[Literal[*SHAPES], ...] = ("26m",),
    prompts: tuple[int, ...] = (1,),
    sequences: tuple[int, ...] = (1, 8),
    dtypes: tuple[Literal[*WEIGHT_BYTES], ...] = (*WEIGHT_BYTES,),
    programs: tuple[Literal[*PROGRAMS], ...] = USUAL,
    turns: int = 7,
    tokens: int = 128,
    llama2c: Path | None = None,
) -> list[timing.Table]:
    """Time decoding on every combination, beside other programs and the time it takes to read the weights.

    Args:
        prompts: Tokens before.
        turns: Turns of each program.
        tokens: Tokens of a sequence in a turn.
        llama2c: llama2.c's program, built with `make runomp`.
    """
    convert("--tokens", tokens, Annotated[int, Meta(ge=2)])  # the first comes out of the prompt
    if llama2c is not None and shutil.which(llama2c.resolve()) is None:
        raise UserError(f"--llama2c {llama2c} is no program; give the path of llama2.c's `run`.")
    device = timing.default_device()
    limit = partial(timing.reading, device)
    tables = []
    for shape, prompt, batch, dtype in itertools.product(shapes, prompts, sequences, dtypes):
        case = Case(shape, prompt, batch, dtype, tokens=tokens, device=device.type, llama2c=llama2c)
        makers = {name: partial(PROGRAMS[name], case) for name in programs if is_possible(name, case)}
        title = f"{case.shape}, {case.dtype}, {case.sequences} sequences after {case.prompt} tokens"
        if makers:
            tables.append(timing.compare(title, makers, {"step": bytes_read(case)}, limit, turns, case.sequences))
    return tables


if __name__ == "__main__":
    timing.run(measure, "benchmarks.decoding")
