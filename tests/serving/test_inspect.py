"""/inspect: the reply is what model.inspect measures, computed in the thread of all answers."""

import concurrent.futures
import functools
import itertools
import json
import threading
import time

import pytest
import torch

import serving.answer
from model.inspect import CHANGES, inspect, surgery
from tests.serving.conftest import post, send, served, write_layer_norm_model

TEXT = 'def add(a, b):\n    return "é☺ 归"\n\ndef add(a'


@pytest.fixture(scope="module")
def server(directories, tmp_path_factory):
    layer = write_layer_norm_model(directories[1], tmp_path_factory.mktemp("layer") / "layer")
    with served(directories[1], layer) as server:
        yield server


ask = functools.partial(post, path="/inspect")


@pytest.fixture
def slow_inspect(monkeypatch) -> tuple[list, threading.Event]:
    """The thread and the ids of each text that was inspected, and the event that they wait for."""
    computed, begin, inspected = [], threading.Event(), serving.answer.inspect

    def inspect_later(decoder, ids):
        begin.wait(10)
        computed.append((threading.get_ident(), ids))
        return inspected(decoder, ids)

    monkeypatch.setattr(serving.answer, "inspect", inspect_later)
    return computed, begin


@pytest.mark.parametrize("name", ["text", "layer"])
def test_the_reply_is_what_inspect_measures_and_surgery_changes(server, name):
    model = server.models[name]
    ids = [model.tokenizer.document_start, *model.tokenizer.encode(TEXT)]
    expected = dict(vars(inspect(model.decoder, ids)))
    status, reply = ask(server, {"model": name, "text": TEXT})
    assert status == 200 and len(reply["tokens"]) == len(ids) and reply["tokens"][1:3] == ["def", " add"]
    text_of = {i: model.tokenizer.token_bytes(i).decode("utf-8", "backslashreplace") for i in range(model.vocab_size)}
    assert reply.pop("tokens") == [text_of[i] for i in ids]
    top_ids = expected.pop("top_ids").tolist()
    assert reply.pop("top_texts") == [[[text_of[i] for i in top] for top in tops] for tops in top_ids]
    assert reply.pop("norms") == [*expected.pop("norms")] and reply.pop("chance") == expected.pop("chance")
    assert reply.keys() == expected.keys()
    for field, tensor in expected.items():
        torch.testing.assert_close(torch.tensor(reply[field]), tensor, atol=6e-6, rtol=1e-6, check_dtype=False)
    for change in CHANGES:
        for norm in ("all", "layers.1.input_layernorm"):
            status, reply = ask(server, {"model": name, "text": TEXT, "change": change, "norm": norm})
            differences = torch.tensor(reply["differences"])
            torch.testing.assert_close(differences, surgery(model.decoder, ids, change, norm), atol=6e-6, rtol=1e-6)
            assert status == 200 and (name == "text" or differences.abs().max() > 0.01)


def test_numbers_that_are_not_finite_are_null(server, monkeypatch):
    monkeypatch.setattr("serving.answer.surgery", lambda *_: torch.tensor([float("nan"), float("inf"), 1.0]))
    assert ask(server, {"model": "text", "text": "a", "change": "norm"})[1] == {"differences": [None, None, 1.0]}


def test_what_cannot_be_inspected_is_refused_in_one_line(server):
    cases = {
        "there is no model 'gpt', only text, layer": {"model": "gpt", "text": "a"},
        "tokens; give 1 to 1024": {"text": "a\n" * 3000},
        "bias of norms: changes are mean, bias, gain, statistics, norm; norms are": {"change": "bias", "norm": "norms"},
        "Expected `str`, got `int`": {"text": 1},
        "missing required field `text`": {"text": None},
    }
    for words, fields in cases.items():
        status, reply = ask(server, {"model": "text", "text": "a"} | fields)
        message = reply["error"]["message"]
        assert status == (404 if "model" in fields else 400) and words in message and "\n" not in message
    for body in (b"[]", b"{", b'{"text": "\\ud800"}', b'{"text": NaN}'):
        assert ask(server, body)[0] == 400
    assert ask(server, b'{"text": "a"}')[0] == 200  # by the first model, as for the other paths


def test_it_runs_in_the_thread_of_all_answers_and_is_refused_when_too_many_wait(server, slow_inspect):
    computed, begin = slow_inspect
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        replies = [pool.submit(ask, server, {"model": "text", "text": "a"}) for _ in range(12)]
        refused = [reply.result() for reply in itertools.islice(concurrent.futures.as_completed(replies), 3)]
        begin.set()
    assert {status for status, _ in refused} == {429} and [reply.result()[0] for reply in replies].count(200) == 9
    thread = server.worker.submit(threading.get_ident).result()
    assert [where for where, _ in computed] == [thread] * 9 and not server.pending


def test_what_still_waits_when_its_client_leaves_is_not_computed(server, slow_inspect):
    (computed, begin), connections, end = slow_inspect, [], time.monotonic() + 20
    for count in (1, 2, 3):
        connections.append(send(server.port, {"text": "a" * count}, "/inspect"))
        while len(server.pending) < count and time.monotonic() < end:
            time.sleep(0.005)
    connections[1].close()
    while len(server.pending) > 2 and time.monotonic() < end:
        time.sleep(0.005)
    begin.set()
    lengths = [len(json.load(connections[i].getresponse())["tokens"]) for i in (0, 2)]
    assert [len(ids) for _, ids in computed] == lengths
