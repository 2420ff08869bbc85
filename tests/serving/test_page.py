"""The page in a real browser, the Chromium of the system: `python -m pytest -m slow tests/serving`."""

import random
import shutil
import subprocess
import time

import pytest

from generation import generate
from tests.generation.conftest import write_chat_model
from tests.serving.conftest import served

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")]


@pytest.fixture
def open_page():
    """Opens the page of a server; what its script raises fails the test."""
    errors = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def open_page(server, width: int = 1000, **options):
            window = browser.new_context(viewport={"width": width, "height": 700}, **options).new_page()
            window.on("pageerror", lambda error: errors.append(error))
            window.goto(f"http://localhost:{server.port}")
            window.locator("#seed").wait_for(state="attached")
            return window

        yield open_page
    assert errors == []


def settings(window, **values) -> None:
    window.click("summary")
    for name, value in values.items():
        window.fill(f"#{name}", str(value))
        window.dispatch_event(f"#{name}", "change")
    window.click("summary")


def wait(window, text: str, column: int = 0) -> None:
    window.locator("section .status").nth(column).filter(has_text=text).wait_for()


def test_two_models_stream_and_are_compared_side_by_side_and_an_error_is_told_where_it_belongs(
    directories, open_page, tmp_path
):
    small = write_chat_model(tmp_path / "small", "inst", context=128)  # with another tokenizer
    with served(directories[1], small) as server:
        window = open_page(server, permissions=["clipboard-read", "clipboard-write"])
        settings(window, temperature=0, max_tokens=20)
        window.fill("#prompt", 'it\'s "$HOME" \\n\n')
        window.keyboard.press("Control+Enter")
        wait(window, "tokens, ", 1), wait(window, "20 tokens, ")
        assert window.locator(".part").count() == 2 and "part at token" in window.inner_text("#summary")
        window.click("#curl")
        command = window.evaluate("navigator.clipboard.readText()").replace('"stream":true', '"stream":false')
        answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout
        assert window.evaluate("text => JSON.parse(text).choices[0].text", answer) in window.inner_text("section")
        window.reload()
        assert window.input_value("#max_tokens") == "20"
        window.select_option("#mode", "compare")
        parts = ["def f(x):\n", "    ", "归一化", "é☺", "\n", " word", ";", "<script>alert(1)</script>"]
        text = "".join(random.Random(2).choices(parts, k=600))
        window.fill("#prompt", text)
        window.click("#go")
        window.locator("#summary").filter(has_text="Second model minus first").wait_for()
        scored = window.evaluate("columns.map(column => column.tokens.flatMap(token => token.bytes))")
        assert [bytes(column).decode() for column in scored] == [text, text]
        assert window.locator("#columns script").count() == 0 and "<script>" in window.inner_text("#columns")
        bits = [float(text.split()[4]) for text in window.locator("section .status").all_inner_texts()]
        minus = window.inner_text("#summary").split(": ")[1]
        assert abs(bits[1] - bits[0] - float(minus.split()[0])) < 2e-4 and "bits per byte" in minus
        del server.models["small"]
        window.click("#go")
        wait(window, "there is no model 'small'", 1), wait(window, "bits per byte", 0)
    window.click("#go")
    wait(window, "does not answer", 0), wait(window, "does not answer", 1)


def test_a_chat_is_stopped_regenerated_and_continued_on_a_narrow_dark_screen(directories, open_page, monkeypatch):
    sample = generate.sample
    monkeypatch.setattr(generate, "sample", lambda *a: time.sleep(0.01) or sample(*a))  # time to press Stop
    with served(directories[0]) as server:
        window = open_page(server, width=390, color_scheme="dark")
        settings(window, max_tokens=3000, temperature=3)
        window.fill("#prompt", "hello")
        window.press("#prompt", "Enter")
        window.locator(".token").nth(5).wait_for()
        window.click("#stop")
        wait(window, "stopped")
        first = window.locator(".text").inner_text()
        settings(window, max_tokens=12)
        window.click("#again")
        wait(window, "12 tokens, ")
        assert window.locator(".text").inner_text() != first and "> hello" in window.locator(".text").inner_text()
        window.fill("#prompt", "more")
        window.click("#go")
        window.locator(".said").filter(has_text="> more").wait_for()
        wait(window, "12 tokens, ")
        assert window.evaluate("document.documentElement.scrollWidth") <= 390
        window.locator(".said", has_text="> more").evaluate("said => said.nextSibling.focus()")
        for key in ("ArrowRight", "Enter", "ArrowDown", "Enter"):  # the second alternative of the second token
            window.keyboard.press(key)
        wait(window, "14 tokens, ")
        window.press(".token", "Escape")
        assert window.locator("#why").is_hidden()


def test_an_empty_page_on_a_phone_explains_itself_and_settings_refuse_nonsense(directories, open_page, tmp_path):
    best = shutil.copytree(directories[1], tmp_path / "run" / "best")
    (best / "state.json").write_text('{"best_validation_loss": 1.23456}')
    (best.parent / "settings.toml").write_text('[run]\nsample_prompts = ["", "Es war einmal"]')
    with served(best) as server:
        window = open_page(server, width=390, is_mobile=True, has_touch=True)
        text, said = window.inner_text("body"), ("RMSNorm (pre)", "best validation loss 1.2346", "Tap a token")
        assert all(part in text for part in said) and "Enter" not in text
        assert all(button.bounding_box()["height"] >= 44 for button in window.locator("button:visible").all())
        assert window.locator("#examples button").count() == 3
        window.tap("#examples button")
        wait(window, "tokens, ")
        assert "Es war einmal" in window.inner_text(".text") and window.locator("#examples button").count() == 0
        window.locator(".token").nth(2).tap()
        assert window.locator("#why .chosen").count() == 1
        window.click("summary")
        for name, nonsense in {"top_p": "1.5", "seed": "1.5", "max_tokens": "0", "min_p": ""}.items():
            window.fill(f"#{name}", nonsense)
            window.focus("#prompt")
            assert window.input_value(f"#{name}") != nonsense and name[:3] in window.inner_text("#refused")
        window.fill("#temperature", "0.3")
        window.click("text=Reset")
        assert window.input_value("#temperature") == "0.8" and window.evaluate("localStorage.length") == 0
