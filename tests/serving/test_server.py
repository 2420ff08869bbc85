"""The server as OpenAI's client sees it, and what it does with bad requests and bad clients."""

import concurrent.futures
import itertools
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import serve
from data.tokenizer import encode_prompt
from errors import UserError
from generation import generate
from generation.settings import Sampling
from model.decoder import Decoder
from serving.answer import ChatRequest, CompletionRequest, Piece, ServedModel, to_choices
from serving.server import Server
from tests.serving.conftest import post, send, served

openai = pytest.importorskip("openai", reason="needs the package openai")
HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
LONG = {"prompt": "a", "max_tokens": 4000, "temperature": 0}  # an answer that takes seconds


@pytest.fixture(scope="module")
def server(directories):
    with served(*directories) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("content", ['theme = "dark"', "run = 1", "[run", "[run]\nsample_prompts = 5"])
def test_settings_of_another_program_beside_a_model_are_ignored(directories, tmp_path, content):
    model = shutil.copytree(directories[1], tmp_path / "model")
    (tmp_path / "settings.toml").write_text(content)
    assert ServedModel("model", model, device="cpu").card["examples"] == []


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "top_p": 0.9, "top_k": 9, "min_p": 0.01}])
def test_the_text_equals_that_of_generate_py_streamed_or_not(client, directories, output, options):
    settings = {"seed": 7, "max_new_tokens": 30, "sampling": Sampling(**options)}
    options = {"extra_body": options, "seed": 7, "max_tokens": 30}
    arguments = {"model": "text", "prompt": "def add ", **options}
    whole = client.completions.create(**arguments)
    assert "def add " + whole.choices[0].text + "\n" == output(directories[1], ["def add "], **settings)[0]
    assert whole.usage.completion_tokens == 30 and whole.choices[0].finish_reason == "length"
    parts = [chunk.choices[0].text for chunk in client.completions.create(**arguments, stream=True)]
    assert "".join(parts) == whole.choices[0].text and len(parts) > 10
    answer = client.chat.completions.create(model="chat", messages=HELLO, **options).choices[0].message.content
    assert answer + "\n" == output(directories[0], ["hello"], chat=True, **settings)[0]


def test_the_sampling_of_a_model_is_the_default_and_a_text_is_not_greedy(directories, tmp_path):
    for do_sample, text in ((True, Sampling(temperature=0.7, top_k=50)), (False, Sampling())):
        model = shutil.copytree(directories[0], tmp_path / f"{do_sample}")
        (model / "generation_config.json").write_text(json.dumps({"do_sample": do_sample, "temperature": 0.7}))
        server = Server({"model": model}, "0.0.0.0", device="cpu")
        assert server.read(b'{"prompt": "a"}', CompletionRequest).sampling == text
        chat = text if do_sample else Sampling(temperature=0)
        assert server.read(json.dumps({"messages": HELLO}).encode(), ChatRequest).sampling == chat


def test_a_server_for_the_whole_network_answers_under_every_name(directories):
    with served(*directories, host="0.0.0.0") as server:
        assert post(server, {"prompt": "a", "max_tokens": 1}, Host="mybox.local")[0] == 200


def test_samples_stop_strings_and_models(client, server, monkeypatch):
    assert [model.id for model in client.models.list()] == ["chat", "text"]
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt', only chat, text"):
        client.completions.create(model="gpt", prompt="a")
    monkeypatch.setitem(server.models, "/runs/a b", server.models["text"])
    assert client.models.retrieve("/runs/a b").id == "text"
    arguments = {"model": "text", "prompt": "def", "seed": 3, "max_tokens": 20}
    texts = [choice.text for choice in client.completions.create(**arguments, n=3).choices]
    assert len({*texts}) == 3 and client.completions.create(**arguments).choices[0].text == texts[0]
    stop = texts[0][5:8]
    stopped = client.completions.create(**arguments, stop=[stop]).choices[0]
    assert stopped.text == texts[0][: texts[0].index(stop)] and stopped.finish_reason == "stop"


def test_logprobs_of_an_answer_are_those_of_its_text_and_its_ids_continue_it(client, server, monkeypatch):
    monkeypatch.setattr("serving.answer.SCORED_AT_ONCE", 4)
    tokenizer, text = server.models["text"].tokenizer, "é☺ def 漢𝄞\n"
    prompt = [tokenizer.document_start, *tokenizer.encode(text)]
    arguments = {"model": "text", "seed": 3, "max_tokens": 12, "temperature": 0, "prompt": prompt}
    choice = client.completions.create(**arguments, logprobs=5).choices[0]
    ids = [entry["id"] for entry in choice.logprobs.content]
    assert [entry["top_logprobs"][0]["id"] for entry in choice.logprobs.content] == ids
    echo = {"prompt": [*prompt, *ids], "echo": True, "max_tokens": 0, "logprobs": 0}
    scored = client.completions.create(**(arguments | echo)).choices[0]
    assert scored.logprobs.token_logprobs[len(prompt) :] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
    assert scored.text.endswith(choice.text) and scored.logprobs.content[0]["top_logprobs"] == []
    assert bytes(byte for entry in scored.logprobs.content[1 : len(prompt)] for byte in entry["bytes"]).decode() == text
    rest = client.completions.create(**arguments | {"max_tokens": 6}, extra_body={"begin_ids": ids[:6]})
    assert choice.text.endswith(rest.choices[0].text)
    same = [{"token": "a", "logprob": -i} for i in range(3)]
    token = {"token": "b", "logprob": 0, "top_logprobs": same}
    [choice] = to_choices(CompletionRequest(model="text", sampling=Sampling()), [Piece(0, "b", token)])
    assert choice["logprobs"]["top_logprobs"] == [{"b": 0, "a": 0}]  # that of the token, too, as in OpenAI's
    request = CompletionRequest(model="text", sampling=Sampling(), logprobs=0)
    [choice] = to_choices(request, [Piece(0, "", end="stop")])  # it ended at once
    assert choice["logprobs"]["tokens"] == choice["logprobs"]["token_logprobs"] == []


def test_a_damaged_model_scores_nothing(server, monkeypatch):
    damaged = lambda ids, cache: torch.full((1, ids.shape[1], 9), torch.nan)  # noqa: E731
    monkeypatch.setattr(server.models["text"], "decoder", damaged)
    with pytest.raises(UserError, match="not finite"):
        [*server.models["text"].predict([1, 2], None)]


def test_a_text_longer_than_the_context_is_scored_in_windows_that_overlap_by_half(client, server):
    ids = torch.randint(3, 306, (7000,), generator=torch.Generator().manual_seed(3)).tolist()
    options = {"model": "text", "prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 0}
    scored = client.completions.create(**options).choices[0].logprobs.token_logprobs
    first, second, third = (torch.tensor([ids[begin : begin + 4096]]) for begin in (0, 2048, 4096))
    decoder, expected = server.models["text"].decoder, []
    with torch.inference_mode():
        for window, repeated in ((first, 1), (second, 2048), (third, 2048)):
            logprobs = decoder(window)[0, :-1].log_softmax(-1).gather(1, window[0, 1:, None])[:, 0]
            expected += logprobs[repeated - 1 :].tolist()
    assert scored[0] is None and scored[1:] == pytest.approx(expected, abs=1e-4)


def test_the_accumulator_of_openais_client_gets_what_an_answer_without_stream_has(client):
    options = {"model": "chat", "messages": HELLO, "seed": 3, "max_tokens": 9, "n": 3, "logprobs": True}
    whole = client.chat.completions.create(**options)
    with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
        final = stream.until_done().current_completion_snapshot
    for a, b in zip(whole.choices, final.choices, strict=True):
        assert (a.message.role, a.message.content) == (b.message.role, b.message.content) and a.logprobs == b.logprobs
        assert (a.index, a.finish_reason) == (b.index, b.finish_reason) and a.message.role == "assistant"
    assert final.usage == whole.usage


def test_several_prompts_are_answered_in_order_as_if_alone_and_an_echo_begins_with_the_prompt(client):
    options = {"model": "text", "seed": 3, "max_tokens": 2, "logprobs": 2, "n": 2, "stop": ["add"]}
    prompts = [[70, 71, 72], [80, 70], "def add("]  # lm-eval sends lists of lists of ids
    alone = [choice for prompt in prompts for choice in client.completions.create(prompt=[prompt], **options).choices]
    together = client.completions.create(prompt=prompts, **options).choices
    echoed = client.completions.create(prompt=prompts, echo=True, **options).choices
    for i, (a, b, echo) in enumerate(zip(alone, together, echoed, strict=True)):
        assert (i, a.text, a.logprobs) == (b.index, b.text, b.logprobs) and i == echo.index
        assert echo.logprobs.token_logprobs[-2:] == pytest.approx(a.logprobs.token_logprobs)
        assert echo.logprobs.token_logprobs.index(None) == 0 and echo.text.endswith(a.text)
        ids = [entry["id"] for entry in echo.logprobs.content[:-2]]
        assert ids == prompts[i // 2] if i < 4 else echo.text == prompts[2] + a.text


def test_a_fault_of_the_server_is_500_its_message_no_advice_and_its_traceback_is_printed(server, monkeypatch, capfd):
    monkeypatch.setattr("serving.answer.encode_prompt", lambda *_: {}["oops"])
    for stream in (False, True):
        status, body = post(server, {"model": "text", "prompt": "a", "stream": stream})
        assert status == 500 and body["error"]["message"] == "KeyError('oops')"
        assert "Traceback (most recent call last)" in capfd.readouterr().err


def test_what_arrives_of_a_body_is_counted(server):
    for size, status in ((1_000_000, 200), (1_000_001, 413), (5_000_000, 413)):
        body = json.dumps({"model": "text", "max_tokens": 1}).encode().ljust(size)
        chunk, lie = b"%x\r\n%s\r\n0\r\n\r\n" % (size, body), {"Content-Length": "5", "Transfer-Encoding": "chunked"}
        assert post(server, body)[0] == post(server, chunk, **lie)[0] == status


def test_others_are_answered_while_a_prompt_is_tokenized(server, monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr("serving.answer.encode_prompt", lambda *a: answered.wait(10) and encode_prompt(*a))
    slow = send(server.port, {"model": "text", "prompt": "a", "max_tokens": 1})
    assert post(server, {"n": 0})[0] == 400
    answered.set()
    assert slow.getresponse().status == 200


def test_a_conversation_computes_only_what_is_new(client, monkeypatch):
    computed, forward = [], Decoder.forward
    monkeypatch.setattr(Decoder, "forward", lambda *a, **k: computed.append(a[1].shape[1]) or forward(*a, **k))
    first = client.chat.completions.create(model="chat", messages=HELLO, max_tokens=20, seed=1, temperature=0)
    longer = [*HELLO, {"role": "assistant", "content": first.choices[0].message.content}, *HELLO]
    second = client.chat.completions.create(model="chat", messages=longer, max_tokens=5)
    assert computed[-1] <= second.usage.prompt_tokens - first.usage.prompt_tokens


def test_malformed_bodies_get_an_error_in_openais_format(server, capfd):
    fields = "prompt model max_tokens temperature top_p top_k min_p n seed stop logprobs".split()
    wrong = (-1, 1e400, "\ud800", [[]], {"a": 1}, True, [None], 10**30, -0.5, [-1], [10**9])
    requests = [{"prompt": "a", "max_tokens": 2, field: value} for field, value in itertools.product(fields, wrong)]
    requests.append({"prompt": "a", "stop": ["x"] * 65})  # each is looked for in every step
    bodies = [json.dumps(request).encode() for request in requests]
    bodies += [b"[]", b"[" * 100_000, b'{"prompt": NaN}', *(bodies[0][:n] for n in range(30))]
    answers = [post(server, body, "/v1/completions" if n % 7 else CHAT) for n, body in enumerate(bodies)]
    refused = [answer for answer in answers if answer[0] != 200]  # `true` is a number of logprobs
    refused += [post(server, {}, "/v1/models"), post(server, {}, "/v1/embeddings")]
    no_post, no_path = (answer["error"]["message"] for _, answer in refused[-2:])
    assert no_post.startswith("/v1/models does not take POST; use ") and "GET" in no_post and no_path == "Not Found"
    refused += [post(server, {"model": "text", "messages": HELLO}, CHAT)]
    refused += [post(server, {"messages": [{"role": "user", "content": ["a", "b"]}]}, CHAT)]
    refused += [post(server, {"prompt": "a", "response_format": {"type": "json_object"}})]
    refused += [post(server, {"prompt": "a " * 5000})]
    assert len(refused) >= 130 and {status for status, _ in refused} == {400, 404, 405}
    assert send(server.port, {"prompt": "a"}, Host="evil.com").getresponse().status == 400
    assert {answer["error"]["type"] for _, answer in refused} == {"invalid_request_error"}
    said = ["no chat template", "a part of its content is no object", "`response_format` other than text"]
    said.append("context is 4096")
    assert all(words in answer["error"]["message"] for (_, answer), words in zip(refused[-4:], said, strict=True))
    assert not any("--" in answer["error"]["message"] for _, answer in refused)  # flags are of the command line
    assert capfd.readouterr().err == ""


def test_fifty_clients_at_once_are_answered_or_told_to_wait_while_another_reads_slowly(server):
    slow = send(server.port, LONG | {"max_tokens": 300, "stream": True, "logprobs": 20, "n": 4})  # 2 MB
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        answers = pool.map(lambda _: post(server, {"prompt": "a", "max_tokens": 30}), range(50))
        statuses = [status for status, _ in answers]
    assert {*statuses} <= {200, 429} and statuses.count(200) >= 8 and not server.pending
    assert slow.getresponse().read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [True, False])
def test_generation_stops_within_two_tokens_when_the_client_leaves(server, monkeypatch, stream):
    steps, sample = [], generate.sample
    monkeypatch.setattr(generate, "sample", lambda *a: time.sleep(0.02) or steps.append(0) or sample(*a))
    connection, end = send(server.port, LONG | {"stream": stream}), time.monotonic() + 20
    while len(steps) < 5 and time.monotonic() < end:
        time.sleep(0.005)
    connection.close()
    before = len(steps)
    time.sleep(0.5)
    assert not server.pending and before >= 5 and len(steps) <= before + 2


def test_ctrl_c_ends_the_answer_in_flight_and_the_server_within_a_second(directories):
    command = [sys.executable, "serve.py", str(directories[0]), "--port", "0"]
    process = subprocess.Popen(command, cwd=Path(serve.__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    port = int(process.stdout.readline().split(b"/")[2].partition(b":")[2])
    answer = send(port, LONG | {"stream": True}).getresponse()
    assert [answer.readline() for _ in range(3)]  # the first token, too
    process.send_signal(signal.SIGINT)
    start, rest = time.monotonic(), answer.read()
    assert process.wait(10) == 130 and time.monotonic() - start < 1.5  # other programs use the machine too
    assert b"the answer was ended" in rest and b"[DONE]" in rest and process.stderr.read() == b"stopped.\n"


def test_a_port_in_use_is_one_line(server, directories):
    with pytest.raises(UserError, match=rf"cannot listen on port {server.port} of .*; give another --port or --host"):
        serve.main([str(directories[0])], port=server.port)
