"""Runs on conversations: loss and gradients against transformers, exact resume, and what a run prints and saves."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from checkpoints.families import load_config
from checkpoints.pretrained import save_pretrained, unpacked_tensors
from data.chat import ChatFormat, add_chat_template
from data.conversations import batch_of, encode_conversations, pack
from data.settings import DataSettings
from data.sources import resolve
from data.tokenizer import load_tokenizer
from errors import UserError
from generation import cli
from generation.settings import Sampling
from generation.settings import Settings as GenerationSettings
from model.decoder import Decoder
from tests.training.runs import assert_parts_equal_a_run, evaluations, settings_of, train_run
from tests.training.test_step import KeepsGradients
from training import estimate
from training.processes import Processes
from training.step import split_batch, train_step

CPU = torch.device("cpu")
WORDS = "red blue green black white brown".split()


def conversation(number: int) -> list[dict]:
    """One or two questions, answered by a rule that a small model learns."""
    messages = []
    for turn in range(1 + number % 2):
        word = WORDS[(number + turn) % len(WORDS)]
        messages += [{"role": "user", "content": f"Say {word}, {number}"}, {"role": "assistant", "content": word}]
    return messages


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": conversation(number)}) + "\n" for number in range(200)))
    return path


@pytest.fixture
def chat_flags(flags, finished_run, chat_file) -> list[str]:
    """Flags of a run that teaches a finished one to talk."""
    start = ["--init-from", str(finished_run), "--data", str(chat_file)]
    return [*flags[2:], *start, "--learning-rate", "1e-2", "--batch-size", "4"]


def test_loss_and_gradients_are_those_of_transformers_for_conversations_alone(flags, finished_run, tmp_path, relative):
    """Ours are packed. Tolerance 1e-5: float32 sums of other orders."""
    settings = settings_of(*flags, "--max-position-embeddings", "128", "--no-attention-bias")
    tokenizer, decoder = add_chat_template(load_tokenizer(finished_run / "last")), Decoder(settings.model, seed=3)
    save_pretrained(decoder, tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    rows, path = [conversation(number) for number in (1, 2, 3, 4, 5, 8)], tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    encoded, _ = encode_conversations(resolve(DataSettings(data=(str(path),))), ChatFormat(tokenizer), 129)
    packed = pack([*encoded.values()], 129, tokenizer.dtype)
    assert packed.shape[1] < len(rows) == len(encoded)
    scaler, micro_batches = torch.amp.GradScaler("cpu", enabled=False), split_batch(batch_of(packed), 1, CPU)
    loss, _ = train_step(decoder, micro_batches, KeepsGradients(decoder), scaler, float("inf"), Processes(), CPU)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    total, count = torch.zeros(()), 0
    for row in rows:
        marked = theirs.apply_chat_template(row, return_assistant_tokens_mask=True, return_dict=True)
        ids, learned = torch.tensor(marked["input_ids"]), torch.tensor(marked["assistant_masks"]) > 0
        total += cross_entropy(model(ids[None]).logits[0, :-1][learned[1:]], ids[1:][learned[1:]], reduction="sum")
        count += int(learned[1:].sum())
    (total / count).backward()
    assert loss == pytest.approx(total.item() / count, rel=1e-5)
    ours = unpacked_tensors({name: parameter.grad for name, parameter in decoder.named_parameters()}, decoder.config)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative(ours[name], gradient) < 1e-5, name


def test_a_resumed_run_on_conversations_equals_one_that_was_not_stopped(chat_flags, tmp_path):
    assert_parts_equal_a_run(tmp_path, (6, 14), *chat_flags, "--steps", "14", "--seed", "3")


def test_a_run_learns_to_answer_and_its_answers_end(chat_flags, chat_file, tmp_path, capsys):
    lines = evaluations(train_run(tmp_path / "talk", *chat_flags, "--steps", "120", "--evaluate-every", "60"))
    out = capsys.readouterr().out
    assert [line["step"] for line in lines] == [0, 60, 120] and "bits_per_byte" not in lines[0]
    assert lines[0]["validation_loss"] > 4 and lines[-1]["validation_loss"] < 0.6
    assert "nats per answer token" in out and "  | Say " in out and "  | > " in out
    assert "xz" not in out and "talk --chat" in out.splitlines()[-1]
    saved = json.loads((tmp_path / "talk" / "best" / "generation_config.json").read_text())
    assert (saved["do_sample"], saved["repetition_penalty"]) == (True, 1.0)
    # Without an end of the turn, answers would have sixteen tokens.
    settings = GenerationSettings(chat=True, sampling=Sampling(temperature=0), max_new_tokens=16)
    questions = [f"Say {word}, 31" for word in WORDS]
    cli.run(settings, tmp_path / "talk" / "best", load_tokenizer(tmp_path / "talk" / "best"), questions)
    answers = capsys.readouterr().out.split("\n\n")
    assert len(answers) == 6 and all(0 < len(answer) < 12 for answer in answers), answers


def test_a_dry_run_marks_what_is_learned_and_evaluations_ask_a_question(chat_flags, tmp_path, monkeypatch, capsys):
    members = set()
    with monkeypatch.context() as patch:
        patch.setattr(estimate, "train_step", lambda _, micro_batches, *__: members.add(len(micro_batches[0])))
        estimate.estimate(settings_of(*chat_flags))
    assert members == {3}  # inputs, targets, documents
    row = capsys.readouterr().out.partition("a row of conversations, in which lines with + are learned:\n")[2]
    lines = row.splitlines()
    assert lines[0].startswith("  <s><|user|>Say ") and lines[0].endswith("<|end|><|assistant|>")
    assert lines[1].strip("+ ").removesuffix("<|end|>") in WORDS and lines[1].startswith("+ ")
    train_run(tmp_path / "run", *chat_flags, "--steps", "2", "--sample-prompts", "Who?")
    assert capsys.readouterr().out.count("  | Who?\n  | > ") == 2


def test_conversations_are_not_cut_into_shorter_sequences(chat_flags, tmp_path):
    with pytest.raises(UserError, match=r"--first-sequence-length would cut conversations .*-length None"):
        train_run(tmp_path / "run", *chat_flags, "--first-sequence-length", "16")


def test_a_new_model_learns_conversations_with_a_given_tokenizer(flags, chat_file, finished_run, tmp_path):
    start = ["--data", str(chat_file), "--tokenizer", str(finished_run / "last"), "--vocab-size", "9"]
    run = train_run(tmp_path / "run", *flags[2:], *start, "--steps", "2")
    tokenizer = load_tokenizer(run / "last")
    assert tokenizer.chat_template is not None and load_config(run / "last").vocab_size == tokenizer.vocab_size
