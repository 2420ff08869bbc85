"""The server as OpenAI's client sees it, and what it does with bad requests and bad clients."""

import concurrent.futures
import http.client
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import serve
from generation import session
from generation.settings import Sampling, Settings

openai = pytest.importorskip("openai", reason="needs the package openai")
ROOT = Path(__file__).parents[2]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(running):
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def post(running, body: bytes | dict, path: str = "/v1/completions", **headers) -> tuple[int, dict]:
    """The status and the JSON of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, content, headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def generated(directory, prompt: str, **settings) -> str:
    """What generate.py prints."""
    parts = []
    session.run(Settings(device="cpu", **settings), directory, [prompt], parts.append, lambda line: None)
    return "".join(parts)


def idle(running) -> bool:
    return not running.server.turn.locked() and not running.server.waiting


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "top_p": 0.9, "extra_body": {"top_k": 9, "min_p": 0.01}}])
def test_the_text_equals_that_of_generate_py_streamed_or_not(client, directories, options):
    flat = {k: v for k, v in (options | options.get("extra_body", {})).items() if k != "extra_body"}
    settings = {"seed": 7, "max_new_tokens": 30, "sampling": Sampling(**flat)}
    arguments = {"model": "text", "prompt": "def add ", "seed": 7, "max_tokens": 30, **options}
    whole = client.completions.create(**arguments)
    assert "def add " + whole.choices[0].text + "\n" == generated(directories[1], "def add ", **settings)
    assert whole.usage.completion_tokens == 30 and whole.choices[0].finish_reason == "length"
    parts = [chunk.choices[0].text for chunk in client.completions.create(**arguments, stream=True)]
    assert "".join(parts) == whole.choices[0].text and len(parts) > 10
    expected = generated(directories[0], "hello", chat=True, **settings)
    options = options | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [*client.chat.completions.create(model="chat", messages=HELLO, seed=7, max_tokens=30, **options)]
    answer = "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)
    assert answer + "\n" == expected and chunks[-1].usage.completion_tokens == 30


def test_samples_stop_strings_and_models(client):
    assert [model.id for model in client.models.list()] == ["chat", "text"]
    arguments = {"model": "text", "prompt": "def", "seed": 3, "max_tokens": 20}
    answer = client.completions.create(**arguments, n=3)
    texts = [choice.text for choice in answer.choices]
    assert len({*texts}) == 3 and client.completions.create(**arguments).choices[0].text == texts[0]
    stop = texts[0][5:8]
    stopped = client.completions.create(**arguments, stop=[stop]).choices[0]
    assert stopped.text == texts[0][: texts[0].index(stop)] and stopped.finish_reason == "stop"


def test_logprobs_of_an_answer_are_those_of_its_text_and_its_ids_continue_it(client):
    arguments = {"model": "text", "seed": 3, "max_tokens": 12, "temperature": 0}
    choice = client.completions.create(**arguments, prompt=[70, 71], logprobs=5).choices[0]
    ids = [entry["id"] for entry in choice.logprobs.content]
    assert [entry["top_logprobs"][0]["id"] for entry in choice.logprobs.content] == ids
    echo = {"prompt": [70, 71, *ids], "echo": True, "max_tokens": 0, "logprobs": 1}
    scored = client.completions.create(**(arguments | echo)).choices[0].logprobs.token_logprobs
    assert scored[0] is None and scored[2:] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
    rest = client.completions.create(
        **arguments | {"max_tokens": 6}, prompt=[70, 71], extra_body={"begin_ids": ids[:6]}
    )
    assert choice.text.endswith(rest.choices[0].text)


def test_a_conversation_computes_only_what_is_new(client):
    first = client.chat.completions.create(model="chat", messages=HELLO, max_tokens=20, seed=1, temperature=0)
    longer = [*HELLO, {"role": "assistant", "content": first.choices[0].message.content}, *HELLO]
    second = client.chat.completions.create(model="chat", messages=longer, max_tokens=5)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def malformed() -> list[bytes]:
    """200 bodies that no request should have."""
    fields = (
        "prompt",
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "seed",
        "stop",
        "logprobs",
    )
    wrong = (-1, 1e400, "\ud800", [[]], {"a": 1}, True, [None], 10**30, -0.5, "x" * 20000, [-1], [10**9])
    pairs = [{field: value} for field, value in itertools.product(fields, wrong)]
    bodies = [json.dumps({"prompt": "a", "max_tokens": 2} | pair).encode() for pair in pairs]
    good, draw = json.dumps({"prompt": "a", "max_tokens": 2, "stop": ["b"]}).encode(), random.Random(1)
    bodies += [good[: draw.randrange(1, len(good))] for _ in range(42)] + [bytes([draw.randrange(128, 256)]) * 9] * 20
    bodies += [b"", b"[]", b"null", b"3", b'"a"', b"[" * 100_000, b'{"prompt": NaN}', b'{"messages": 3}']
    return bodies[:200]


def test_malformed_bodies_get_an_error_in_openais_format(running, capfd):
    legal = 0
    for number, body in enumerate(malformed()):
        path = "/v1/chat/completions" if number % 7 == 0 else "/v1/completions"
        status, answer = post(running, body, path)
        legal += status == 200  # such as a stop string that is long
        assert status == 200 or 400 <= status < 500, (body[:200], answer)
        assert status == 200 or (answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error")
    assert legal < 20 and "Traceback" not in capfd.readouterr().err
    assert post(running, b" " * 1_000_001)[0] == 413
    assert post(running, {}, "/v1/nothing")[0] == 404 and post(running, {}, "/v1/models")[0] == 405
    assert (
        post(running, {"model": "text", "messages": HELLO}, "/v1/chat/completions")[1]["error"]["code"]
        == "no_chat_template"
    )
    assert post(running, {"prompt": "a " * 5000})[1]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("host", "status"), [("evil.com", 403), ("127.0.0.1:80", 200), ("[::1]", 200), ("", 403)])
def test_a_request_under_the_name_of_another_site_is_refused(running, host, status):
    assert post(running, {"prompt": "a", "max_tokens": 1}, Host=host)[0] == status


def test_fifty_clients_at_once_are_answered_in_order_or_told_to_wait(running):
    body = {"prompt": "a", "max_tokens": 30}
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        statuses = [status for status, _ in pool.map(lambda _: post(running, body), range(50))]
    assert {*statuses} <= {200, 429} and statuses.count(200) >= 8 and idle(running)


@pytest.mark.parametrize("stream", [True, False])
def test_generation_stops_within_two_tokens_when_the_client_leaves(running, monkeypatch, stream):
    steps = []
    sample = __import__("generation.generate").generate.sample
    monkeypatch.setattr("generation.generate.sample", lambda *a: time.sleep(0.02) or steps.append(0) or sample(*a))
    content = json.dumps({"prompt": "a", "max_tokens": 4000, "stream": stream, "temperature": 0}).encode()
    connection = socket.create_connection(("127.0.0.1", running.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    end = time.monotonic() + 20
    while len(steps) < 5 and time.monotonic() < end:
        time.sleep(0.005)
    connection.close()
    before = len(steps)
    time.sleep(0.5)
    assert idle(running) and before >= 5 and len(steps) <= before + 2


def test_a_client_that_reads_slowly_delays_nobody(running):
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.connect(("127.0.0.1", running.port))
    content = json.dumps({"prompt": "a", "max_tokens": 300, "stream": True, "logprobs": 20}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    assert post(running, {"prompt": "a", "max_tokens": 3})[0] == 200
    received = b""
    while b"[DONE]" not in received:
        received += (part := connection.recv(100_000))
        assert part
    connection.close()


def test_ctrl_c_ends_the_answer_in_flight_and_the_server_within_a_second(directories):
    code = "import signal, serve; signal.signal(signal.SIGINT, signal.default_int_handler); serve.main()"
    command = [sys.executable, "-c", code, str(directories[0]), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    port = int(process.stdout.readline().split("/")[2].rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(
        "POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 4000, "stream": True, "temperature": 0})
    )
    answer = connection.getresponse()
    answer.readline()
    os.kill(process.pid, signal.SIGINT)
    start = time.monotonic()
    rest = answer.read().decode()
    assert process.wait(10) == 130 and time.monotonic() - start < 1.5  # other programs use the machine too
    assert "the answer was ended" in rest and "[DONE]" in rest
    assert process.stderr.read().splitlines()[-1] == "stopped."


def test_a_port_in_use_is_one_line(running, directories, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve.py", str(directories[0]), "--port", str(running.port)])
    with pytest.raises(SystemExit, match="2"):
        serve.main()
    assert f"error: cannot listen on 127.0.0.1, port {running.port}" in capsys.readouterr().err


@pytest.mark.slow
def test_memory_does_not_grow_over_500_requests(running):
    body, process, sizes = {"messages": HELLO, "max_tokens": 5, "logprobs": True}, psutil.Process(), []
    for number in range(600):
        assert post(running, body, "/v1/chat/completions")[0] == 200
        if number in (99, 599):
            sizes.append(process.memory_info().rss)
    assert sizes[1] - sizes[0] < 5e6
