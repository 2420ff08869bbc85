"""The benchmark of loading counts the memory and the time of a real load."""

from pathlib import Path

import pytest

from benchmarks import loading
from checkpoints.pretrained import save_pretrained
from errors import UserError
from model.config import ModelConfig
from model.decoder import Decoder

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone counts peak memory")


@pytest.mark.parametrize("reader", ["ours", "transformers"])
def test_a_forward_pass_needs_at_least_the_weights_in_memory(tmp_path, reader):
    save_pretrained(Decoder(ModelConfig(8192, 1024, 1024, 1, 4, 2), seed=1), tmp_path)  # 50 MB
    found = loading.in_fresh_process(reader, str(tmp_path), "float32")
    assert found["seconds"] > 0 and found["loaded"] <= found["after_forward"]
    assert 0.95 < found["after_forward"] < 3


def test_a_process_that_fails_is_a_one_line_error(tmp_path):
    with pytest.raises(UserError, match="the process that loads with ours failed"):
        loading.in_fresh_process("ours", str(tmp_path), "float32")
