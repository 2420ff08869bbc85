"""Fixtures that several packages share: the test data, real trained weights as a checkpoint, and relative error."""

import http.server
import importlib.util
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

if importlib.util.find_spec("hypothesis"):  # tests that need a GPU run without it
    import hypothesis

    hypothesis.settings.register_profile("suite", derandomize=True)  # a search of its own draws other examples
    hypothesis.settings.register_profile("long", max_examples=20_000)
    hypothesis.settings.load_profile("suite")

# Kernels are interpreted or compiled as they are imported, so that one process cannot do both: `-m gpu` and `-m smoke`
# compile them, any other choice of tests runs on the CPU. Workers inherit what the first process sets.
on_gpu = {("-m", "gpu"), ("-m", "smoke")} & {*zip(sys.argv, sys.argv[1:], strict=False)}
if on_gpu and not torch.cuda.is_available():
    pytest.exit("-m gpu and -m smoke need a CUDA device", returncode=2)  # else nothing would run, and pass
if not on_gpu:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"  # test processes share the cores
    torch.set_num_threads(1)
if os.environ.get("TRITON_INTERPRET") and importlib.util.find_spec("triton"):
    # The interpreter truncates to bfloat16 where a GPU rounds to nearest, and multiplies bfloat16 matrices as integers.
    # That of Triton 3.6 takes int() of arrays with one element, which NumPy 2.4 refuses.
    # Fixed here, so that the tests can demand one rounding and no more.
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
    patch_tensor = interpreter._patch_lang_tensor

    def rounding_cast(self, x, target):
        """`cast_impl`, to nearest, and ten times faster."""
        between = x.dtype.scalar, target.scalar
        if between == (tl.float32, tl.bfloat16):
            return TensorHandle(torch.tensor(x.data).bfloat16().view(torch.uint16).numpy(), target.scalar)
        if between == (tl.bfloat16, tl.float32):
            return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), target.scalar)
        return cast(self, x, target)

    def upcasting_dot(self, a, b, *rest):
        """`create_dot` of float32 operands: products of bfloat16 are exact there."""
        wide = [rounding_cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, *rest)

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = rounding_cast, upcasting_dot


ROOT = Path(__file__).parent.parent
# The fields of a small configuration, under Hugging Face's names.
SHAPE = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6)  # in llama2c's order
SHAPE |= dict(num_key_value_heads=2, vocab_size=97, max_position_embeddings=64)


def read_llama2c(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Read a llama2.c model file: the fields of a config.json, and float32 tensors under Hugging Face's names."""
    content = path.read_bytes()
    config = dict(zip(SHAPE, struct.unpack("<7i", content[:28]), strict=True))
    hidden, ffn, layers, heads, kv_heads, vocab, _ = config.values()
    half, kv_rows = hidden // heads // 2, kv_heads * hidden // heads
    shapes = {
        "embed_tokens": (vocab, hidden),
        "layers.{}.input_layernorm": (layers, hidden),
        "layers.{}.self_attn.q_proj": (layers, hidden, hidden),
        "layers.{}.self_attn.k_proj": (layers, kv_rows, hidden),
        "layers.{}.self_attn.v_proj": (layers, kv_rows, hidden),
        "layers.{}.self_attn.o_proj": (layers, hidden, hidden),
        "layers.{}.post_attention_layernorm": (layers, hidden),
        "layers.{}.mlp.gate_proj": (layers, ffn, hidden),
        "layers.{}.mlp.down_proj": (layers, hidden, ffn),
        "layers.{}.mlp.up_proj": (layers, ffn, hidden),
        "norm": (hidden,),
    }
    values, tensors = np.frombuffer(content, dtype="<f4", offset=28), {}
    for name, shape in shapes.items():
        stack, values = values[: math.prod(shape)].reshape(shape), values[math.prod(shape) :]
        for index, tensor in enumerate(stack if "{}" in name else [stack]):
            if name.endswith(("q_proj", "k_proj")):  # the rows of a head: from pairs (2i, 2i + 1) to (i, i + d/2)
                tensor = tensor.reshape(-1, half, 2, hidden).swapaxes(1, 2).reshape(-1, hidden)
            tensors[f"model.{name.format(index)}.weight"] = np.ascontiguousarray(tensor)
    config |= {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    return config | {"bos_token_id": 1, "eos_token_id": 2}, tensors


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of test data: real weights and tokenizers, and the outputs expected of them."""
    if not os.environ.get("PRENORM_SHARED"):
        pytest.skip("needs the test data: set the environment variable PRENORM_SHARED to a folder that has it in data/")
    return Path(os.environ["PRENORM_SHARED"]) / "data"


@pytest.fixture(scope="session")
def stories260k_directory(shared: Path, tmp_path_factory) -> Path:
    """The real trained 260K model as a llama checkpoint with its SentencePiece tokenizer."""
    from safetensors.numpy import save_file

    directory = tmp_path_factory.mktemp("stories260K")
    config, tensors = read_llama2c(shared / "stories260K" / "stories260K.bin")
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(shared / "stories260K" / "tok512.model", directory / "tokenizer.model")
    return directory


def run_python(*arguments: object, **options) -> subprocess.CompletedProcess:
    """Run Python with arguments in the project's folder, and keep what it prints."""
    options = {"cwd": ROOT, "capture_output": True, "text": True} | options
    return subprocess.run([sys.executable, *map(str, arguments)], **options)


def edit_json(path: Path, *, without: tuple[str, ...] = (), **changes) -> None:
    """Change or remove fields of a JSON file."""
    fields = json.loads(path.read_text(encoding="utf-8")) | changes
    fields = {key: value for key, value in fields.items() if key not in without}
    path.write_text(json.dumps(fields), encoding="utf-8")


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a safetensors file, or of the one in a directory, in place."""
    path = path / "model.safetensors" if path.is_dir() else path
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def randomize_trained(model: torch.nn.Module) -> torch.nn.Module:
    """Random values for all that a model trains, such as its adapter."""
    generator = torch.Generator().manual_seed(6)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model.eval()


class HubServer(http.server.ThreadingHTTPServer):
    """A server on this machine that answers like the Hugging Face Hub."""

    commit = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.files: dict[str, bytes] = {}  # answers by path, without the query
        self.errors: dict[str, tuple[int, str]] = {}  # HTTP status and code by path; others are 404 EntryNotFound
        self.asked: list[tuple[str, str]] = []  # the method and path of each request

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class HubRequest(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append((self.command, path))
        content = self.server.files.get(path)
        status, code = self.server.errors.get(path, (404, "EntryNotFound") if content is None else (200, None))
        content = b"" if content is None or status != 200 else content
        self.send_response(status)
        if code is None:
            self.send_header("X-Repo-Commit", self.server.commit)
            self.send_header("ETag", f'"{abs(hash(path)):040x}"')
        else:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *arguments) -> None:
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[HubServer]:
    """A server without files, which huggingface_hub takes for the Hub; it caches in `tmp_path`."""
    from huggingface_hub import constants

    server = HubServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # before another try
    yield server
    server.stop()


@pytest.fixture
def relative() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """Relative L2 error of a tensor against its expected value."""

    def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
        assert actual.shape == expected.shape and torch.isfinite(actual).all()
        return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()

    return error


@pytest.fixture
def make_config() -> Callable[..., object]:
    """A small configuration with the given fields changed."""
    from model.config import ModelConfig  # kernels are interpreted or not as they are imported, so not before the above

    return lambda **changes: ModelConfig(**(SHAPE | changes))


@pytest.fixture
def make_decoder(make_config) -> Callable[..., torch.nn.Module]:
    """A small decoder with random parameters: matrices, biases, offsets and shifts near 0, all others near 1."""
    from model.decoder import Decoder

    def make(seed: int = 5, **changes) -> Decoder:
        decoder = Decoder(make_config(**changes), seed=None)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in decoder.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            near_one = parameter.ndim < 2 and not name.endswith(("bias", "offset", "shift"))
            parameter.data = drawn * (0.3 if parameter.ndim < 2 else 0.12) + (1.0 if near_one else 0.02)
        return decoder

    return make


@pytest.fixture
def saved(make_decoder, tmp_path) -> Callable[..., Path]:
    """Save a small decoder with the given changes and return its directory."""
    from checkpoints.pretrained import save_pretrained

    def save(**changes) -> Path:
        save_pretrained(make_decoder(**changes), tmp_path / "model")
        return tmp_path / "model"

    return save


@pytest.fixture
def make_lora(saved) -> Callable[..., torch.nn.Module]:
    """A small decoder with a random adapter beside its weights; the base is in the directory that `saved` returns."""
    from checkpoints.adapters import fingerprint
    from checkpoints.pretrained import load_pretrained, open_checkpoint
    from model.lora import add_lora

    def make(compute_dtype: torch.dtype = torch.float32, **changes) -> torch.nn.Module:
        base = saved(**changes)
        decoder = load_pretrained(base, compute_dtype=compute_dtype, cast=True)
        decoder.lora_base = fingerprint(open_checkpoint(base).tensors)
        fields = {"r": 4, "lora_alpha": 7, "base_model_name_or_path": str(base)}
        return randomize_trained(add_lora(decoder, fields, seed=7))

    return make


@pytest.fixture
def triton() -> Iterator[None]:
    """Triton kernels for `kernels`' functions, and so for all decoders."""
    import kernels

    kernels.use("triton", torch.device("cpu"))
    yield
    kernels.use("auto", torch.device("cpu"))


@pytest.fixture
def tokens() -> torch.Tensor:
    """Two rows of 24 tokens."""
    return torch.randint(0, SHAPE["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(11))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line at the end: why tests were skipped, and how many."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.line("not tested here: " + "; ".join(f"{why} ({count})" for why, count in reasons.items()))
