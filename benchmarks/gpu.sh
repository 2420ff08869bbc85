#!/usr/bin/env bash
# Everything that only a GPU can show, in three parts of less than 9 minutes each:
#
#   bash benchmarks/gpu.sh tests|kernels|model [FOLDER]
#
# tests    the tests that need a GPU, then every kernel once under compute-sanitizer (memcheck, racecheck)
# kernels  benchmarks.kernels, one process for each family: after an illegal access a process cannot use the GPU again
# model    training steps of 124m, decoding with 1b
#
# Every step has its own time limit, and a step that fails does not stop the next. All output is also written to FOLDER
# (default: $OUT, else benchmarks/results/gpu), at most four files for each part. Exit status 1: a step failed.
#
# Needs torch, triton, numpy and a C compiler. Besides: pytest and pytest-xdist (tests), tqdm, tyro and tomli-w (tests
# and model), matplotlib (the picture of `kernels`). For a machine without a network, put the missing ones into wheels/
# on another machine, such as, for Python 3.12 on Linux:
#
#   pip download -d wheels --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 tyro tomli-w
set -u
cd "$(dirname "$0")/.." || exit 1
part=${1:-} folder=${2:-${OUT:-benchmarks/results/gpu}} python=${PYTHON:-python3} failed=()

case $part in
    tests) packages="numpy pytest pytest-xdist:xdist tyro tomli-w:tomli_w tqdm" ;;
    kernels) packages="numpy matplotlib" ;;
    model) packages="numpy tyro tomli-w:tomli_w tqdm" ;;
    *) echo "usage: bash benchmarks/gpu.sh tests|kernels|model [FOLDER]" >&2; exit 2 ;;
esac

# The pip names of the packages that Python cannot import.
missing() {
    local entry
    for entry in $packages; do
        "$python" -c "import ${entry#*:}" 2> /dev/null || echo "${entry%:*}"
    done
}

# step NAME SECONDS COMMAND...
step() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    echo "== $name (at most $limit s): $*"
    timeout --signal=TERM --kill-after=10 "$limit" "$@"
    status=$?
    echo "== $name: exit status $status after $((SECONDS - start)) s"
    [ "$status" = 0 ] || failed+=("$name")
}

# Every kernel that the model calls, on small inputs.
launch_all='
import torch
torch.set_default_device("cuda")
from benchmarks.resources import launches
for name, call in launches():
    print(name, flush=True)
    call()
    torch.cuda.synchronize()
'

run_tests() {
    step pytest 290 "$python" -m pytest -m gpu -n 0 tests/kernels
    local tool
    for tool in memcheck racecheck; do
        if command -v compute-sanitizer > /dev/null; then
            # Without torch's allocator, which would hide what lies outside a tensor and inside its pool.
            PYTORCH_NO_CUDA_MEMORY_CACHING=1 step "$tool" 110 \
                compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" -c "$launch_all"
        else
            echo "== $tool: not run, there is no compute-sanitizer"
        fi
    done
}

run_kernels() {
    local out=$folder/kernels.json
    rm -f "$out"
    step "rms norm" 150 "$python" -m benchmarks.kernels --out "$out" --only '^rms norm'
    step "head and loss" 100 "$python" -m benchmarks.kernels --out "$out" --only '^head and loss'
    step "SwiGLU" 110 "$python" -m benchmarks.kernels --out "$out" --only '^(SwiGLU|gate and up)'
    step "rotary" 60 "$python" -m benchmarks.kernels --out "$out" --only '^rotary'
    step "layer norm" 80 "$python" -m benchmarks.kernels --out "$out" --only '^layer norm'
}

run_model() {
    step decoding-128 110 "$python" -m benchmarks.decoding --config 1b --sequences 1 4 8 --cached 128 \
        --out "$folder/decoding-128.json"
    # The context of 1b is 4,096; the steps that are timed need room in it.
    step decoding-4000 110 "$python" -m benchmarks.decoding --config 1b --sequences 1 4 8 --cached 4000 \
        --out "$folder/decoding-4000.json"
    step training 280 "$python" -m benchmarks.training --config 124m --out "$folder/training.json"
}

main() {
    date
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1
    "$python" -c 'import platform, torch, triton; print(platform.python_version(), torch.__version__, triton.__version__)'
    local absent
    absent=$(missing)
    if [ -n "$absent" ] && [ -d wheels ]; then
        # shellcheck disable=SC2086
        timeout 60 "$python" -m pip install -q --no-index --find-links wheels $absent
        absent=$(missing)
    fi
    if [ -n "$absent" ]; then
        echo "Missing:" $absent "(the head of benchmarks/gpu.sh says how to install them)"
    fi
    "run_$part"
    echo "== $part: ${#failed[@]} steps failed${failed[*]:+: ${failed[*]}}"
    [ ${#failed[@]} = 0 ]
}

mkdir -p "$folder" || exit 1
export PYTHONUNBUFFERED=1
main 2>&1 | tee "$folder/$part.txt"
exit "${PIPESTATUS[0]}"
