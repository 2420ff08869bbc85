"""Files that are not quite what their names say: a byte order mark, and lines that are not objects."""

import gzip

import pytest

from errors import UserError
from tests.data.conftest import read


def test_a_byte_order_mark_is_not_text(tmp_path):
    for name in ("a.txt", "a.md", "a.py", "b.jsonl", "b.jsonl.gz"):
        for content in (b"", b'{"text": "one"}\r\n\r\n{"text": "two"}\r\n'):
            marked = b"\xef\xbb\xbf" + content
            (tmp_path / name).write_bytes(gzip.compress(marked) if name.endswith("gz") else marked)
            expected = content.decode() if name[0] == "a" else "onetwo" if content else ""
            assert "".join(read([tmp_path / name])) == expected


@pytest.mark.parametrize("line", ['[{"text": "a"}]', '"text"', "null", "{\n", "\0\0"])
def test_a_line_that_is_no_object_is_named(line, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line)
    reason = "Expecting " if line[0] in "{\0" else "the line is of type (list|str|NoneType), not an object"
    with pytest.raises(UserError, match=rf"a.jsonl, row 2 cannot be read \({reason}.*; each line or row is an object"):
        read([tmp_path / "a.jsonl"])
