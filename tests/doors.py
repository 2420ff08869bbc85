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


class Doors:
    """The files, in the order in which the value reaches them, of all functions called while this is installed."""

    def __init__(self, ids: Sequence[int]):
        self.files: dict[str, str] = {}
        self._needle = np.asarray(ids, np.int64).tobytes()

    def __call__(self, frame, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event not in ("call", "return") or not path.startswith(f"{ROOT}/") or path.startswith(str(ROOT / "tests")):
            return
        values = [argument] if event == "return" else list(frame.f_locals.values())
        name = str(Path(path).relative_to(ROOT))
        if name not in self.files and any(self.holds(value) for value in values):
            self.files[name] = frame.f_code.co_qualname

    def holds(self, value: object, depth: int = 3) -> bool:
        """Whether the value is, or contains, text with the mark or its ids."""
        if isinstance(value, str | bytes):
            return MARK in (value if isinstance(value, str) else value.decode("utf-8", "replace"))
        if isinstance(value, torch.Tensor):
            value = value.numpy(force=True) if value.dtype == torch.int64 else None
        if isinstance(value, np.ndarray):
            return value.dtype.kind in "iu" and value.size < 1e6 and self._needle in value.astype(np.int64).tobytes()
        if isinstance(value, list | tuple) and depth and len(value) < 100_000:
            if value and all(type(item) is int and 0 <= item < 1 << 31 for item in value):
                return self._needle in np.asarray(value, np.int64).tobytes()
            return any(self.holds(item, depth - 1) for item in value[:20])
        return False


def count(script: str, arguments: Sequence[str], ids: Sequence[int]) -> dict[str, str]:
    """Run a script in this process; the files that the value passed, each with its first function."""
    doors = Doors(ids)
    sys.argv = [script, *arguments]
    threading.setprofile(doors)
    sys.setprofile(doors)
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as end:
        assert not end.code, end
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        vars(sys.stdout).pop("write", None)  # train.py makes control characters visible there
    return doors.files


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from data.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder, text = Path(name), Path(name) / "text"
        text.mkdir()
        for number in range(200):
            (text / f"{number}.txt").write_text(f"{number} {MARK} {number * 7919}. {number**3}\n" * 30)
        shape = "--hidden-size 64 --num-hidden-layers 1 --sequence-length 64 --batch-size 2 --vocab-size 320 --steps 2"
        flags = [*shape.split(), "--data", str(text)]
        count("train.py", [*flags, "--cache", str(folder / "cache"), "--out", str(folder / "first")], [0] * 9)
        tokenizer = load_tokenizer(folder / "first" / "last")
        ids = tokenizer.encode(f"0 {MARK} 0")[3:-3]
        flags += ["--cache", str(folder / "other")]
        document = count("train.py", [*flags, "--out", str(folder / "run")], ids)
        prompt = count("generate.py", [str(folder / "run"), f"0 {MARK} 0", "--max-new-tokens", "9"], ids)
    for title, files, most in (("document", document, DOCUMENT), ("prompt", prompt, PROMPT)):
        print(f"\n{title}: {len(files)} files (at most {most})")
        for file, function in files.items():
            print(f"  {file:32} {function}")
    return int(len(document) > DOCUMENT or len(prompt) > PROMPT)


if __name__ == "__main__":
    sys.exit(main())
