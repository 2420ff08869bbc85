"""Data sets of the Hub, downloaded from a local server that answers like it."""

import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data.sources import KNOWN

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
if __name__ == "__main__":
    from data import corpus, units
    from errors import exit_on_user_error
    units.UNIT_BYTES = 1
    with exit_on_user_error():
        text = corpus.prepare([sys.argv[1]], cache_dir=sys.argv[2], tokenizer=sys.argv[3])
        print(json.dumps(text.tokenizer.decode(text.train[:])))
        print(text.text_hash, text.validation.tolist())
"""


def publish(hub, dataset: str, revision: str, texts: dict[str, str]) -> list[str]:
    """Put a data set on the server, twenty documents a file; returns the paths of its files there."""
    files, generator = {}, random.Random(0)
    for name, text in texts.items():
        written, documents = io.BytesIO(), [f"{text} {n} {generator.randbytes(500).hex()}" for n in range(20)]
        parquet.write_table(pyarrow.table({"text": documents}), written)
        files[f"/datasets/{dataset}/resolve/{hub.commit}/{name}"] = written.getvalue()
    siblings = [{"rfilename": name, "size": 1000} for name in [*texts, "README.md"]]
    info = {"id": dataset, "sha": hub.commit, "siblings": siblings}
    hub.files |= files | {f"/api/datasets/{dataset}/revision/{revision}": json.dumps(info).encode()}
    return [*files]


def start(name: str, folder: Path, port: int, tokenizer: Path) -> subprocess.Popen:
    """Prepare a data set in a new process (the library reads its environment once), which then prints it."""
    (folder / "script.py").write_text(SCRIPT)
    environment = {
        key: value for key, value in os.environ.items() if not key.upper().startswith(("HF_", "HUGGINGFACE"))
    }
    environment |= {"HF_HOME": str(folder), "HF_ENDPOINT": f"http://127.0.0.1:{port}", "NO_PROXY": "127.0.0.1"}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, folder / "script.py", name, folder / "cache", tokenizer]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen([*map(str, command)], cwd=folder, env=environment, text=True, **pipes)


def downloads(hub) -> list[str]:
    """The files that were asked for, each once."""
    return sorted({path.rpartition("/")[2] for command, path in hub.asked if command == "GET" and "/resolve/" in path})


@pytest.fixture
def numbers(hub) -> list[str]:
    """A data set of nine files in a folder, and one beside it."""
    texts = {f"part/{n}.parquet": f"file {n}" for n in range(9)}
    beside = {name: "other" for name in ("other.parquet", "part-2/0.parquet", "part.parquet")}
    return publish(hub, "owner/numbers", "main", texts | beside)


def test_a_data_set_is_read_in_order_and_downloaded_once(tmp_path, hub, numbers, tokenizer_file):
    process = start("hub:owner/numbers/part", tmp_path, hub.server_port, tokenizer_file)
    out, error = process.communicate()
    assert process.returncode == 0, error
    assert list(dict.fromkeys(re.findall("file [0-9]", out))) == [f"file {n}" for n in range(9)] and "other" not in out
    assert downloads(hub) == [f"{n}.parquet" for n in range(9)]
    hub.asked.clear()
    again = start("hub:owner/numbers/part", tmp_path, hub.server_port, tokenizer_file)
    assert again.communicate()[0] == out
    assert not downloads(hub)


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_text_is_its_files_of_a_data_set(tmp_path, hub, tokenizer_file, name):
    dataset, revision, begin = KNOWN[name]
    publish(hub, dataset, revision.replace("/", "%2F"), {f"{begin}{n}.parquet": f"{name} {n}" for n in range(2)})
    process = start(name, tmp_path, hub.server_port, tokenizer_file)
    out, error = process.communicate()
    assert f"{name} 0 " in out and f"{name} 1 " in out, error
    assert list((tmp_path / "hub").glob("datasets--*")), "where every other program looks"


def test_the_list_of_a_data_set_is_kept_for_each_revision(tmp_path, hub, tokenizer_file):
    dataset, revision, begin = KNOWN["shakespeare"]
    publish(hub, dataset, "main", {"plain.parquet": "of main"})
    assert "of main" in start(f"hub:{dataset}", tmp_path, hub.server_port, tokenizer_file).communicate()[0]
    publish(hub, dataset, revision.replace("/", "%2F"), {f"{begin}0.parquet": "of another"})
    assert "of another" in start("shakespeare", tmp_path, hub.server_port, tokenizer_file).communicate()[0]


def error_message(process: subprocess.Popen) -> str:
    error = process.communicate()[1]
    assert process.returncode == 2
    assert len(error.splitlines()) == 1 and error.startswith("error: "), error
    return error


def test_what_cannot_be_downloaded_is_one_line(tmp_path, hub, numbers, tokenizer_file):
    unreachable = error_message(start("hub:owner/numbers", tmp_path, 9, tokenizer_file))  # nobody listens there
    assert "the data set owner/numbers of the Hub cannot be read" in unreachable and "connection" in unreachable
    missing = error_message(start("hub:owner/nothing", tmp_path, hub.server_port, tokenizer_file))
    assert "404" in missing and "owner/nothing" in missing
    nowhere = error_message(start("hub:owner/numbers/nowhere", tmp_path, hub.server_port, tokenizer_file))
    assert "hub:owner/numbers/nowhere names no file to read" in nowhere
    for path in numbers:
        del hub.files[path]
    message = error_message(start("hub:owner/numbers/part", tmp_path, hub.server_port, tokenizer_file))
    assert "part/0.parquet" in message and "404" in message
