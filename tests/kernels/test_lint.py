"""What Triton's interpreter cannot see: rules about the source of the kernels, and about what ptxas makes of it.

The interpreter gives masked elements a 0, runs programs one after another, has one device and no limit on a grid: a
kernel that breaks one of these rules passes every other test on a CPU. Each rule is a function of source or of machine
code, and is proven by a copy in which it is broken.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernels import gpu

pytestmark = pytest.mark.skipif(gpu is None, reason="Triton is not installed")

ROOT = Path(__file__).parent.parent.parent
SOURCES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "kernels").glob("*.py"))}
DECODE_STEP = (ROOT / "model" / "fused_decode.py").read_text(encoding="utf-8")
TOKEN_COUNTS = {"rows", "tokens", "batch", "length", "sequences"}
# Compile-time extents that are powers of two themselves: a range over one has no padding.
EXACT = {"SPLITS"}
# Launch of gate_up_kernel: two tiles, one for few rows and one for many.
CONSTANTS_OF_TOKENS = {("gate_up_kernel", "tile")}


def name_of(node: ast.AST) -> str:
    """A dotted name such as tl.load, or an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return ""


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    """Calls of a function with this dotted name."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call) and name_of(node.func) == name)


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((one.value for one in call.keywords if one.arg == name), None)


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def jit_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [f for f in functions(tree) if any("triton.jit" in ast.unparse(one) for one in f.decorator_list)]


def launches(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls such as kernel[grid](...)."""
    for node in ast.walk(tree):
        is_launch = isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        if is_launch and name_of(node.func.value).endswith("_kernel"):
            yield node


def kernels_of(tree: ast.Module) -> list[ast.FunctionDef]:
    """Compiled functions that are launched; the others are called by these."""
    launched = {name_of(call.func.value) for call in launches(tree)}
    return [f for f in jit_functions(tree) if f.name in launched]


def names_in(node: ast.AST) -> set[str]:
    """Names that an expression depends on; not those that it only compares with None."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
        return set()
    own = {node.id} if isinstance(node, ast.Name) else set()
    return own.union(*map(names_in, ast.iter_child_nodes(node)))


def assignments(function: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names and what is assigned to them, in the order of the source; elements of tuples one by one."""
    for node in ast.walk(function):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
                elif isinstance(target, ast.Tuple):
                    values = node.value.elts if isinstance(node.value, ast.Tuple) else [None] * len(target.elts)
                    pairs = zip(target.elts, values, strict=False)
                    yield from ((t.id, v) for t, v in pairs if isinstance(t, ast.Name) and v is not None)


def made_of(expression: ast.expr, function: ast.AST) -> set[str]:
    """Names in an expression, and those in what is assigned to them in the function, and so on."""
    found, todo = set(), names_in(expression)
    assigned: dict[str, set[str]] = {}
    for name, value in assignments(function):
        assigned.setdefault(name, set()).update(names_in(value))
    while todo:
        name = todo.pop()
        found.add(name)
        todo |= assigned.get(name, set()) - found
    return found


def lint_other(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """A masked load without `other` gives undefined numbers on a GPU, and 0 in the interpreter."""
    for call in calls(tree, "tl.load"):
        masked = keyword(call, "mask") is not None or len(call.args) > 1
        if masked and keyword(call, "other") is None and len(call.args) < 3:
            yield call.lineno, "a masked tl.load needs `other=`"


def padded_range(node: ast.AST) -> bool:
    """Whether an expression contains a range that may be longer than what it counts."""
    return any(not names_in(call.args[1]) <= EXACT for call in calls(node, "tl.arange"))


def lint_masks(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """A range is padded to a power of two: what it addresses needs a mask. `# unmasked: why` on the line excuses it."""
    for function in jit_functions(tree):
        padded: set[str] = set()
        for _ in range(2):  # a loop's later lines come before its earlier ones
            for name, value in assignments(function):
                # A sum over the range, or a load from it, is a value and no address.
                kept = not isinstance(value, ast.Call) or name_of(value.func) in ("tl.arange", "tl.cast", "tl.where")
                if (padded & names_in(value) or padded_range(value)) and kept:
                    padded.add(name)
        for call in [*calls(function, "tl.load"), *calls(function, "tl.store")]:
            pointer = call.args[0]
            mask = keyword(call, "mask") is not None or len(call.args) > (1 if name_of(call.func) == "tl.load" else 2)
            excused = any("# unmasked:" in line for line in lines[call.lineno - 1 : call.end_lineno])
            if (padded & names_in(pointer) or padded_range(pointer)) and not mask and not excused:
                yield call.lineno, f"{name_of(call.func)} of a padded range needs a mask"


class Width:
    """Finds products that are computed in 32 bits although they grow with the number of tokens.

    Kinds of expressions: "index", a 32-bit number of a program or of a loop; "size", an argument of the kernel;
    "constant", which includes numbers inside a tile; "wide", 64 bits; "other", such as pointers and what was loaded.
    """

    def __init__(self, function: ast.FunctionDef, kinds: dict[str, str], helpers: dict[str, ast.FunctionDef]):
        self.kinds, self.helpers = dict(kinds), helpers
        self.found: dict[int, str] = {}
        self.returns: str | list[str] = "other"
        for _ in range(2):  # a loop's later lines come before its earlier ones
            self.body(function.body)

    def body(self, statements: list[ast.stmt]) -> None:
        for node in statements:
            if isinstance(node, ast.Assign):
                self.assign(node.targets[0], node.value)
            elif isinstance(node, ast.AnnAssign):
                self.kinds[node.target.id] = "constant"
            elif isinstance(node, ast.AugAssign):
                product = ast.BinOp(ast.Name(name_of(node.target)), node.op, node.value, lineno=node.lineno)
                self.kinds[name_of(node.target)] = self.kind(product)
            elif isinstance(node, ast.For):
                inner = [self.kind(one) for one in node.iter.args]
                unrolled = name_of(node.iter.func) == "tl.static_range" and set(inner) == {"constant"}
                self.kinds[node.target.id] = "constant" if unrolled else "index"
            elif isinstance(node, ast.Return) and node.value is not None:
                several = isinstance(node.value, ast.Tuple)
                self.returns = list(map(self.kind, node.value.elts)) if several else self.kind(node.value)
            elif isinstance(node, ast.Expr):
                self.kind(node.value)
            for part in ("body", "orelse"):
                self.body(getattr(node, part, []))

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            kind = self.kind(value)
            self.kinds[target.id] = kind if isinstance(kind, str) else join(*kind)
        elif isinstance(target, ast.Tuple):
            kinds = list(map(self.kind, value.elts)) if isinstance(value, ast.Tuple) else self.kind(value)
            kinds = kinds if isinstance(kinds, list) else [kinds] * len(target.elts)
            self.kinds.update({name_of(one): kind for one, kind in zip(target.elts, kinds, strict=True)})

    def kind(self, node: ast.expr) -> str | list[str]:
        """The kind of an expression; a list for a call that returns several results."""
        if isinstance(node, ast.Constant):
            return "constant"
        if isinstance(node, ast.Name):
            return self.kinds.get(node.id, "constant")
        if isinstance(node, ast.BinOp):
            kinds = self.kind(node.left), self.kind(node.right)
            narrow = isinstance(node.op, ast.Mult) and set(kinds) in ({"index", "size"}, {"size"})
            if narrow:
                self.found[node.lineno] = f"a 32-bit product that grows with the input: {ast.unparse(node)}"
            return join(*kinds)
        if isinstance(node, ast.UnaryOp):
            return self.kind(node.operand)
        if isinstance(node, ast.Subscript):
            kind = self.kind(node.value)
            return kind if isinstance(kind, str) else "other"
        if isinstance(node, ast.IfExp):
            return join(self.kind(node.body), self.kind(node.orelse))
        if isinstance(node, ast.Call):
            return self.call(node)
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.expr):
                self.kind(inner)
        return "other"

    def call(self, node: ast.Call) -> str | list[str]:
        inner = [self.kind(one) for one in [*node.args, *(one.value for one in node.keywords)]]
        name = name_of(node.func)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            self.kind(node.func.value)
            return "wide" if "int64" in ast.unparse(node.args[0]) else "other"
        if name == "tl.cast":
            return "wide" if "int64" in ast.unparse(node.args[1]) else "other"
        if name in ("tl.program_id", "tl.num_programs"):
            return "index"
        if name == "tl.arange":
            return "constant"
        if name in ("tl.cdiv", "tl.minimum", "tl.maximum", "tl.abs"):
            return join(*inner)
        if name == "tl.where":
            return join(*inner[1:])
        if name in self.helpers:
            names = [one.arg for one in self.helpers[name].args.args]
            helper = Width(self.helpers[name], dict(zip(names, inner, strict=False)), self.helpers)
            self.found |= helper.found
            return helper.returns
        return "other"


def join(*kinds: str) -> str:
    """The kind of what is computed from several."""
    return next(kind for kind in ("wide", "other", "index", "size", "constant") if kind in kinds)


def lint_64_bits(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """2^31 elements are exceeded in practice: a row becomes 64 bits wide before it is multiplied by a stride."""
    helpers = {function.name: function for function in jit_functions(tree)}
    for kernel in kernels_of(tree):
        sizes = [one.arg for one in kernel.args.args if one.annotation is None]
        kinds = {name: "other" if name.endswith("_ptr") else "size" for name in sizes}
        yield from sorted(Width(kernel, kinds, helpers).found.items())


def lint_grid(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Axes 1 and 2 of a grid have at most 65,535 programs: tokens belong on axis 0."""
    for function in functions(tree):
        for call in launches(function):
            grid = call.func.slice
            if isinstance(grid, ast.Name):
                grid = next((value for name, value in assignments(function) if name == grid.id), grid)
            for axis in grid.elts[1:] if isinstance(grid, ast.Tuple) else []:
                if TOKEN_COUNTS & made_of(axis, function):
                    yield call.lineno, f"a number of tokens on axis 1 of a grid: {ast.unparse(axis)}"


def lint_specialization(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Triton compiles again for an integer that is 1 or divisible by 16, unless it is in `do_not_specialize`."""
    numbers = {name_of(call.args[0]) for call in calls(tree, "tl.cast") if "float32" in ast.unparse(call.args[1])}
    for kernel in kernels_of(tree):
        listed: set[str] = set()
        for decorator in kernel.decorator_list:
            if isinstance(decorator, ast.Call) and keyword(decorator, "do_not_specialize") is not None:
                listed = set(eval(ast.unparse(keyword(decorator, "do_not_specialize"))))
        for one in kernel.args.args:
            if one.annotation is None and not one.arg.endswith("_ptr") and one.arg not in listed | numbers:
                yield kernel.lineno, f"{kernel.name}: {one.arg} is missing in do_not_specialize"


def lint_constants(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """A compile-time constant made of a number of tokens would compile for each of them."""
    for function in functions(tree):
        for call in launches(function):
            for one in call.keywords:
                named = name_of(call.func.value), ast.unparse(one.value)
                if TOKEN_COUNTS & made_of(one.value, function) and named not in CONSTANTS_OF_TOKENS:
                    yield call.lineno, f"{one.arg or ast.unparse(one.value)} depends on a number of tokens"


def lint_device(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Triton launches on the current device: `register_op` makes it that of the tensors.

    A function that launches is registered, or is called by registered ones alone.
    """
    found = functions(tree)
    guarded = {f.name for f in found if any("register_op" in ast.unparse(one) for one in f.decorator_list)}
    callers = {f.name: {g.name for g in found if f.name in names_in(ast.Module(g.body, []))} - {f.name} for f in found}
    for _ in found:
        guarded |= {name for name, by in callers.items() if by and by <= guarded}
    for function in found:
        if any(launches(function)) and function.name not in guarded:
            yield function.lineno, f"{function.name} launches a kernel outside of register_op"


def lint_decode_step(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """The functions of kernels.decode are called under `torch.cuda.device` alone, directly or through methods."""
    guards = {
        name for f in functions(tree) for name, value in assignments(f) if "torch.cuda.device(" in ast.unparse(value)
    }
    outside: set[str] = set()
    for function in functions(tree):
        inside = set()
        for node in ast.walk(function):
            if isinstance(node, ast.With):
                contexts = [ast.unparse(item.context_expr) for item in node.items]
                if any("torch.cuda.device(" in one or one in guards for one in contexts):
                    inside |= {id(one) for one in ast.walk(node)}
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and id(node) not in inside:
                outside.add(f"{function.name} -> {name_of(node.func)}")
    decoding = ast.parse(SOURCES["decode.py"])
    launching = {f"kernels.decode.{f.name}" for f in functions(decoding) if any(launches(f))}
    unsafe = {one.split(" -> ")[0] for one in outside if one.split(" -> ")[1] in launching}
    assert unsafe, "no function that launches is called here: has it moved?"
    for _ in functions(tree):
        unsafe |= {one.split(" -> ")[0] for one in outside if one.split(" -> self.")[-1] in unsafe}
    public = [f for f in functions(tree) if f.name in unsafe and (f.name == "__call__" or f.name not in called(tree))]
    yield from ((f.lineno, f"{f.name} reaches kernels.decode outside of torch.cuda.device") for f in public)


def called(tree: ast.Module) -> set[str]:
    """Methods that other methods call."""
    return {name_of(node.func).removeprefix("self.") for node in ast.walk(tree) if isinstance(node, ast.Call)}


def lint_precision(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """By default tl.dot rounds float32 to 10 bits (TF32) on a GPU, and not in the interpreter."""
    for call in calls(tree, "tl.dot"):
        precision = keyword(call, "input_precision")
        if not isinstance(precision, ast.Constant) or precision.value != "ieee":
            yield call.lineno, 'tl.dot needs input_precision="ieee"'


def lint_allocator(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Descriptors are made in memory that `triton.set_allocator` provides; the interpreter needs none."""
    makers = {f.name for f in jit_functions(tree) if any(calls(f, "tl.make_tensor_descriptor"))}
    for function in functions(tree):
        allocated = min((call.lineno for call in calls(function, "triton.set_allocator")), default=10**9)
        for call in launches(function):
            if name_of(call.func.value) in makers and call.lineno < allocated:
                yield call.lineno, "make_tensor_descriptor needs triton.set_allocator before the launch"


def lint_determinism(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Atomics add in an order that changes from run to run; the interpreter has one order."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("atomic_"):
            yield node.lineno, f"{node.attr} has no fixed order"


def lint_waiting(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """A host that waits for the device leaves it idle, and cannot be captured in a CUDA graph."""
    for node in ast.walk(tree):
        function = name_of(node.func) if isinstance(node, ast.Call) else ""
        if function.endswith((".item", ".tolist", ".cpu", ".nonzero")) or function == "torch.equal":
            yield node.lineno, f"{ast.unparse(node)} waits for the device"


# Where an edit changes nothing that the rule is about: products of numbers of positions or heads with compile-time
# constants, and grids of columns.
HARMLESS = {
    lint_grid: r"cdiv\(width",
    lint_64_bits: r"\* HEAD_DIM|\* \(2 \* HALF\)|head = tl\.program_id\(0\)",
}
Lint = Callable[[ast.Module, list[str]], Iterator[tuple[int, str]]]
TRITON = [name for name, text in SOURCES.items() if "@triton.jit" in text]
NOT_DECODING = [name for name in TRITON if name != "decode.py"]  # there, rows are those of a weight
# Each rule, the files that it holds for, and edits (a pattern, its replacement) each of which must break it.
RULES: dict[Lint, tuple[list[str], list[tuple[str, str]]]] = {
    lint_other: (TRITON, [(r', other=(?:0\.0|1\.0|float\("-inf"\))', "")]),
    lint_masks: (TRITON, [(r"(tl\.store\([^\n]*\w\w), mask=[^\n]*\)\n", r"\1)\n")]),
    lint_64_bits: (TRITON, [(r"\.to\(tl\.int64\)", ""), (r"tl\.cast\((\w+), tl\.int64\)", r"\1")]),
    lint_grid: (NOT_DECODING, [(r"_kernel\[\((.+),\)\]\(", r"_kernel[(1, \1)](")]),
    lint_specialization: (TRITON, [(r'do_not_specialize=\["\w+"', 'do_not_specialize=["eps"')]),
    lint_constants: (NOT_DECODING, [(r"ALIGNMENT=align", "ALIGNMENT=rows")]),
    lint_device: (NOT_DECODING, [(r"@register_op\(", "@unguarded(")]),
    lint_precision: (TRITON, [(r', input_precision="ieee"', "")]),
    lint_allocator: (TRITON, [(r"triton\.set_allocator\(", "triton.do_nothing(")]),
    lint_determinism: (TRITON, [(r"tl\.store\(", "tl.atomic_add(")]),
    lint_waiting: (TRITON, [(r"torch\.empty\((\w+)", r"torch.empty(\1.item()")]),
}


def violations(lint: Lint, text: str) -> list[str]:
    return [f"{line}: {message}" for line, message in lint(ast.parse(text), text.splitlines())]


@pytest.mark.parametrize("lint", RULES, ids=lambda lint: lint.__name__)
def test_the_kernels_keep_the_rule(lint):
    for name in RULES[lint][0]:
        assert violations(lint, SOURCES[name]) == [], f"kernels/{name}: {lint.__doc__}"


@pytest.mark.parametrize("lint", RULES, ids=lambda lint: lint.__name__)
def test_the_rule_sees_every_place_where_it_is_broken(lint):
    files, edits = RULES[lint]
    for pattern, replacement in edits:
        seen, missed = 0, []
        for name in files:
            for match in re.finditer(pattern, SOURCES[name]):
                text = SOURCES[name]
                broken = text[: match.start()] + match.expand(replacement) + text[match.end() :]
                line = text[: match.start()].count("\n")
                if violations(lint, broken):
                    seen += 1
                elif not re.search(HARMLESS.get(lint, "^$"), text.splitlines()[line]):
                    missed.append(f"{name}:{line + 1}: {text.splitlines()[line].strip()}")
        assert seen >= 1 and missed == [], pattern


def test_decoding_launches_on_the_device_of_its_tensors():
    assert violations(lint_decode_step, DECODE_STEP) == []
    assert violations(lint_decode_step, DECODE_STEP.replace("with device:", "if device:"))


def run_compiled(script: str) -> object:
    """What a process that compiles kernels prints last, as JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


SASS_OF_THE_LOSS = """
import json
from benchmarks.resources import disassemble, launches, pretend

recorder, found = pretend("sm_90"), {}
for name, call in launches():
    if name.startswith("loss and gradient"):
        found |= {f"{name}: {kernel}": disassemble(compiled, True) for kernel, compiled in recorder.record(call)}
print(json.dumps(found))
"""


def missing_barrier(sass: str) -> bool:
    """Whether a thread may replace the target's logit before another has read it.

    The logits are bfloat16 and read 16 bytes at a time; a single one that is read is the target's. It is no problem if
    the kernel reads none, because it takes the target's logit from the registers of the thread that read it.
    """
    steps = re.findall(r"\b(LDG\.E\.U16|BAR\.|STG\.E\.128)", sass)
    stores = [i for i, step in enumerate(steps) if step == "STG.E.128"]
    assert stores, "the logits are not replaced 16 bytes at a time"
    reads = [i for i, step in enumerate(steps[: stores[0]]) if step == "LDG.E.U16"]
    return bool(reads) and "BAR." not in steps[reads[-1] : stores[0]]


def test_the_logit_of_the_target_is_read_before_any_thread_replaces_it():
    codes = run_compiled(SASS_OF_THE_LOSS)
    assert codes
    for name, sass in codes.items():
        assert not missing_barrier(sass), name


def test_the_rule_of_the_barrier_sees_an_order_that_is_wrong():
    read, barrier, store = "LDG.E.U16 R8, desc[UR14][R4.64]", "BAR.SYNC.DEFER_BLOCKING 0x0", "STG.E.128 desc[UR14]"
    right = [barrier, read, "STG.E desc[UR14][R2.64], R5", barrier, store]
    assert not missing_barrier("\n".join(right)) and not missing_barrier("\n".join([barrier, store]))
    assert missing_barrier("\n".join([barrier, read, store, barrier]))


SWEEP_OF_TOKENS = """
import json, torch
from benchmarks.resources import inspect, pretend
from kernels import gpu, swiglu
from triton.runtime.jit import JITFunction

recorder, found = pretend("sm_90"), {}
(name, compiled), = recorder.record(lambda: swiglu.swiglu_gate_up(torch.zeros(32, 64), torch.zeros(128, 64), True))
tf32 = inspect("gate and up in float32", name, "sm_90", compiled).tf32
compile_only = JITFunction.run

def noting_the_grid(function, *arguments, grid, **options):
    kernel = compile_only(function, *arguments, grid=grid, **options)
    grid = (grid if isinstance(grid, tuple) else (grid,)) + (1, 1)
    found.setdefault(label, []).append((kernel.hash, grid[1:3]))
    return kernel

JITFunction.run = noting_the_grid
weight, head = torch.randn(64), torch.randn(64, requires_grad=True)
for tokens in (1, 16, 48, 1000, 70000):
    def new(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    x = new(1, tokens, 64)
    calls = {
        "norm": lambda: gpu.normalize(x, weight, weight, x, kind="layer", eps=1e-5),
        "wide norm": lambda: gpu.normalize(new(1, min(tokens, 100), 65536), kind="rms", eps=1e-5)[:1],
        "swiglu": lambda: (gpu.swiglu_mlp(x, new(128, 64), new(64, 64)),),
        "rotary": lambda: gpu.rotary(new(1, tokens, 256), torch.zeros(tokens, 32), torch.zeros(tokens, 32), 2, 1),
        "head norms": lambda: gpu.rotary(
            new(1, tokens, 256), torch.zeros(tokens, 32), torch.zeros(tokens, 32), 2, 1, head, head
        ),
        "loss": lambda: (gpu.linear_cross_entropy(x[0], new(72, 64), torch.zeros(tokens, dtype=torch.int64)),),
    }
    for name, call in calls.items():
        label = f"{tokens}, {name}"
        out = call()
        torch.autograd.backward(out, [torch.ones_like(one) for one in out])
print(json.dumps([tf32, found]))
"""


def test_more_tokens_launch_the_same_kernels_on_the_same_second_and_third_axes_of_the_grid():
    """And float32 matrices are not rounded to TF32 on their way to the tensor cores."""
    tf32, found = run_compiled(SWEEP_OF_TOKENS)
    assert tf32 == 0
    by_name: dict[str, list] = {}
    for label, launched in found.items():
        by_name.setdefault(label.partition(", ")[2], []).append(launched)
    assert len(by_name) == 6 and all(len(sweep) == 5 and sweep[0] for sweep in by_name.values())
    for name, (first, *others) in by_name.items():
        assert all(other == first for other in others), name
