"""What a program does about output that nobody takes, and about a folder that another process uses."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lock
from errors import OptionalOutput, UserError, exit_on_user_error

ROOT = Path(__file__).parent.parent
FULL = Path("/dev/full")  # every write to it fails as on a full disk


def python(code: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, **options)


def test_output_whose_reader_has_gone_is_dropped():
    read, write = os.pipe()
    stream = OptionalOutput(os.fdopen(write, "w"))
    stream.write("heard\n")
    stream.flush()
    assert os.read(read, 100) == b"heard\n"
    os.close(read)
    for _ in range(3):
        stream.write("x" * 100_000)
        stream.flush()
    stream.close()


@pytest.mark.parametrize("character", ["x", "\0", "\U000e0001"])
def test_an_error_that_quotes_a_huge_value_stays_readable(character):
    text = str(UserError(f"head_dim is {character * 100_000} and must be an integer."))
    assert len(text) < 2100 and text.startswith("head_dim is ") and text.endswith("and must be an integer.")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_output_that_cannot_be_written_is_reported_once_and_the_program_continues():
    code = "import errors; errors.open_streams(); [print('x' * 10_000, flush=True) for _ in range(3)]"
    with FULL.open("w") as full:
        done = python(code, stdout=full, stderr=subprocess.PIPE, text=True)
    words = os.strerror(errno.ENOSPC)
    assert done.returncode == 0
    assert done.stderr == f"note: standard output cannot be written ({words}); continuing without it\n"


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("how", ["print('x')", "print('x'); raise SystemExit(0)", "print('x' * 100_000)"])
def test_output_that_is_the_product_and_cannot_be_written_is_one_line(how):
    code = f"import errors\nwith errors.exit_on_user_error(): {how}"
    with FULL.open("w") as full:
        done = python(code, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, f"error: {os.strerror(errno.ENOSPC)}.\n")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("how", ["print('x', file=sys.stderr)", "raise errors.UserError('x')"])
def test_errors_that_cannot_be_written_still_end_with_status_2(how):
    with FULL.open("w") as full:
        done = python(f"import errors, sys\nwith errors.exit_on_user_error(): {how}", stdout=full, stderr=full)
    assert done.returncode == 2


def test_an_error_of_the_system_without_a_file_is_one_line(capsys):
    with pytest.raises(SystemExit) as end, exit_on_user_error():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert end.value.code == 2 and capsys.readouterr().err == f"error: {os.strerror(errno.ENOSPC)}.\n"


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell to close streams")
def test_a_program_whose_streams_are_closed_runs_to_its_end(tmp_path):
    code = (
        "import sys, errors, pathlib; errors.open_streams(); print('out'); print('err', file=sys.stderr);"
        f"pathlib.Path({str(tmp_path / 'end')!r}).touch()"
    )
    done = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, code], cwd=ROOT, timeout=60)
    assert done.returncode == 0 and (tmp_path / "end").exists()


def test_an_error_is_one_line_without_control_characters():
    assert str(UserError("é ▁ a\nb\x1b[31m\x9b\ud800\t")) == r"é ▁ a\nb\x1b[31m\x9b\ud800\t"


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell to close streams")
def test_an_error_is_never_printed_to_standard_output():
    code = "import sys, errors\nwith errors.exit_on_user_error(): raise errors.UserError('wrong')"
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code], cwd=ROOT, timeout=60, capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")


def test_a_program_writes_utf8_whatever_the_system_uses():
    code = "import errors; errors.open_streams(); print('é\\u4e2d')"
    done = python(code, stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.stdout.decode().strip() == "é中"


def test_a_folder_is_used_by_one_process_at_a_time(tmp_path):
    folder = tmp_path / "new" / "run"
    with lock.locked(folder), pytest.raises(UserError, match="in use by another process"), lock.locked(folder):
        pass
    with lock.locked(folder):  # released
        pass


def test_a_process_that_waits_for_a_folder_says_so_and_continues_when_it_is_free(tmp_path):
    code = "import sys, lock, pathlib\nwith lock.locked(pathlib.Path(sys.argv[1]), wait='waiting'): print('mine')"
    with lock.locked(tmp_path):
        command = [sys.executable, "-c", code, str(tmp_path)]
        waiting = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert waiting.stderr.readline() == "waiting\n" and waiting.poll() is None
    assert waiting.communicate(timeout=30)[0] == "mine\n"


def test_a_lock_ends_with_its_process(tmp_path):
    code = "import os, sys, lock, pathlib\nwith lock.locked(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, timeout=60)
    assert killed.returncode != 0
    with lock.locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_a_one_line_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be used"), lock.locked(tmp_path / "file" / "run"):
        pass


@pytest.mark.parametrize("name", ["x" * 5000, "a/" + "x" * 300])
def test_what_the_system_refuses_is_one_line_that_names_the_file(name):
    done = python(
        f"import errors\nwith errors.exit_on_user_error(): open({name!r}, 'w')", stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert len(done.stderr) < 400


PROGRAMS = ["train", "generate", "ablate", "training.plot"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_ctrl_c_while_a_program_is_imported_is_one_line(program):
    code = f"""
import runpy, sys

class CtrlC:
    def find_spec(self, name, *_):
        if name in ("torch", "tyro", "numpy", "msgspec"):  # the slow ones
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
sys.argv = ["program", "run", "out"]
runpy.run_module({program!r}, run_name="__main__")
"""
    done = python(code, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (130, "stopped.\n")
