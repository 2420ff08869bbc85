"""Counts the files that a document passes from disk to its loss, and a prompt to its last character.

A file counts when one of its functions gets or returns the text or its token ids. `python tests/doors.py`
exits with status 1 where there are too many.
"""

import runpy
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
MARK = "Rumpelstiltskin spins straw into gold"
DOCUMENT, PROMPT = 12, 7  # at most so many files


def holds(value: object, ids: bytes, depth: int = 3) -> bool:
    """Whether the value is, or contains, text with the mark or its ids."""
    if isinstance(value, str | bytes):
        return MARK in (value if isinstance(value, str) else value.decode("utf-8", "replace"))
    if isinstance(value, torch.Tensor):
        value = value.numpy(force=True) if value.dtype == torch.int64 else None
    if isinstance(value, list | tuple) and depth and len(value) < 100_000:
        if not value or not all(type(item) is int and 0 <= item < 1 << 31 for item in value):
            return any(holds(item, ids, depth - 1) for item in value[:20])
        value = np.asarray(value, np.int64)
    is_ids = isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size < 1e6
    return is_ids and ids in value.astype(np.int64).tobytes()


def count(script: str, arguments: Sequence[str], ids: Sequence[int]) -> dict[str, str]:
    """Run a script in this process; the files that the value passed, each with its first function."""
    files, needle = {}, np.asarray(ids, np.int64).tobytes()

    def look(frame, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event not in ("call", "return") or not path.startswith(f"{ROOT}/") or path.startswith(str(ROOT / "tests")):
            return
        values, name = [argument] if event == "return" else frame.f_locals.values(), path.removeprefix(f"{ROOT}/")
        if name not in files and any(holds(value, needle) for value in list(values)):
            files[name] = frame.f_code.co_qualname

    sys.argv = [script, *arguments]
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as end:
        assert not end.code, end
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        vars(sys.stdout).pop("write", None)  # train.py makes control characters visible there
    return files


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from data.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = "".join(f"{number} {MARK} {number * 7919}. {number**3}\n" * 30 for number in range(200))
        (folder / "text.txt").write_text(text)
        shape = "--hidden-size 64 --num-hidden-layers 1 --sequence-length 64 --batch-size 2 --vocab-size 320 --steps 2"
        flags = [*shape.split(), "--data", str(folder / "text.txt")]
        count("train.py", [*flags, "--cache", str(folder / "cache"), "--out", str(folder / "first")], [0] * 9)
        ids = load_tokenizer(folder / "first" / "last").encode(f"0 {MARK} 0")[3:-3]
        document = count("train.py", [*flags, "--cache", str(folder / "other"), "--out", str(folder / "run")], ids)
        prompt = count("generate.py", [str(folder / "run"), f"0 {MARK} 0", "--max-new-tokens", "9"], ids)
    for title, files, most in (("document", document, DOCUMENT), ("prompt", prompt, PROMPT)):
        print(f"\n{title}: {len(files)} files (at most {most})")
        for file, function in files.items():
            print(f"  {file:32} {function}")
    return int(len(document) > DOCUMENT or len(prompt) > PROMPT)


if __name__ == "__main__":
    sys.exit(main())
