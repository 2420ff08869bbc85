"""What a program does about output that nobody takes, and about a folder that another process uses."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from errors import UserError, note, reading
from files import locked, read_json, read_toml
from terminal import fit_terminal
from tests.conftest import ROOT, run_python


def python(code: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    """Run code that uses `errors` in another process; what it writes to standard error is kept."""
    streams = {"capture_output": False, "stderr": subprocess.PIPE}
    return run_python("-c", f"import errors\n{code}", *arguments, timeout=60, **streams | options)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_that_is_the_product_and_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:  # every write to it fails as on a full disk
        done = python("with errors.exit_on_user_error(): print('x')", stdout=full)
    assert (done.returncode, done.stderr) == (2, "error: [Errno 28] No space left on device\n")


def test_a_closed_pipe_is_the_status_of_sigpipe_also_at_the_end():
    code = "import errors, sys\nwith errors.exit_on_user_error():\n print(sys.stdin.read())\n sys.exit(0)"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    program = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes)
    program.stdout.close()
    program.stdin.close()
    assert program.wait(60) == 141


@pytest.mark.skipif(os.name == "nt", reason="Windows runs no preexec_fn, which closes them")
@pytest.mark.parametrize("closed", [{0}, {1}, {2}, {0, 1, 2}], ids=str)
def test_standard_streams_may_be_closed_and_files_do_not_get_what_is_printed(tmp_path, closed):
    code = f"""import sys
with errors.exit_on_user_error(), open({str(tmp_path / "file")!r}, "w") as file:
    print("x" + sys.stdin.read())
    print("y", file=sys.stderr)
    file.write("kept")
    assert file.fileno() > 2"""
    done = python(code, preexec_fn=lambda: [os.close(n) for n in closed], stdin=subprocess.DEVNULL, stderr=None)
    assert done.returncode == 0 and (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(os.name == "nt", reason="there, command lines are Unicode")
def test_a_command_line_that_is_not_utf_8_is_one_line_before_anything_is_made(tmp_path):
    flags = ["--out", tmp_path / "run", "--sample-prompts", os.fsdecode(b"caf\xe9")]
    done = run_python("train.py", *flags, encoding="utf-8", timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: caf� is not UTF-8")
    assert len(done.stderr.splitlines()) == 1 and not os.listdir(tmp_path)


@pytest.mark.parametrize("work", ["import slow", "signal.raise_signal(2)"])
def test_ctrl_c_is_one_line_in_an_import_that_would_lose_it_and_again_while_the_process_ends(tmp_path, work):
    (tmp_path / "slow.py").write_text("import signal\ntry: signal.raise_signal(2)\nexcept BaseException: pass")
    code = f"""import atexit, signal, sys
sys.path.append({str(tmp_path)!r})
with errors.exit_on_user_error():
    atexit.register(signal.raise_signal, 2)
    {work}"""
    done = python(code)
    assert (done.returncode, done.stderr) == (130, "stopped.\n")


def test_a_terminal_gets_no_control_characters_lines_that_end_between_words_and_whole_commands(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    terminal, text = io.StringIO(), "one long line of many words\nshort\nnext: python generate.py run"
    assert fit_terminal(text, terminal) == text
    terminal.isatty = lambda: True
    assert fit_terminal(text, terminal) == text.replace(" many", "\n  many").replace(" python", "\n  python")
    assert fit_terminal("\x1b[1mone\x1b[0m of the colours", terminal) == "\x1b[1mone\x1b[0m of the colours"
    assert fit_terminal("  | a text by the model, of 40 columns", terminal) == "  | a text by the model, of 40 columns"
    assert str(UserError("é ▁ a\nb\x1b[31m\x9b\udc80")) == "é ▁ a␊b␛[31m��"
    note("a/\x1b]0;title\x07/b")
    assert capsys.readouterr().err == "a/␛]0;title␇/b\n"


def test_what_is_wrong_in_a_file_is_one_line_with_its_name_and_the_fix_and_a_byte_order_mark_is_not_wrong(tmp_path):
    for reader, text in ((read_toml, "seed = 3\n"), (read_json, '{"seed": 3}')):
        (tmp_path / "file").write_text(text, encoding="utf-8-sig")
        assert reader(tmp_path / "file") == {"seed": 3}
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(UserError, match=r"a.json cannot be read \(.+\); download or"):
        read_json(tmp_path / "a.json")
    for error in (KeyError("shape"), ValueError(), OSError(5, "Input/output error"), RuntimeError("no")):
        with pytest.raises(UserError, match=r"^x cannot be read \(.+\); fix it\.$"), reading("x", "fix it"):
            raise error
    assert read_json(tmp_path / "none.json") == {}


def test_a_missing_file_or_package_is_one_safe_line_and_a_traceback_is_shown_where_it_is_asked_for():
    actions = {"open('no/\\x1b[31mx')": "no/␛[31mx: No such file or directory."}
    for package, fix in (("no_such_package", "no_such_package"), ("tyro", "-r requirements.txt")):
        actions[f"import {package}"] = f"this needs the package {package}: pip install {fix}"
    for action, said in actions.items():
        done = python(f"errors.sys.modules['tyro'] = None\nwith errors.exit_on_user_error(): {action}")
        assert (done.returncode, done.stderr) == (2, f"error: {said}\n")
    shown = python("with errors.exit_on_user_error(): raise errors.UserError('wrong')", "--traceback").stderr
    assert shown.startswith("Traceback") and shown.endswith("error: wrong\n")


def test_a_folder_is_used_by_one_process_at_a_time_until_that_ends(tmp_path):
    folder = tmp_path / "new" / "run"
    with locked(folder), pytest.raises(UserError, match="in use by another process"), locked(folder):
        pass
    code = "import os, sys, pathlib, files\nwith files.locked(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    assert python(code, str(folder)).returncode < 0
    with locked(folder):
        pass


@pytest.mark.parametrize("program", ["train", "generate", "ablate", "serve", "benchmarks", "contrib.gguf"])
def test_ctrl_c_while_a_program_is_imported_is_one_line(program):
    code = f"""import runpy, signal, sys
class CtrlC:
    def find_spec(self, name, *_):
        if name in ("torch", "tyro", "numpy", "msgspec"):  # the slow ones
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, CtrlC())
sys.argv = ["program", "run", "out"]
runpy.run_module({program!r}, run_name="__main__")"""
    done = python(code)
    assert (done.returncode, done.stderr) == (130, "stopped.\n")
