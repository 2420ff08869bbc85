"""The page in a real browser, the Chromium of the system: `python -m pytest -m slow tests/serving`."""

import shutil
import time

import pytest

from generation import generate
from tests.serving.conftest import served

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, such as of apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def pair(directories, tmp_path_factory):
    """Two models that continue texts, with different most likely tokens."""
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(directories[1], tmp_path_factory.mktemp("other") / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 1.3
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with served(directories[1], other) as running:
        yield running


@pytest.fixture(scope="module")
def chat(directories):
    with served(directories[0]) as running:
        yield running


@pytest.fixture
def open_page(browser):
    """A new window with an address; what its script raises fails the test."""
    errors, windows = [], []

    def open_page(address: str, width: int = 1000, **options):
        window = browser.new_page(viewport={"width": width, "height": 700}, **options)
        window.set_default_timeout(20_000)
        window.on("pageerror", lambda error: errors.append(error))
        window.goto(address)
        window.locator("#mode option").first.wait_for(state="attached")
        windows.append(window)
        return window

    yield open_page
    for window in windows:
        window.close()
    assert errors == []


def settings(window, **values) -> None:
    window.click("summary")
    for name, value in values.items():
        window.fill(f"#{name}", str(value))
        window.dispatch_event(f"#{name}", "change")
    window.click("summary")


def test_two_models_stream_side_by_side_and_the_place_where_they_part_is_marked(pair, open_page):
    window = open_page(pair.url)
    settings(window, temperature=0, max_tokens=20)
    window.fill("#prompt", "def add")
    window.keyboard.press("Control+Enter")
    for i in range(2):
        window.locator("section .status").nth(i).filter(has_text="tokens, ").wait_for()
    assert window.locator(".part").count() == 2 and "part at token" in window.inner_text("#summary")
    window.locator("section").nth(1).locator(".token").nth(3).hover()
    assert window.locator("#why button").count() == 5
    before, chosen = window.locator("section").nth(0).inner_text(), window.locator("#why button").nth(2)
    chosen.click()
    window.locator("section .status").nth(1).filter(has_text="tokens, ").wait_for()
    assert window.locator("section").nth(0).inner_text() == before
    window.reload()
    window.locator("#mode option").first.wait_for(state="attached")
    assert window.locator("#max_tokens").input_value() == "20" and window.locator(".token").count() == 0


def test_a_text_is_compared_token_by_token(pair, open_page):
    window = open_page(pair.url)
    window.select_option("#mode", "compare")
    window.fill("#prompt", "def add(x, y): ☺\n    <script>alert(1)</script>")
    window.click("#go")
    window.locator("#summary").filter(has_text="Second model minus first").wait_for()
    assert window.locator("section").nth(0).locator(".token").count() > 10 and window.locator(".better").count() > 5
    assert window.locator("#columns script").count() == 0 and "<script>" in window.inner_text("#columns")
    window.locator(".token").nth(4).hover()
    assert "nats against the other model" in window.inner_text("#why")
    nats = [float(text.split()[0]) for text in window.locator("section .status").all_inner_texts()]
    minus = float(window.inner_text("#summary").split(": ")[1].split()[0])
    assert abs(nats[1] - nats[0] - minus) < 2e-4


def test_a_chat_is_stopped_regenerated_and_continued_on_a_narrow_dark_screen(chat, open_page, monkeypatch):
    sample = generate.sample
    monkeypatch.setattr(generate, "sample", lambda *a: time.sleep(0.01) or sample(*a))  # time to press Stop
    window = open_page(chat.url, width=390, color_scheme="dark")
    settings(window, max_tokens=3000, temperature=3)
    window.fill("#prompt", "hello")
    window.keyboard.press("Enter")
    window.locator(".token").nth(5).wait_for()
    window.click("#stop")
    window.locator("section .status").filter(has_text="stopped").wait_for()
    first = window.locator(".text").inner_text()
    settings(window, max_tokens=12)
    window.click("#again")
    window.locator("section .status").filter(has_text="12 tokens").wait_for()
    assert window.locator(".text").inner_text() != first and "> hello" in window.locator(".text").inner_text()
    window.fill("#prompt", "more")
    window.click("#go")
    window.locator(".said").filter(has_text="> more").wait_for()
    window.locator("section .status").filter(has_text="12 tokens").wait_for()
    window.locator(".token").nth(2).focus()
    assert window.locator("#why button").count() == 5
    window.keyboard.press("Escape")
    assert window.locator("#why").is_hidden()
    assert window.evaluate("document.documentElement.scrollWidth") <= 390
    window.click("#curl")
    window.locator("#summary").filter(has_text="cop").or_(window.locator("#summary", has_text="curl")).wait_for()
