"""The page in a real browser, the Chromium of the system: `python -m pytest -m slow tests/serving`."""

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


def test_two_models_stream_side_by_side_and_a_text_is_compared(directories, open_page, tmp_path):
    other = write_chat_model(tmp_path / "other", "inst")  # with another tokenizer
    with served(directories[1], other) as server:
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
        window.locator("section").nth(1).locator(".token").nth(3).hover()
        before = window.locator("section").nth(0).inner_text()
        window.locator("#why button").nth(2).click()
        wait(window, "tokens, ", 1)
        assert window.locator("section").nth(0).inner_text() == before
        window.select_option("#mode", "compare")
        window.fill("#prompt", "def add(x, y): ☺\n    <script>alert(1)</script>")
        window.click("#go")
        window.locator("#summary").filter(has_text="Second model minus first").wait_for()
        assert window.locator("#columns script").count() == 0 and "<script>" in window.inner_text("#columns")
        bits = [float(text.split()[4]) for text in window.locator("section .status").all_inner_texts()]
        minus = window.inner_text("#summary").split(": ")[1]
        assert abs(bits[1] - bits[0] - float(minus.split()[0])) < 2e-4 and "bits per byte" in minus
        window.reload()
        window.locator("#seed").wait_for(state="attached")
        assert window.locator("#max_tokens").input_value() == "20" and window.locator(".token").count() == 0


def test_a_chat_is_stopped_regenerated_and_continued_on_a_narrow_dark_screen(directories, open_page, monkeypatch):
    sample = generate.sample
    monkeypatch.setattr(generate, "sample", lambda *a: time.sleep(0.01) or sample(*a))  # time to press Stop
    with served(directories[0]) as server:
        window = open_page(server, width=390, color_scheme="dark")
        settings(window, max_tokens=3000, temperature=3)
        window.focus("#prompt")
        window.keyboard.type("hello")
        window.keyboard.press("Enter")
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
        window.focus("summary")
        for key in ("Tab", "ArrowRight", "Enter", "ArrowDown", "Enter"):  # the second alternative of the second token
            window.keyboard.press(key)
        wait(window, "14 tokens, ")
        window.focus(".token")
        window.keyboard.press("Escape")
        assert window.locator("#why").is_hidden()
