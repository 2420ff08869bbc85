#!/usr/bin/env bash
# What only a GPU can show, the most wanted answers first: `bash benchmarks/gpu.sh [STEP...]`, by default all steps.
#
# A step that fails, or takes ten minutes, does not stop the next one. $OUT (default: runs/gpu) gets STEP-MACHINE.json:
# what a benchmark measured, or the last lines of another step that passed; STEP-MACHINE.partial.json has the tables of
# a step that did not end. A step with a result is skipped, so the same command continues. gpu.txt is all output,
# clocks.csv SM clock, power and temperature of every second. Exit status 1: a step failed, or none was chosen. Needs
# requirements.txt, triton, transformers, pytest, a C compiler, nvidia-smi.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
out=${OUT:-runs/gpu} python=${PYTHON:-python3} chosen=$* steps=() failed=() scratch=$(mktemp -d)
mkdir -p "$out" || exit 1
exec > >(tee -a "$out/gpu.txt") 2>&1
machine=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr 'A-Z ' 'a-z-')
nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu --format=csv,noheader -l 1 >> "$out/clocks.csv" &
trap 'kill $! 2> /dev/null; rm -rf "$scratch"' EXIT
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 # at its time limit, a step says where it was

step() { # NAME COMMAND...
    local last name=$1 result=$out/$1-$machine.json
    shift
    if [[ -n $chosen && " $chosen " != *" $name "* ]]; then return; fi
    steps+=("$name")
    if [ -e "$result" ]; then echo "== $name: skipped, $result exists"; return; fi
    echo "== $name, after $SECONDS s: $*"
    if timeout --signal=ABRT --kill-after=10 600 "$@" | tee "$scratch/output"; then
        if ! tail -n 1 "$scratch/output" | grep '^{' > "$scratch/json"; then
            last=$(tail -n 3 "$scratch/output" | tr -d '\\"\t' | paste -sd ';')
            printf '{"passed": "%s"}\n' "$last" > "$scratch/json"
        fi
        cp "$scratch/json" "$result"
    else
        failed+=("$name")
        if grep '^{' "$scratch/output" > "$scratch/json"; then cp "$scratch/json" "${result%.json}.partial.json"; fi
    fi
}

train=("$python" train.py --cache "$scratch/cache" --out) # the default run: Python's standard library, 720 steps
training=("$python" -m benchmarks.training) kernels=("$python" -m benchmarks.kernels)
decoding=("$python" -m benchmarks.decoding --dtypes bfloat16)
decoding+=(--programs transformers "transformers and torch.compile" "plain decoder" ours)
tests=("$python" -m pytest -o addopts=--import-mode=importlib --tb=line -v tests/kernels)
triton="Triton and torch.compile"

step smoke "${tests[@]}" -m smoke
step train-rms "${train[@]}" "$scratch/rms" --norm rms
step train-layer "${train[@]}" "$scratch/layer" --norm layer
step 124m-rms "${training[@]}" --config 124m --norms rms \
    --variants "$triton" torch.compile "transformers and torch.compile"
step 124m-layer "${training[@]}" --config 124m --norms layer --variants "$triton" torch.compile
step decoding-124m "${decoding[@]}" --shapes 124m --sequences 1 8 --prompts 128
step decoding-1b "${decoding[@]}" --shapes 1b --sequences 1 8 --prompts 128
step decoding-1b-4000 "${decoding[@]}" --shapes 1b --sequences 1 4 8 --prompts 4000
step 1b-rms "${training[@]}" --config 1b --norms rms --variants "$triton" # two variants may need too much memory
step 1b-plain "${training[@]}" --config 1b --norms rms --variants torch.compile
step 1b-layer "${training[@]}" --config 1b --norms layer --variants "$triton"
step norms "${kernels[@]}" --only '^(rms|layer) norm' # alone: after an illegal access a process cannot use the GPU
step loss "${kernels[@]}" --only '^head and loss'
step swiglu "${kernels[@]}" --only '^SwiGLU'
step rotation "${kernels[@]}" --only '^rotary'
# Longer than ten minutes, but runs that have ended stay: the same command continues.
step many-seeds-5e-4 "$python" ablate.py many-seeds-5e-4 --jobs 8 --out "$out/many-seeds-5e-4-$machine"
step tests "${tests[@]}" -m gpu
if command -v compute-sanitizer > /dev/null; then
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # torch's allocator would hide what is outside a tensor, in its pool
    step memcheck compute-sanitizer --tool memcheck --error-exitcode 1 --target-processes all "${tests[@]}" -m smoke
    step racecheck compute-sanitizer --tool racecheck --error-exitcode 1 --target-processes all "${tests[@]}" -m smoke
fi
wanted=$(wc -w <<< "$chosen")
echo "== ${#steps[@]} steps${chosen:+ of $wanted}, failed: ${failed[*]:-none}"
[ ${#failed[@]} = 0 ] && [ ${#steps[@]} -gt 0 ] && [ ${#steps[@]} -ge "$wanted" ]
