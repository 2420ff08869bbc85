"""Documents in chunks that are encoded one at a time."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.chunks import chunks


@settings(max_examples=300, deadline=None)
@given(
    blocks=st.lists(st.text(st.sampled_from("ab é\n\t\r"), max_size=60), max_size=12),
    chunk_size=st.integers(1, 12),
    max_line=st.integers(12, 40),
)
def test_chunks_are_the_text_whatever_its_blocks_and_end_at_line_ends(blocks, chunk_size, max_line):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.chunks.CHUNK", chunk_size)
        patch.setattr("data.chunks.MAX_LINE", max_line)
        found = list(chunks(blocks))
        assert found == list(chunks(["".join(blocks)])) == list(chunks("".join(blocks)))
    assert "".join(found) == "".join(blocks)
    assert all(found)
    assert all(len(chunk) <= max_line for chunk in found)
    for chunk, following in itertools.pairwise(found):
        at_line_start = chunk.endswith("\n") and not following[0].isspace()
        assert at_line_start or len(chunk) == max_line, "only a line that is too long is cut inside"
