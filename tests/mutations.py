"""Plausible bugs, each with the test that finds it: `python tests/mutations.py [PATTERN]`.

The script copies the tracked files into a temporary folder, makes one bug at a time there, and runs its test, which has
to fail. PATTERN, a regular expression, chooses bugs by file, line or test. The exit status is 1 if one survives.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

# @ file, - what stands there, + the bug in its place, ! the test (below tests/) that fails with each bug above it. When
# code moves to another file, its lines move below the "@" of that file.
TABLE = r"""
@ kernels/reference.py
- y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
+ y = y / (y.square().mean(-1, keepdim=True).sqrt() + eps)
! kernels/test_norm.py::test_output_and_gradients_equal_float64
@ kernels/norm.py
- mean = tl.sum(s, 1, keep_dims=True) / width
+ mean = tl.sum(s, 1, keep_dims=True) / BLOCK
! kernels/test_norm.py::test_half_precision_is_rounded_once_and_squares_do_not_overflow
@ kernels/cpu.py
- from_y = scale * (h - mean_h - xhat * mean_hx)
+ from_y = h - mean_h - xhat * mean_hx
! kernels/test_norm.py::test_output_and_gradients_equal_float64
@ kernels/rope.py
-         angle = batch * angle_stride + position * HALF + pair
+         angle = position * HALF + pair
! kernels/test_rotary.py::test_heads_are_multiplied_by_complex_numbers_and_so_are_gradients[triton-True-dtype1]
@ kernels/cross_entropy.py
- total = total * tl.exp(before - largest) + tl.sum(tl.exp(logits - largest[:, None]), axis=1)
+ total = total + tl.sum(tl.exp(logits - largest[:, None]), axis=1)
! kernels/test_triton_loss.py::test_rows_of_any_length_with_logits_of_80_are_exact_to_float32[4099]
@ model/norm.py
- return kernels.normalize(x, weight, self.bias, residual, kind=self.kind, eps=self.eps)
+ return kernels.normalize(x, weight, self.bias, residual, kind="rms", eps=self.eps)
! model/test_norm.py::test_values_and_gradients_equal_a_float64_formula[layer-True]
@ model/rope.py
- return self.cos[start : start + length], self.sin[start : start + length]
+ return self.cos[:length], self.sin[:length]
! model/test_decoder.py::test_decoding_with_a_cache_gives_the_same_logits
@ model/lora.py
- fields["r"], fields["lora_alpha"] / fields["r"])
+ fields["r"], fields["lora_alpha"])
! model/test_lora.py::test_logits_and_gradients_equal_those_of_peft_on_the_same_base
@ model/attention.py
- mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])  # (B, 1, T, T)
+ pass
! model/test_decoder.py::test_gradients_of_packed_documents_equal_those_of_one_document_a_row
@ model/inspect.py
- "to_previous": F.pad(weights.diagonal(-1, 1, 2), (1, 0)),
+ "to_previous": F.pad(weights.diagonal(-1, 1, 2), (0, 1)),
! model/test_inspect.py::test_figures_are_those_of_hidden_states_and_attentions_in_transformers[Qwen2]
@ model/config.py
- packed = {"qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv}}
+ packed = {"qkv_proj": {"q_proj": q, "v_proj": kv, "k_proj": kv}}
! checkpoints/test_transformers.py::test_a_saved_model_has_equal_logits_in_transformers_and_is_read_back_bit_equal
@ model/decoder.py
- x, residual = self.post_attention_layernorm(x, residual)
+ x, _ = self.post_attention_layernorm(x, residual)
! model/test_decoder.py::test_logits_equal_those_of_a_plain_float64_implementation
@ checkpoints/families.py
- if any(bias.any() for bias in biases):
+ if False:
! checkpoints/test_transformers.py::test_a_model_trained_further_by_transformers_has_equal_logits_here
@ contrib/gguf_file.py
- tensor.unflatten(0, (-1, 2, config.resolved_head_dim // 2))
+ tensor.unflatten(0, (-1, config.resolved_head_dim // 2, 2))
! contrib/test_gguf.py::test_the_file_computes_the_same_logits_by_the_conventions_of_llama_cpp
@ contrib/same.py
- tolerances=[2 * 2.0**-24 *
+ tolerances=[2.0**-6 *
! contrib/test_same.py::test_a_fault_in_a_copy_is_named_in_all_programs
@ contrib/programs.py
- "trust_remote_code": False}
+ "trust_remote_code": True}
! contrib/test_same.py::test_no_code_of_a_checkpoint_is_executed_and_nothing_is_unpickled
@ training/session.py
- checkpoint.load_moments(last, model, optimizer)
+ pass
! training/test_resume.py::test_16_steps_equal_8_and_8_resumed
@ training/checkpoint.py
- if not is_complete(target) and is_complete(candidate):
+ if is_complete(candidate):
- target.rename(old)
+ shutil.rmtree(target)
! training/test_crash_points.py::test_a_save_killed_at_any_rename_leaves_a_complete_checkpoint
@ data/batches.py
- *keys, offset = np.random.SeedSequence([seed, epoch])
+ *keys, offset = np.random.SeedSequence([seed + epoch])
! data/test_batches.py::test_an_epoch_takes_every_window_once_in_another_order_each_time
@ training/step.py
- predicted = sum(int((targets != IGNORED).sum()) for _, targets, *_ in micro_batches)
+ predicted = sum(targets.numel() for _, targets, *_ in micro_batches)
! training/test_step.py::test_the_gradient_is_that_of_the_mean_over_all_predicted_tokens_in_any_number_of_micro_batches
- scaler.unscale_(optimizer)
+ pass
! training/test_step.py::test_clipping_scales_the_gradient_of_all_parameters_to_the_limit
@ training/loop.py
- is_best = validation_loss is not None and (best is None or validation_loss < best)
+ is_best = validation_loss is not None
! training/test_loop.py::test_a_loss_that_rises_twice_is_a_note_also_where_the_run_was_resumed
- state.tokens += data.batch_size * data.sequence_length
+ state.tokens += data.batch_size // session.processes.count * data.sequence_length
! training/test_shard.py::test_two_processes_train_the_run_of_one_and_it_resumes_after_a_signal_or_a_kill
@ training/optimizer.py
- update = parameter.grad.lerp(momentum, MOMENTUM)
+ update = momentum
! training/test_optimizer.py::test_steps_equal_the_definition_in_float64_and_those_of_all_other_parameters_adamw
@ data/tokens.py
- document += tokens
+ pass
! data/test_batches.py::test_a_stream_is_the_chosen_documents_end_to_end
@ data/train_tokenizer.py
- byte_fallback=True,
+ byte_fallback=False,
! data/test_tokenizer.py::test_ids_and_texts_are_those_of_sentencepiece_for_any_text_and_ours_come_back_exactly
@ data/chat.py
- learned |= (token_ends > start) & (token_starts < end)
+ learned |= (token_starts >= start) & (token_starts <= end)
! data/test_conversations.py::test_without_generation_blocks_answers_are_the_spans_that_were_marked_by_hand
@ data/conversations.py
- row[1, start] = False  # no token of its conversation comes before it
+ pass
! data/test_conversations.py::test_packing_wastes_little_and_keeps_every_length
@ generation/cpu_step.py
- first = padding[b]
+ first = 0
! generation/test_cpu_step.py::test_logits_and_cache_equal_the_decoders
@ generation/generate.py
- while count < min(len(self.tokens), len(prompt) - 1) and self.tokens[count] == prompt[count]:
+ while count < min(len(self.tokens), len(prompt) - 1):
! generation/test_conversation.py::test_answers_are_those_of_a_fresh_cache_but_only_new_tokens_are_computed
@ generation/conversation.py
- while len(prompt) > room and len(kept) > 1:
+ while len(prompt) > self.context and len(kept) > 1:
! generation/test_conversation.py::test_no_more_turns_are_dropped_than_the_answer_needs_room
@ serving/answer.py
- logprobs = following
+ pass
! serving/test_server.py::test_logprobs_of_an_answer_are_those_of_its_text_and_its_ids_continue_it
@ generation/stream.py
- for start in range(len(text)) if
+ for start in reversed(range(len(text))) if
! generation/test_stream.py::test_only_a_possible_beginning_of_a_stop_string_is_held_back
@ generation/sampling.py
- (1 - torch.stack(uniform)) * sums[:, -1:]
+ 1 - torch.stack(uniform)
! generation/test_sampling.py::test_no_filtered_token_or_none_at_all_is_sampled_whatever_the_random_number_is
- dropped = (mass_before >= p) & (mass_before > 0)
+ dropped = (mass_before > p) & (mass_before > 0)
! generation/test_sampling.py::test_top_p_keeps_no_more_tokens_when_their_probability_is_exactly_p
@ benchmarks/timing.py
- for name in programs if turn % 2 else reversed(programs):
+ for name in programs:
! benchmarks/test_benchmarks.py::test_blocks_take_turns_in_an_order_that_reverses_after_every_turn
@ ablation/stats.py
- distance = margin - abs(float(differences.mean()))
+ distance = margin - float(differences.mean())
! ablation/test_stats.py::test_a_difference_as_large_as_the_margin_is_called_equivalent_in_at_most_5_of_100_studies
"""


class Mutation(NamedTuple):
    file: str
    old: str
    new: str
    test: str


MUTATIONS, changes = [], []
for line in TABLE.strip().splitlines():
    if line[0] == "@":
        file = line[2:]
    elif line[0] == "-":
        old = line[2:]
    elif line[0] == "+":
        changes.append((file, old, line[2:]))
    else:
        MUTATIONS += [Mutation(*change, f"tests/{line[2:]}") for change in changes]
        changes.clear()


def run_tests(folder: Path, *tests: str) -> subprocess.CompletedProcess:
    """Run tests in a copy of the project, in one process and without the environment of an outer pytest."""
    hidden = ("PYTEST_XDIST_WORKER", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    # Bytecode is found by the second and size of its source: that of one mutation would be run for the next.
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", *tests]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def main(pattern: str = "") -> int:
    """Try the mutations that PATTERN matches, and print a line for each; returns the exit status."""
    chosen = [m for m in MUTATIONS if re.search(pattern, f"{m.file}: {m.old} {m.test}")]
    results = []
    with tempfile.TemporaryDirectory() as name:
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for file in filter(lambda file: (ROOT / file).is_file(), tracked.split("\0")):
            (Path(name) / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, Path(name) / file)
        unchanged = run_tests(Path(name), *dict.fromkeys(mutation.test for mutation in chosen))
        if unchanged.returncode:
            print(f"{unchanged.stdout[-3000:]}\nwithout a mutation, the tests have to pass")
            return 1
        for mutation in chosen:
            path = Path(name) / mutation.file
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
            status = run_tests(Path(name), mutation.test).returncode
            path.write_text(text, encoding="utf-8")
            # 1 is a failed test; 2 to 5 are files that cannot be imported, and tests that do not exist.
            results.append({0: "SURVIVED", 1: "killed"}.get(status, f"not run: pytest exits with {status}"))
            print(f"{results[-1]:8} {mutation.file}: {mutation.new}", flush=True)
    print(f"{results.count('killed')} of {len(chosen)} killed")
    return int(results.count("killed") < len(chosen))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
