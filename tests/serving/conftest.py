"""A server with two models in this process: `chat` has a template, `text` has none."""

import contextlib
import dataclasses
import http.client
import json
import shutil
import socket
import threading
import time

import pytest
import torch

from checkpoints.pretrained import load_pretrained, save_pretrained
from model.decoder import Decoder
from tests.generation.conftest import output, write_chat_model  # noqa: F401 - a fixture

pytest.importorskip("uvicorn", reason="needs starlette and uvicorn")


@contextlib.contextmanager
def served(*directories, host="127.0.0.1"):
    """A running server of the directories, under their names."""
    from serving.server import Server

    server = Server({path.name: path for path in directories}, host, device="cpu")
    listener = socket.create_server(("127.0.0.1", 0))
    server.port = listener.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server
    finally:  # a failing test would else wait for the thread forever
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()


def send(port: int, body: bytes | dict, path: str = "/v1/completions", **headers) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)
    return connection


def post(server, *request, **options) -> tuple[int, dict]:
    """The status and the JSON of an answer."""
    answer = send(server.port, *request, **options).getresponse()
    return answer.status, json.load(answer, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture(scope="session")
def directories(tmp_path_factory):
    """Random models whose answers are long enough to be interrupted."""
    chat = write_chat_model(tmp_path_factory.mktemp("served") / "chat", "chatml", context=4096)
    text = shutil.copytree(chat, chat.with_name("text"))
    (text / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return chat, text


def write_layer_norm_model(rms, directory):
    """A random model with LayerNorm, whose gains are not 1 and biases not 0, and with the tokenizer of `rms`."""
    shutil.copytree(rms, directory)
    config = dataclasses.replace(load_pretrained(rms).config, norm="layer", norm_bias=True)
    decoder = Decoder(config, seed=4)
    generator = torch.Generator().manual_seed(4)
    for parameter in decoder.parameters():
        if parameter.ndim == 1:
            parameter.data += torch.randn(parameter.shape, generator=generator) / 2
    save_pretrained(decoder, directory)
    return directory
