"""The named corpora, downloaded from a local server that answers like the Hugging Face hub."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data.corpus import DOWNLOADS

ROOT = Path(__file__).parents[2]


def content(path: str) -> bytes:
    """A parquet file whose one row says which file it is."""
    written = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": [f"the text of {path}"]}), written)
    return written.getvalue()


@pytest.fixture(autouse=True)
def published(request) -> None:
    """The files of all named corpora, for tests that have a server."""
    if "hub" in request.fixturenames:
        request.getfixturevalue("hub").files = {
            f"/datasets/{dataset.repository}/resolve/{dataset.revision.replace('/', '%2F')}/{file}": content(file)
            for dataset in DOWNLOADS.values()
            for file in dataset.files
        }


def read(name: str, home: Path, port: int) -> subprocess.CompletedProcess:
    """Read a named corpus in a new process (the hub's library reads its environment once) without pauses to retry."""
    code = (
        "import sys, time; time.sleep = lambda seconds: None\n"
        "from data.corpus import read_documents, resolve; from errors import exit_on_user_error\n"
        "with exit_on_user_error():\n    print(*map(''.join, read_documents(resolve([sys.argv[1]]))), sep='\\n')"
    )
    environment = {
        key: value for key, value in os.environ.items() if not key.upper().startswith(("HF_", "HUGGINGFACE"))
    }
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{port}", "NO_PROXY": "127.0.0.1"}
    return subprocess.run(
        [sys.executable, "-c", code, name], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("name", DOWNLOADS)
def test_a_named_corpus_is_downloaded_once_into_the_hugging_face_cache(tmp_path, hub, name):
    expected = [f"the text of {file}" for file in DOWNLOADS[name].files]
    first = read(name, tmp_path, hub.server_port)
    assert first.stdout.splitlines() == expected, first.stderr
    assert len([path for command, path in hub.asked if command == "GET" and path in hub.files]) == len(expected)
    hub.asked.clear()
    again = read(name, tmp_path, hub.server_port)
    assert again.stdout.splitlines() == expected
    assert not [path for _, path in hub.asked if path in hub.files], "what the cache holds needs no network"
    assert list((tmp_path / "hub").glob("datasets--*")), "where every other program looks"


def error_message(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 2 and not result.stdout
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("error: "), result.stderr
    return result.stderr


def test_an_unreachable_server_gives_a_one_line_error(tmp_path):
    message = error_message(read("shakespeare", tmp_path, 9))  # the port of "discard": nobody listens
    assert "default/train/0000.parquet" in message and "karpathy/tiny_shakespeare" in message
    assert "check the connection" in message and "--data" in message


def test_a_missing_file_gives_a_one_line_error(tmp_path, hub):
    hub.files.clear()
    message = error_message(read("tinystories", tmp_path, hub.server_port))
    assert "404" in message and "train-00000-of-00004" in message
