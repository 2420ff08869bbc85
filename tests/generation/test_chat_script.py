"""`python generate.py --chat` as a user runs it: in a pseudo-terminal, and with a message on standard input."""

import io
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import generate

SCRIPT = Path(__file__).parent.parent.parent / "generate.py"
FLAGS = ("--chat", "--device", "cpu")


class Terminal:
    """The script in a pseudo-terminal, which shows standard output and standard error as a user sees them."""

    def __init__(self, *arguments):
        import pty

        self._screen, slave = pty.openpty()
        command = [sys.executable, str(SCRIPT), *map(str, arguments)]
        environment = {**os.environ, "TERM": "dumb", "INPUTRC": os.devnull}
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        # The controlling terminal of a session of its own, so that Ctrl-C becomes a signal to the script alone. Shells
        # start what runs in the background with Ctrl-C ignored.
        code = "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        code += "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", code, *command]
        self.process = subprocess.Popen(command, **ends, env=environment, start_new_session=True)
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def read_until(self, expected: str, seconds: float = 60) -> str:
        """What the screen shows, up to and with `expected`."""
        import select

        text, end = b"", time.monotonic() + seconds
        while expected.encode() not in text:
            if not select.select([self._screen], [], [], max(0, end - time.monotonic()))[0]:
                pytest.fail(f"no {expected!r} within {seconds} s after {text.decode(errors='replace')!r}")
            text += os.read(self._screen, 1)
        return text.decode(errors="replace")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_a_conversation_in_a_terminal(talkative_model):
    terminal = Terminal(talkative_model, *FLAGS, "--max-new-tokens", 16000)
    try:
        assert f"{talkative_model} on cpu" in terminal.read_until("Ctrl-C stops an answer")
        terminal.read_until("\n> ")
        time.sleep(0.5)  # Python notices a signal only once readline waits for a key, shortly after it shows the prompt
        terminal.type("\x03")
        assert "Ctrl-D leaves" in terminal.read_until("\n> ")
        terminal.type("hello\n")
        terminal.read_until("hello\r\n")
        first = terminal.read_until("\n")  # the model never ends an answer by itself
        terminal.type("\x03")
        rest = terminal.read_until("stopped\r\n> ")
        assert len(first) > 1 and "Traceback" not in rest and "forgotten" not in rest
        assert not any(ch in first + rest for ch in "\x1b\x07\x08")
        terminal.type("/reset\n")
        assert "a new conversation begins" in terminal.read_until("\n> ")
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()


def test_a_message_on_standard_input_gets_the_answer_alone_on_standard_output(chatml_model):
    flags = (*FLAGS, "--max-new-tokens", "9", "--system", "Be terse.")
    command = [sys.executable, str(SCRIPT), str(chatml_model), *flags]
    result = subprocess.run(command, input=b"hello\n", capture_output=True, timeout=120)
    assert result.returncode == 0 and len(result.stdout) > 5 and result.stdout.endswith(b"\n")
    assert b"hello" not in result.stdout and b"assistant" not in result.stdout
    lines = result.stderr.decode().splitlines()
    assert len(lines) == 2 and lines[1].startswith(f"{chatml_model} on cpu")


def test_flags_that_are_given_win_over_the_recommended_sampling_even_with_the_value_of_the_default(
    chatml_model, tmp_path, monkeypatch, capsys
):
    model = shutil.copytree(chatml_model, tmp_path / "model")
    (model / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 3}')
    seen = []
    monkeypatch.setattr("generation.session.run", lambda settings, *_: seen.append(settings.sampling))
    for flags in ((), ("--temperature", "0.8"), ("--top-k", "0")):
        monkeypatch.setattr(sys, "argv", ["generate.py", str(model), *FLAGS, "--prompt", "x", *flags])
        generate.main()
    assert [(s.temperature, s.top_k) for s in seen] == [(0.6, 3), (0.8, 3), (0.6, 0)]
    assert (
        "(generation_config.json, then flags): repetition_penalty 1, temperature 0.8, top_k 3"
        in capsys.readouterr().err
    )


def test_no_message_is_an_error_and_a_terminal_without_a_prompt_is_a_conversation(chatml_model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", str(chatml_model), *FLAGS])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    with pytest.raises(SystemExit, match="2"):
        generate.main()
    assert "error: there is no message to answer" in capsys.readouterr().err
    seen = []
    monkeypatch.setattr("generation.session.run", lambda settings, checkpoint, prompts: seen.append(prompts))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for flags in (FLAGS, (*FLAGS, "--prompt", "x"), FLAGS[1:]):
        monkeypatch.setattr(sys, "argv", ["generate.py", str(chatml_model), *flags])
        generate.main()
    assert seen == [[], ["x"], [""]]
