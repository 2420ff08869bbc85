"""The loss on a complete text."""

import math

import numpy as np
import pytest
import torch

from checkpoints.pretrained import load_pretrained
from data.batches import number_documents, validation_windows
from data.corpus import prepare
from data.settings import DataSettings
from data.tokenizer import load_tokenizer
from training.evaluate import evaluate


def test_an_evaluation_is_the_mean_over_every_token_of_the_text(finished_run, text_folder, tmp_path):
    tokenizer, model = load_tokenizer(finished_run / "last"), load_pretrained(finished_run / "last")
    text = (text_folder / "07.txt").read_text(encoding="utf-8")
    ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 32):
            window = torch.tensor([ids[start : start + 33]])
            log_p = model(window[:, :-1]).double().log_softmax(-1)
            nats -= log_p.gather(2, window[:, 1:, None]).sum().item()
    settings = DataSettings(data=(str(text_folder / "07.txt"),), cache=str(tmp_path))
    corpus = prepare(settings, finished_run / "last")
    found = evaluate(model, corpus.all_batches(32, 4), corpus.everything_bytes, torch.device("cpu"))
    assert found.tokens == len(ids) - 1 and found.text_bytes == len(text.encode())
    assert found.nats == pytest.approx(nats, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-6)


def test_with_document_mask_the_loss_of_a_document_does_not_depend_on_those_before_it(finished_run):
    tokenizer, model = load_tokenizer(finished_run / "last"), load_pretrained(finished_run / "last")
    random = np.random.default_rng(1)
    documents = [np.array([tokenizer.bos_id, *random.integers(10, 300, length)]) for length in (9, 14, 7)]
    (window,) = validation_windows(np.concatenate(documents), 32, 1)
    batch = number_documents(window, tokenizer.document_start)
    batch[1][batch[1] == tokenizer.bos_id] = -100
    alone = [evaluate(model, validation_windows(one, 32, 1), 1, torch.device("cpu")).nats for one in documents]
    assert evaluate(model, [batch], 1, torch.device("cpu")).nats == pytest.approx(sum(alone), rel=1e-6)
    assert abs(evaluate(model, [batch[:2]], 1, torch.device("cpu")).nats - sum(alone)) > 1e-3
