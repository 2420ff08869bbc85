#!/usr/bin/env bash
# What only a GPU can show, the most wanted answers first: `bash benchmarks/gpu.sh [STEP...]`, by default all steps.
#
# A step that fails, or takes ten minutes, does not stop the next one. $OUT (default: runs/gpu) gets gpu.txt, which is
# all output, STEP-MACHINE.json, what a benchmark measured, and clocks.csv: SM clock, power and temperature of every
# second. Exit status 1: a step failed, or none ran. Needs requirements.txt, triton, transformers, pytest, a C compiler.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
out=${OUT:-runs/gpu} python=${PYTHON:-python3} chosen=" $* " ran=() failed=() scratch=$(mktemp -d)
mkdir -p "$out" || exit 1
exec > >(tee -a "$out/gpu.txt") 2>&1
machine=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr 'A-Z ' 'a-z-')
nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu --format=csv,noheader -l 1 >> "$out/clocks.csv" &
trap 'kill $! 2> /dev/null; rm -rf "$scratch"' EXIT
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 # at its time limit, a step says where it was

step() { # NAME COMMAND...
    local name=$1
    shift
    if [[ $chosen != "  " && $chosen != *" $name "* ]]; then return; fi
    echo "== $name, after $SECONDS s: $*"
    ran+=("$name")
    timeout --signal=ABRT --kill-after=10 600 "$@" | tee "$scratch/output" || failed+=("$name")
    if tail -n 1 "$scratch/output" | grep '^{' > "$scratch/json"; then cp "$scratch/json" "$out/$name-$machine.json"; fi
}

training() { step "$1" "$python" -m benchmarks.training --config "$2" --norms "$3" --variants "${@:4}"; }
kernels() { step "$1" "$python" -m benchmarks.kernels --only "$2"; }
decoding() { step "$1" "$python" -m benchmarks.decoding --shapes 1b --dtypes bfloat16 --programs "${@:2}"; }
tests() { # NAME PATTERN [TOOL...]
    step "$1" "${@:3}" "$python" -m pytest -o addopts=--import-mode=importlib -m gpu --tb=line -v tests/kernels -k "$2"
}

ours="Triton and torch.compile" programs=(transformers "transformers compiled" "plain decoder" ours)
# Tests that run each kernel once against float64.
smoke="norms_are_within and 2048-1024 or 1000-2816-dtype2 or rotary_is_within and dtype2-32-8-128-0-False"
smoke+=" or 5003-dtype2 or graph_of_the_decoding and lengths0"

tests smoke "$smoke"
training 124m 124m rms "$ours" torch.compile
step train.py "$python" train.py --config 124m --data python --steps 40 --warmup-steps 10 \
    --cache "$scratch/cache" --out "$scratch/run"
training layer 124m layer "$ours" torch.compile
training 1b 1b rms "$ours" # one variant and norm each: two together may need too much memory
training 1b-plain 1b rms torch.compile
training 1b-layer 1b layer "$ours"
kernels norms '^(rms|layer) norm' # a process for each family: after an illegal access it cannot use the GPU
kernels loss '^head and loss'
decoding decoding-128 "${programs[@]}" --sequences 1 8 --prompt 128
decoding decoding-4000 "${programs[@]}" --sequences 1 4 8 --prompt 4000
training transformers 124m rms "$ours" "transformers and torch.compile" transformers
kernels others '^(SwiGLU|rotary)'
tests tests ""
if command -v compute-sanitizer > /dev/null; then
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # torch's allocator would hide what is outside a tensor, in its pool
    tests memcheck "$smoke" compute-sanitizer --tool memcheck --error-exitcode 1 --target-processes all
    tests racecheck "$smoke" compute-sanitizer --tool racecheck --error-exitcode 1 --target-processes all
fi
echo "== ${#ran[@]} steps, failed: ${failed[*]:-none}"
[ ${#failed[@]} = 0 ] && [ ${#ran[@]} -gt 0 ]
