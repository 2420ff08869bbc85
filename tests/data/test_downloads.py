"""Data sets of the Hub, downloaded from a local server that answers like it."""

import io
import json
import random
import re

import pyarrow
import pytest
from pyarrow import parquet

from data.corpus import Corpus, prepare
from data.settings import DataSettings
from data.sources import KNOWN
from errors import UserError


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


@pytest.fixture
def prepared(tmp_path, tokenizer_file):
    return lambda name: prepare(DataSettings(data=(name,), cache=str(tmp_path / "cache")), tokenizer_file)


def text_of(corpus: Corpus) -> str:
    return corpus.tokenizer.decode(corpus.train[:])


@pytest.fixture
def numbers(hub) -> list[str]:
    """A data set of nine files in a folder, and one beside it."""
    texts = {f"part/{n}.parquet": f"file {n}" for n in range(9)}
    beside = {name: "other" for name in ("other.parquet", "part-2/0.parquet", "part.parquet")}
    return publish(hub, "owner/numbers", "main", texts | beside)


def test_a_data_set_is_read_in_order_and_downloaded_once(hub, numbers, prepared):
    corpus = prepared("hub:owner/numbers/part")
    found = list(dict.fromkeys(re.findall("file [0-9]|other", text_of(corpus))))
    assert found == [f"file {n}" for n in range(9)]
    assert {path for _, path in hub.asked if "/resolve/" in path} == set(numbers[:9])
    hub.asked.clear()
    again = prepared("hub:owner/numbers/part")
    assert again.text_hash == corpus.text_hash and not hub.asked


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_text_is_its_files_of_a_data_set(tmp_path, hub, prepared, name):
    dataset, revision, begin = KNOWN[name]
    publish(hub, dataset, revision.replace("/", "%2F"), {f"{begin}{n}.parquet": f"{name} {n}" for n in range(2)})
    text = text_of(prepared(name))
    assert f"{name} 0 " in text and f"{name} 1 " in text
    assert list((tmp_path / "hub").glob("datasets--*")), "where every other program looks"


def test_the_list_of_a_data_set_is_kept_for_each_revision(hub, prepared):
    dataset, revision, begin = KNOWN["shakespeare"]
    publish(hub, dataset, "main", {"plain.parquet": "of main"})
    assert "of main" in text_of(prepared(f"hub:{dataset}"))
    publish(hub, dataset, revision.replace("/", "%2F"), {f"{begin}0.parquet": "of another"})
    assert "of another" in text_of(prepared("shakespeare"))


def test_what_cannot_be_downloaded_is_one_line(hub, numbers, prepared, no_network):
    reasons = {
        "owner/nothing": "^hub:owner/nothing cannot be downloaded .HTTP 404.; check the connection and the name",
        "owner/numbers/nowhere": "^hub:owner/numbers/nowhere names no file to read",
        "owner/numbers/part": "^part/0.parquet of hub:owner/numbers cannot be downloaded .HTTP 404",
    }
    for path in numbers:
        del hub.files[path]
    for name, reason in reasons.items():
        with pytest.raises(UserError, match=reason):
            prepared(f"hub:{name}")
    no_network()
    with pytest.raises(UserError, match=r"hub:owner/other cannot be downloaded \(ConnectError\); check the connection"):
        prepared("hub:owner/other")
