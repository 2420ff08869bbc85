"""`benchmarks.kernels` without a GPU: what it would measure there, every line of it, and what its rows are times of."""

import json
import os
import signal
import sys
import time
import types

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import kernels
from benchmarks import cases, output, timing
from benchmarks import kernels as benchmark
from benchmarks.cases import BF16_WEIGHT, ONE_KERNEL, RMS_TWIN, SHAPES, NormShape, Shapes, mlp, run_fused_gate_up
from benchmarks.kernels import make_calls, measure, table
from kernels import gpu, reference

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
triton_only = pytest.mark.skipif(gpu is None, reason="Triton is not installed")


class Instead(TorchFunctionMode):
    """Whatever is asked for on a GPU is made on another device."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs = kwargs | {"device": self.device}
        return function(*args, **kwargs)


def liger_stand_ins() -> dict[str, types.ModuleType]:
    """Modules with the functions of Liger 0.8.5 that are called, with their parameters, computed by torch."""

    class LigerRMSNormFunction:
        @staticmethod
        def apply(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
            assert in_place  # its own default
            return F.rms_norm(X, W.shape, W, eps)

    class LigerFusedAddRMSNormFunction:
        @staticmethod
        def apply(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True):
            assert in_place
            return F.rms_norm(X + R, W.shape, W, eps), X + R

    class LigerLayerNormFunction:
        @staticmethod
        def apply(X, W, B, eps):
            return F.layer_norm(X, W.shape, W, B, eps)

    class LigerSiLUMulFunction:
        @staticmethod
        def apply(a, b, gate_multiplier=1.0, down_multiplier=1.0):
            return F.silu(a) * b

    class LigerFusedLinearCrossEntropyFunction:
        @staticmethod
        def apply(_input, weight, target, bias=None, ce_weight=None, ignore_index=-100):
            return F.cross_entropy(F.linear(_input, weight).float(), target), None, None, None

    modules = {
        "rms_norm": LigerRMSNormFunction,
        "fused_add_rms_norm": LigerFusedAddRMSNormFunction,
        "layer_norm": LigerLayerNormFunction,
        "swiglu": LigerSiLUMulFunction,
        "fused_linear_cross_entropy": LigerFusedLinearCrossEntropyFunction,
    }
    found = {name: types.ModuleType(name) for name in ("liger_kernel", "liger_kernel.ops")}
    for name, function in modules.items():
        found[f"liger_kernel.ops.{name}"] = types.SimpleNamespace(**{function.__name__: function})
    return found


class Event:
    """Stands in for `torch.cuda.Event` on a device that works at once; the pause comes before the first one."""

    queries = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.time = time.perf_counter()

    def query(self):
        Event.queries += 1
        return Event.queries == 1  # the first pause was too short

    def elapsed_time(self, other):
        return (other.time - self.time) * 1e3


@pytest.fixture
def pretended_gpu(monkeypatch):
    """An H200 whose tensors are a CPU's and whose kernels are interpreted; Liger is installed, nothing is compiled."""
    for name, module in liger_stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    pauses, memory = [], iter(range(10**9))
    monkeypatch.setattr(Event, "queries", 0)
    stand_ins = {
        "Event": Event,
        "_sleep": pauses.append,
        "synchronize": lambda device=None: None,
        "memory_allocated": lambda device=None: 10**9 + next(memory),
        "max_memory_allocated": lambda device=None: 2 * 10**9,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_name": lambda device=None: "NVIDIA H200",
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(cases, "has_liger", lambda device: device.type == "cuda")
    monkeypatch.setattr(kernels, "find_gpu_obstacle", lambda device: None)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    return pauses


SMALL = Shapes(
    norms=(
        NormShape("rms", 6, 64, mixed=True),
        NormShape("layer", 6, 64, after_addition=True),
        NormShape("layer", 6, 64),
    ),
    activations=((6, 64),),
    gate_ups=((6, 64, 32),),
    mlps=((6, 64, 32),),
    rotaries=((16, 2, 1, 16),),
    losses=((6, 16, 40),),
)


@pytest.fixture
def rehearse(pretended_gpu, monkeypatch):
    """Run the command on the pretended GPU, over small shapes; returns the exit status."""
    monkeypatch.setitem(SHAPES, "cuda", SMALL)
    monkeypatch.setattr(benchmark, "ROUNDS", 1)
    monkeypatch.setattr(benchmark, "BEYOND_CACHE", 2e3)
    monkeypatch.setattr(timing, "HOST_REPEATS", 2)
    monkeypatch.setitem(timing.COPY_BYTES, "cuda", 2**12)
    monkeypatch.setitem(timing.PRODUCT_SIZE, "cuda", 16)
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["benchmarks.kernels", "--device", "cuda", "--repeats", "2", *arguments])
        with Instead(CPU):
            return benchmark.main()

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def made_up(monkeypatch):
    """Replaces measuring: every part takes a little longer from case to case. Lists the cases."""
    measured = []

    def measure(case, device, repeats):
        measured.append(case.name)
        one = dict.fromkeys(output.PARTS, float(len(measured))) | {"host": 1.0, "peak_bytes": 0, "kept_bytes": None}
        return {name: dict(one) for name in case.baselines}

    monkeypatch.setattr(benchmark, "measure", measure)
    return measured


@triton_only
def test_on_a_gpu_every_case_is_measured_and_written(rehearse, pretended_gpu, capsys, tmp_path):
    out = tmp_path / "out.json"
    rehearse("--out", str(out))
    lines = capsys.readouterr().out.splitlines()
    results = json.loads(out.read_text(encoding="utf-8"))
    assert json.loads(lines[-1]) == results and results["machine"]["device"] == "NVIDIA H200"
    found = {case["name"]: case for case in results["cases"]}
    with Instead(CPU):
        expected = list(cases.cases(CUDA))
    assert list(found) == [case.name for case in expected] and len(found) == 10
    for case in expected:
        baselines = found[case.name]["baselines"]
        assert list(baselines) == list(case.baselines)
        not_run = {name: one["not_run"] for name, one in baselines.items() if "not_run" in one}
        assert all("token_weights" in reason for reason in not_run.values()), (case.name, not_run)
        for one in baselines.values():
            if "not_run" not in one:
                assert all(one[part] > 0 for part in benchmark.parts_of(case))
                assert one["host"] > 0 and one["peak_bytes"] > 0 and set(one["share_of_limit"]) <= set(output.PARTS)
    first = found["rms norm, 6 x 64"]
    assert "Liger" in first["baselines"] and BF16_WEIGHT in first["baselines"]
    assert RMS_TWIN in found["layer norm, 6 x 64"]["baselines"]
    assert ONE_KERNEL in found["gate and up in inference, 6 x 64, 32 wide"]["baselines"]
    assert pretended_gpu[:3] == [*timing.PAUSES, timing.PAUSES[0]]  # a pause that is too short is followed by a longer
    assert (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.usefixtures("made_up")
def test_results_of_another_run_stay_and_a_case_that_is_measured_again_is_replaced(rehearse, tmp_path):
    out = tmp_path / "out.json"
    read = lambda: json.loads(out.read_text(encoding="utf-8"))  # noqa: E731
    rehearse("--out", str(out), "--only", "^layer norm after")
    first = read()
    rehearse("--out", str(out), "--only", "^layer norm")
    assert first["cases"][0]["baselines"]["ours"]["both"] == 1
    assert [(case["name"], case["baselines"]["ours"]["both"]) for case in read()["cases"]] == [
        ("layer norm after addition, 6 x 64", 2),
        ("layer norm, 6 x 64", 3),
    ]
    results = read()
    results["machine"]["device"] = "NVIDIA H100"
    out.write_text(json.dumps(results), encoding="utf-8")
    for content, words in ((json.dumps(results), "has results of NVIDIA H100"), ("[]", "holds no results")):
        out.write_text(content, encoding="utf-8")
        with pytest.raises(benchmark.UserError, match=words):
            rehearse("--out", str(out), "--only", "^layer norm")
        assert out.read_text(encoding="utf-8") == content
    with pytest.raises(benchmark.UserError, match="no case matches"):
        rehearse("--only", "nothing")


def test_a_run_that_is_stopped_leaves_the_results_and_the_picture_of_what_it_measured(
    rehearse, made_up, tmp_path, monkeypatch
):
    made_up_measure = benchmark.measure

    def stop_at_the_second(*arguments):
        if made_up:
            os.kill(os.getpid(), signal.SIGTERM)  # as `timeout` does
        return made_up_measure(*arguments)

    monkeypatch.setattr(benchmark, "measure", stop_at_the_second)
    out = tmp_path / "out.json"
    with pytest.raises(KeyboardInterrupt):
        rehearse("--out", str(out), "--only", "^layer norm")
    assert (
        [case["name"] for case in json.loads(out.read_text(encoding="utf-8"))["cases"]]
        == made_up
        == ["layer norm after addition, 6 x 64"]
    )
    assert (tmp_path / "out.png").exists() and not (tmp_path / "out.json.new").exists()


@pytest.mark.usefixtures("made_up")
def test_without_matplotlib_the_results_are_written_without_a_picture(rehearse, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    rehearse("--out", str(tmp_path / "out.json"), "--only", "^layer norm after")
    assert "No picture: " in capsys.readouterr().out and os.listdir(tmp_path) == ["out.json"]


def test_results_of_a_cpu_are_kept_only_beside_those_of_the_same_processor():
    this = {"device": "CPU, 2 threads", "processor": "A"}
    assert output.same_device(this, this)
    assert not output.same_device(this | {"processor": "B"}, this)
    gpus = {"device": "NVIDIA H100", "processor": "A"}, {"device": "NVIDIA H100", "processor": "B"}
    assert output.same_device(*gpus)


@triton_only
@pytest.mark.usefixtures("pretended_gpu")
def test_on_the_shapes_of_a_gpu_all_baselines_return_what_ours_returns_and_the_bytes_are_those_of_the_tensors():
    with Instead(torch.device("meta")):
        for case in cases.cases(CUDA):
            sets = [case.make()]
            assert all(tensor.is_meta for tensor in sets[0])
            expected = None
            for name in case.baselines:
                if "weighted" in case.name and name == "ours":
                    continue
                calls, output = make_calls(case, name, sets)
                expected = output if expected is None else expected
                # torch's own functions return float32 norms of a float32 weight, and bfloat16 losses.
                free = name.endswith("float32 weight") or name == "F.linear_cross_entropy"
                assert output.shape == expected.shape and (free or output.dtype == expected.dtype), (case.name, name)
                if case.name.startswith(("rms", "layer")):
                    weight = case.prepare.get(name, lambda *tensors: tensors)(*sets[0])[1]
                    rounded = name in ("F.rms_norm", "F.layer_norm", "Liger", BF16_WEIGHT)
                    assert weight.dtype == (torch.bfloat16 if rounded else torch.float32), (case.name, name)
                for part in calls:
                    calls[part][0]()
            if case.forward_bytes:
                inputs, ours = sets[0], case.baselines["ours"]
                outputs = benchmark.as_tuple(ours(*inputs))
                elements = sum(one.numel() for one in (*inputs, *outputs))
                if case.name.startswith("rotary"):  # v could be a view
                    elements -= 2 * outputs[2].numel()
                assert 2 * elements == pytest.approx(case.forward_bytes, rel=0.02), case.name


def test_the_bytes_of_a_backward_pass_are_those_of_the_tensors():
    """6 bytes for each element of a norm, 8 with the addition, 12 of SwiGLU, which writes hidden again."""
    elements = 6 * 64
    assert cases.norm(CPU, NormShape("rms", 6, 64)).backward_bytes == 6 * elements
    assert cases.norm(CPU, NormShape("layer", 6, 64, after_addition=True)).backward_bytes == 8 * elements
    assert cases.activation(CPU, 6, 64).backward_bytes == 12 * elements
    # 2 + 1 heads read, 1 of v too, and the packed gradient of all 4 written; with the norms, q and k read again.
    assert cases.rotary(CPU, 16, 2, 1, 8, normed=False).backward_bytes == 16 * 8 * 2 * (4 + 4)
    assert cases.rotary(CPU, 16, 2, 1, 8, normed=True).backward_bytes == 16 * 8 * 2 * (4 + 4 + 3)


def test_inputs_take_turns_beyond_the_cache_and_memory_is_that_of_forward_and_backward(monkeypatch):
    case = mlp(CPU, 4, 16, 24, torch.bfloat16)
    case.baselines = {"ours": case.baselines["ours"]}
    size = 2 * sum(tensor.numel() for tensor in case.make())
    monkeypatch.setattr(benchmark, "BEYOND_CACHE", 3.2 * size)
    assert len(benchmark.make_inputs(case, CUDA)) == 4 and len(benchmark.make_inputs(case, CPU)) == 2
    monkeypatch.setattr(benchmark, "peak_bytes", lambda call, device: len(call()))
    monkeypatch.setattr(benchmark, "host_seconds", lambda call, device: len(call()))
    ours = measure(case, CPU, 1)["ours"]
    assert ours["peak_bytes"] == ours["host"] == 3  # a gradient of each input


@triton_only
def test_the_row_of_the_fused_mlp_runs_it_and_fails_where_another_path_would_run(draw, relative):
    x, gate_up, down = draw(6, 64), draw(2 * 88, 64, std=0.2), draw(64, 88, std=0.2)
    expected = reference.swiglu_mlp(x.double(), gate_up, down)
    assert relative(run_fused_gate_up(CPU, x, gate_up, down), expected) < 1e-6
    with pytest.raises(RuntimeError, match="sizes divisible by 8"):
        run_fused_gate_up(CPU, x, gate_up[:168], down[:, :84])
    assert kernels.implementation(CPU) is kernels.cpu  # as before


@triton_only
def test_the_row_of_gate_and_up_in_one_kernel_fails_where_two_would_run(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    case = cases.gate_up(CPU, 6, 64, 84)
    case.baselines = {name: case.baselines[name] for name in ("ours", ONE_KERNEL)}
    found = measure(case, CPU, 2)
    assert "sizes divisible by 8" in found[ONE_KERNEL]["not_run"] and found["ours"]["forward"] > 0


def test_a_baseline_that_fails_or_differs_is_reported_and_the_others_are_measured():
    case = mlp(CPU, 4, 16, 24, torch.bfloat16)
    ours = case.baselines["ours"]

    def fail(*inputs):
        raise RuntimeError("not on this GPU")

    case.baselines = {"ours": ours, "fails": fail, "differs": lambda *inputs: ours(*inputs) * 1.1, "again": ours}
    found = measure(case, CPU, 5)
    assert found["fails"] == {"not_run": "not on this GPU"} and found["ours"]["both"] > 0 and found["again"]["both"] > 0
    assert found["differs"]["not_run"].startswith("its result and that of ours differ by 1.0e-01")
    assert "| fails | not run: not on this GPU | | | | | | |" in table(case, found, 1e9, 1e12)


@pytest.mark.parametrize("broken", [{"ours": "no"}, {"torch.compile": "its result and that of ours differ by 1e-1"}])
def test_the_exit_status_is_1_where_ours_did_not_run_or_a_baseline_computed_something_else(
    rehearse, monkeypatch, broken
):
    one = dict.fromkeys(output.PARTS, 1.0) | {"host": 1.0, "peak_bytes": 0, "kept_bytes": None}

    def measure(case, *_) -> dict[str, dict]:
        return {name: {"not_run": broken[name]} if name in broken else dict(one) for name in case.baselines}

    monkeypatch.setattr(benchmark, "measure", measure)
    assert rehearse("--only", "^layer norm after") == 1
    broken.clear()
    assert rehearse("--only", "^layer norm after") == 0
