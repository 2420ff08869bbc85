"""The answers to lm-eval's requests are those of its own `hf` model.

Run with `pip install lm_eval accelerate`, then `python -m pytest -m slow tests/contrib`.
"""

import json
from pathlib import Path

import pytest
import torch

from checkpoints.pretrained import save_pretrained
from data.train_tokenizer import train_tokenizer

TEXT = ["the quick brown fox jumps over the lazy dog, and runs away.\n" * 3]
TASKS = {
    "rolling": (
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list:\n  - metric: byte_perplexity\n",
        [{"text": text} for text in (TEXT[0], "fox", "x" * 60)],
    ),
    "choice": (
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: choices\ndoc_to_target: answer\n"
        "target_delimiter: ''\nmetric_list:\n  - metric: acc\n",
        [{"q": q, "choices": [" brown", "away"], "answer": 0} for q in ("the quick", "", "and  ", TEXT[0])],
    ),
    "answers": (
        "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: a\nmetric_list:\n  - metric: exact_match\n"
        "generation_kwargs:\n  until: ['.', 'fox']\n  max_gen_toks: 12\n  do_sample: false\n",
        [{"q": text, "a": "x"} for text in ("the", "the quick", "and runs", TEXT[0])],
    ),
}


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """Run the tasks with a model of lm-eval and return each request's answer, by task."""
    pytest.importorskip("accelerate", reason="needs lm-eval: pip install lm_eval accelerate")
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install lm_eval accelerate")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, (fields, documents) in TASKS.items():
        lines = "".join(json.dumps(document) + "\n" for document in documents)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        source = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path / name}.jsonl\n"
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\ntest_split: test\n{source}{fields}", encoding="utf-8")
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def run(model: str, checkpoint: Path) -> dict[str, list]:
        arguments = {"pretrained": str(checkpoint), "dtype": "float32"}
        options = dict(task_manager=manager, batch_size=3, bootstrap_iters=0)
        options["device"] = "cuda:0"  # the default of its command line, also where there is no GPU
        results = lm_eval.simple_evaluate(model=model, model_args=arguments, tasks=list(TASKS), **options)
        samples = {name: sorted(results["samples"][name], key=lambda sample: sample["doc_id"]) for name in TASKS}
        return {name: [answer[0] for sample in samples[name] for answer in sample["resps"]] for name in TASKS}

    return run


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"norm": "layer"}], ids=["llama", "qwen3", "stablelm"])
def test_a_model_of_a_family_gets_the_answers_of_lm_evals_own_hf_model(evaluate, make_decoder, tmp_path, changes):
    import contrib.lm_eval  # noqa: F401 - it registers `prenorm`

    tokenizer = train_tokenizer(TEXT * 5, 300)
    decoder = make_decoder(vocab_size=300, max_position_embeddings=24, tie_word_embeddings=False, **changes)
    # Unknown, BOS, EOS and bytes are hardly ever chosen: libraries print bytes that are no character in different ways.
    decoder.lm_head.weight.data *= torch.arange(300)[:, None] >= 259
    save_pretrained(decoder, tmp_path / "model", bos_token_id=tokenizer.bos_id, eos_token_id=2)
    tokenizer.save(tmp_path / "model")
    ours, theirs = evaluate("prenorm", tmp_path / "model"), evaluate("hf", tmp_path / "model")
    assert len(ours["rolling"]) == 3 and len(ours["choice"]) == 8
    assert ours["rolling"] == pytest.approx(theirs["rolling"], rel=1e-5)
    assert [value for value, _ in ours["choice"]] == pytest.approx([value for value, _ in theirs["choice"]], rel=1e-5)
    assert [flag for _, flag in ours["choice"]] == [flag for _, flag in theirs["choice"]]
    assert ours["answers"] == theirs["answers"]
