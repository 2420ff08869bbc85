#!/usr/bin/env bash
# Everything that only a GPU can show, in the order in which the answers are wanted:
#
#   bash benchmarks/gpu.sh [FOLDER [STEP...]]     STEP.. means this step and all after it
#
# Every step has its own time limit, and a step that fails does not stop the next. All output is appended to
# FOLDER/gpu.txt (FOLDER: default $OUT, else benchmarks/results/gpu), and what a benchmark measured goes to
# STEP-MACHINE.json; the SM clock, power and temperature of every second go to clocks.csv. With LIMIT=570, no step is
# started that might run beyond 570 seconds; the last line then says how to continue. Exit status 1: a step failed, or
# none ran.
#
# Needs torch, triton, numpy, safetensors, msgspec, tqdm, pytest and a C compiler; to compare with it, transformers. The
# steps of train.py need all of requirements.txt. For a machine without a network, put the wheels of what it lacks into
# wheels/ on another machine; they are then installed into a temporary folder. For Python 3.12 on Linux:
#
#   pip download -d wheels --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \
#       tyro tomli-w typeguard docstring-parser msgspec
set -u
cd "$(dirname "$0")/.." || exit 1
folder=${1:-${OUT:-benchmarks/results/gpu}} chosen=("${@:2}") python=${PYTHON:-python3}
names=() failed=() from="" full=""
machine=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1 | tr 'A-Z ' 'a-z-')

# Whether the arguments ask for a step.
wanted() {
    local one
    [ ${#chosen[@]} = 0 ] || [ -n "$from" ] && return 0
    for one in "${chosen[@]}"; do
        [ "$one" = "$1.." ] && from=$1
        [ "${one%..}" = "$1" ] && return 0
    done
    return 1
}

# step NAME SECONDS COMMAND...
step() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    wanted "$name" && [ -z "$full" ] || return 0
    if [ $((start + limit)) -gt "${LIMIT:-1000000}" ]; then
        full=$name
        return
    fi
    names+=("$name")
    echo "== $name (at most $limit s): $*"
    timeout --signal=ABRT --kill-after=10 "$limit" "$@" | tee "$folder/last.txt"
    status=${PIPESTATUS[0]}
    if tail -n 1 "$folder/last.txt" | grep -q '^[[{]'; then
        tail -n 1 "$folder/last.txt" > "$folder/$name-$machine.json"
    fi
    echo "== $name: exit status $status after $((SECONDS - start)) s"
    [ "$status" = 0 ] || failed+=("$name")
}

training() { # NAME SECONDS CONFIG NORMS VARIANT...
    step "$1" "$2" "$python" -m benchmarks.training --config "$3" --norms "$4" --variants "${@:5}"
}

kernels() { # NAME SECONDS PATTERN: one process for each family, since after an illegal access it cannot use the GPU
    step "$1" "$2" "$python" -m benchmarks.kernels --only "$3"
}

tests() { # NAME SECONDS FLAGS...
    step "$1" "$2" "$python" -m pytest -o addopts=--import-mode=importlib -m gpu --tb=line -v tests/kernels "${@:3}"
}

# Tests that run each kernel once against float64; pytest takes no line break here.
smoke="norms_are_within and 2048-1024 or 1000-2816-dtype2"
smoke+=" or rotary_is_within and dtype2-0.00175-32-8-128-0 or 5003-dtype2 or graph_of_the_decoding and lengths0"

main() {
    local tool scratch ours="Triton and torch.compile"
    local decoders=(transformers "transformers compiled" "plain decoder" ours)
    date
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1
    scratch=$(mktemp -d)
    if compgen -G "wheels/*.whl" > /dev/null; then
        timeout 60 "$python" -m pip install -q --no-index --no-deps --no-compile --target "$scratch/site" wheels/*.whl
        export PYTHONPATH=$scratch/site${PYTHONPATH:+:$PYTHONPATH}
    fi
    "$python" -c 'import platform, torch, triton; print(platform.python_version(), torch.__version__, triton.__version__)'
    nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu --format=csv,noheader,nounits -l 1 \
        >> "$folder/clocks.csv" 2> /dev/null &
    local sampler=$!

    tests smoke 90 -k "$smoke"
    training 124m 300 124m rms "$ours" torch.compile
    step train.py 280 "$python" train.py --config 124m --data python --steps 40 --warmup-steps 10 \
        --cache "$scratch/cache" --out "$scratch/run"
    training layer 300 124m layer "$ours" torch.compile
    training 1b 150 1b rms "$ours" # one variant and norm each: two together may need too much memory
    training 1b-plain 150 1b rms torch.compile
    training 1b-layer 150 1b layer "$ours"
    kernels norms 240 '^(rms|layer) norm'
    kernels loss 120 '^head and loss'
    step decoding-128 180 "$python" -m benchmarks.decoding --shapes 1b --dtypes bfloat16 \
        --programs "${decoders[@]}" --sequences 1 8 --prompt 128
    step decoding-4000 240 "$python" -m benchmarks.decoding --shapes 1b --dtypes bfloat16 \
        --programs "${decoders[@]}" --sequences 1 4 8 --prompt 4000
    training transformers 180 124m rms "$ours" "transformers and torch.compile" transformers
    kernels others 200 '^(SwiGLU|rotary)'
    tests tests 300
    for tool in memcheck racecheck; do
        if command -v compute-sanitizer > /dev/null; then
            # Without torch's allocator, which would hide what lies outside a tensor and inside its pool.
            PYTORCH_NO_CUDA_MEMORY_CACHING=1 step "$tool" 240 compute-sanitizer --tool "$tool" --error-exitcode 1 \
                --target-processes all "$python" -m pytest -o addopts=--import-mode=importlib -m gpu tests/kernels -k "$smoke"
        elif wanted "$tool"; then
            echo "== $tool: not run, there is no compute-sanitizer"
        fi
    done

    kill "$sampler" 2> /dev/null
    rm -rf "$scratch"
    echo "== ${#names[@]} steps, ${#failed[@]} failed${failed[*]:+: ${failed[*]}}"
    [ -z "$full" ] || echo "== continue with: bash benchmarks/gpu.sh $folder $full.."
    [ ${#failed[@]} = 0 ] && [ ${#names[@]} -gt 0 ]
}

mkdir -p "$folder" || exit 1
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 # at its time limit, a step says where it was
main 2>&1 | tee -a "$folder/gpu.txt"
exit "${PIPESTATUS[0]}"
