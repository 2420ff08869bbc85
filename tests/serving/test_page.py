"""The page in a real browser, the Chromium of the system: `python -m pytest -m slow tests/serving`."""

import math
import random
import shutil
import subprocess
import time

import pytest

from generation import generate
from tests.generation.conftest import write_chat_model
from tests.serving.conftest import served, write_layer_norm_model

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


def test_two_models_stream_and_are_compared_and_an_error_is_told_where_it_belongs(directories, open_page, tmp_path):
    small = write_chat_model(tmp_path / "small", "inst", context=128)  # with another tokenizer
    with served(directories[1], small) as server:
        window = open_page(server, permissions=["clipboard-read", "clipboard-write"])
        settings(window, temperature=0, max_tokens=20)
        window.fill("#prompt", 'it\'s "$HOME" \\n\n')
        window.keyboard.press("Control+Enter")
        wait(window, "tokens, ", 1), wait(window, "20 tokens, ")
        assert window.locator(".parting").count() == 2 and "part at token" in window.inner_text("#summary")
        window.click("text=Copy as curl")
        command = window.evaluate("navigator.clipboard.readText()").replace('"stream":true', '"stream":false')
        answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout
        assert window.evaluate("text => JSON.parse(text).choices[0].text", answer) in window.inner_text("section")
        window.select_option("#mode", "compare")
        parts = ["def f(x):\n", "    ", "归一化", "é☺", "\n", " word", ";", "<script>alert(1)</script>"]
        text = "".join(random.Random(2).choices(parts, k=600))
        window.fill("#prompt", text)
        window.click("#go")
        wait(window, "minus small: ", 0), wait(window, "minus text: ", 1)
        scored = window.evaluate("columns.map(column => column.tokens.flatMap(token => token.bytes))")
        assert [bytes(column).decode().removeprefix(" ") for column in scored] == [text, text]  # one adds a space
        assert window.locator("#columns script").count() == 0 and "<script>" in window.inner_text("#columns")
        first, second = (text.split() for text in window.locator("section .status").all_inner_texts())
        assert abs(float(second[4]) - float(first[4]) - float(second[-4])) < 2e-4
        assert float(first[-4]) == -float(second[-4])
        assert "tokens cannot be compared" in window.inner_text("#summary")
        del server.models["small"]
        window.click("#go")
        wait(window, "there is no model 'small'", 1), wait(window, "bits per byte", 0)
        assert window.inner_text("#summary") == ""
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
        window.press("#stop", "Enter")  # the button moves as the answer grows
        wait(window, "stopped")
        first = window.locator(".text").inner_text()
        settings(window, max_tokens=12)
        window.click("#again")
        wait(window, "12 tokens, ")
        assert window.locator(".text").inner_text() != first and "> hello" in window.locator(".text").inner_text()
        window.fill("#prompt", "more")
        window.click("#go")
        window.locator(".text .note").filter(has_text="> more").wait_for()
        wait(window, "12 tokens, ")
        assert window.evaluate("document.documentElement.scrollWidth") <= 390
        window.locator(".text .note", has_text="> more").evaluate("prompt => prompt.nextSibling.focus()")
        for key in ("ArrowRight", "Enter", "ArrowDown", "Enter"):  # the second alternative of the second token
            window.keyboard.press(key)
        wait(window, "14 tokens, ")
        window.press(".token", "Escape")
        assert window.locator("#alternatives").is_hidden()


def test_an_empty_page_on_a_phone_explains_itself_and_settings_refuse_nonsense(directories, open_page, tmp_path):
    best = shutil.copytree(directories[1], tmp_path / "run" / "best")
    (best / "state.json").write_text('{"best_validation_loss": 1.23456}')
    (best.parent / "settings.toml").write_text('[run]\nsample_prompts = ["", "Es war einmal"]')
    with served(best) as server:
        window = open_page(server, width=390, is_mobile=True, has_touch=True)
        text, said = window.inner_text("body"), ("RMSNorm (pre)", "best validation loss 1.2346", "Tap a token")
        assert all(part in text for part in said) and window.get_attribute("#prompt", "placeholder") == ""
        assert all(button.bounding_box()["height"] >= 44 for button in window.locator("button:visible").all())
        assert window.locator("#examples button").count() == 3
        window.tap("#examples button")
        wait(window, "tokens, ")
        assert "Es war einmal" in window.inner_text(".text") and window.locator("#examples button").count() == 0
        window.locator(".token").nth(2).tap()
        assert window.locator("#alternatives .chosen").count() == 1
        window.tap("h1")
        assert window.locator("#alternatives").is_hidden()
        for name, nonsense in {"top_p": "1.5", "seed": "1.5", "max_tokens": "0", "min_p": "-1"}.items():
            settings(window, **{name: nonsense})
            window.tap("#go")
            wait(window, f"{name}`")
            window.evaluate("$('settings').reset()")
        window.click("summary")
        window.fill("#temperature", "0.3")
        window.click("text=Reset")
        assert window.input_value("#temperature") == ""


def test_only_the_sampling_that_a_person_chose_is_sent_and_the_model_chooses_the_rest(directories, open_page, tmp_path):
    greedy = shutil.copytree(directories[1], tmp_path / "greedy")
    (greedy / "generation_config.json").write_text('{"do_sample": false}')
    with served(directories[1]) as server:
        assert open_page(server).get_attribute("#temperature", "placeholder") == "0.8"
    with served(greedy, directories[1]) as server:
        window = open_page(server)
        assert window.get_attribute("#temperature", "placeholder") == "model's own / 0.8"
        settings(window, min_p=0.1)
        with window.expect_request("**/completions") as request:
            window.click("#go")
        sent = request.value.post_data_json
        assert (sent["min_p"], sent["max_tokens"], sent["seed"]) == (0.1, 120, 1) and "temperature" not in sent
        window.reload()
        window.locator("#seed").wait_for(state="attached")
        assert window.input_value("#min_p") == ""


def inspect(window, text: str) -> list[dict]:
    """Look inside the models; the columns' replies."""
    window.select_option("#mode", "inspect")
    window.fill("#prompt", text)
    window.click("#go")
    for column in range(window.locator("section").count()):
        wait(window, "nats per token", column)
    return window.evaluate("columns.map(column => column.inside.inspection)")


def strengths(window, table: int) -> list[list[float]]:
    """How strong the colors of a table's cells are, from 0 to 1, its last row first."""
    strength = "Number(cell.style.getPropertyValue('--strength'))"
    script = f"table => [...table.rows].map(row => [...row.cells].map(cell => {strength}))"
    rows = window.locator(".cells").nth(table).evaluate(script)
    return [row[1:] for row in rows[-2::-1]]


def numbers(window, column: int) -> dict[str, str]:
    """What the page says of the chosen cell."""
    rows = "[...columns[i].inside.numbers.querySelector('table').rows]"
    return dict(window.evaluate(f"i => {rows}.map(row => [...row.cells].map(cell => cell.textContent))", column))


def test_two_models_are_inspected_with_one_scale_and_cells_chosen_by_click_and_keys(directories, open_page, tmp_path):
    layer = write_layer_norm_model(directories[1], tmp_path / "layer")
    with served(directories[1], layer) as server:
        window = open_page(server)
        replies = inspect(window, "def add(a, b):\n    return a\n\ndef add")
        for name in ("kurtosis", "largest_share", "mean_over_std", "rms"):
            window.select_option("#measure", name)
            values = sorted(value for reply in replies for row in reply[name] for value in row)
            low, high = max(values[len(values) // 20], values[-1] / 1e4), values[-1]
            for reply, table in zip(replies, (0, 2), strict=True):
                for row, shown in zip(reply[name], strengths(window, table), strict=True):
                    logarithms = [math.log(value / low) / math.log(high / low) for value in row]
                    assert shown == pytest.approx([min(1, max(0, value)) for value in logarithms], abs=0.001)
            assert float(window.locator("#scale span").last.inner_text()) == pytest.approx(high, rel=5e-3)
        assert "RMSNorm divides by it" in window.inner_text("#meaning")
        first = window.locator(".cells").nth(0).locator("td")
        assert first.all_inner_texts()[0] == "output"
        assert window.locator(".cells tr").nth(4).inner_text()[:7] == "layer 1"
        window.locator(".cells").nth(0).locator("tr").nth(2).locator("td").nth(3).click()  # the third of five norms
        for key in ("ArrowRight", "ArrowUp", "ArrowLeft", "ArrowLeft"):
            window.keyboard.press(key)
        for column, reply in enumerate(replies):  # both show the fourth norm and the second token
            told = numbers(window, column)
            assert float(told["size of the stream"]) == pytest.approx(reply["rms"][3][1], rel=5e-3)
            chance, bias = told["|mean| / deviation"].split("chance: ")[1], told["bias (90% of channels)"].split()[0]
            assert float(chance[:-1]) == pytest.approx(reply["chance"], rel=5e-3)
            assert float(bias) == pytest.approx(reply["bias"][3][2], rel=5e-3)
            assert told["loss of the next token"].endswith(f"{reply['losses'][1]:.3g} nats")
            text = window.evaluate("i => columns[i].inside.numbers.textContent", column)
            likeliest = reply["top_texts"][0][1][0].replace(" ", "␣")
            assert "def, layer 2 MLP" in text and f"after layer 1{likeliest}" in text
            assert window.locator("section").nth(column).locator(".token.chosen").inner_text() == "def"
        window.locator(".token").nth(2).focus()
        assert "␣add, layer 2 MLP" in window.evaluate("columns[1].inside.numbers.textContent")


def test_a_head_and_a_change_of_the_norms_color_the_text_and_a_long_text_is_refused(directories, open_page, tmp_path):
    with served(write_layer_norm_model(directories[1], tmp_path / "layer")) as server:
        window = open_page(server)
        [reply] = inspect(window, "def add(a, b):\n    return a\n\ndef add")
        tokens, second = window.locator(".token"), "tokens => tokens[1].dataset.kind"
        window.select_option("#attention", "after_same")
        window.locator(".cells").nth(1).locator("tr").nth(0).locator("td").nth(2).click()  # second head, last layer
        attention, texts = reply["after_same"][1][1], reply["tokens"]
        shown = tokens.evaluate_all("tokens => tokens.map(token => Number(token.style.getPropertyValue('--strength')))")
        assert shown == pytest.approx(attention, abs=0.001)
        assert tokens.evaluate_all(second) == "attended"
        repeated = [share for i, share in enumerate(attention) if texts.index(texts[i]) < i]
        mean = sum(repeated) / len(repeated)
        wait(window, "Head 2 of layer 2 attends"), wait(window, f"{100 * mean:.1f}% after earlier occurrences of it.")
        assert strengths(window, 1)[1][1] == pytest.approx(mean, abs=0.001)
        for select, value in (("#change", "bias"), ("#norm", "norm")):
            with window.expect_response("**/inspect") as response:
                window.select_option(select, value)
            differences = response.value.json()["differences"]
            wait(window, f"adds {float(f'{sum(differences) / len(differences):.3g}'):g} nats per token. Green: better")
            assert numbers(window, 0)["added by the change"] == f"{float(f'{differences[1]:.3g}'):g} nats"
            assert (tokens.evaluate_all(second) == "better") == (differences[0] < 0)
        window.fill("#prompt", "ab " * 3000)
        window.click("#go")
        wait(window, "give 1 to 1024")
        assert window.locator(".cells").count() == 0 and tokens.count() == 0
        window.select_option("#mode", "complete")
        assert window.locator("#meaning").is_hidden() and window.locator("#legend").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_grid_fits_a_phone(directories, open_page, scheme):
    with served(directories[1]) as server:
        window = open_page(server, width=390, color_scheme=scheme, is_mobile=True, has_touch=True)
        inspect(window, "def add(a, b):\n    return a + b\n" * 9)
        assert window.evaluate("document.documentElement.scrollWidth") <= 390
        cells = window.locator(".cells").nth(0)
        cells.locator("tr").nth(1).locator("td").nth(40).tap()
        assert cells.locator(".chosen").evaluate("cell => cell.cellIndex") == 40
        names = cells.locator("tr").nth(1).locator("td").nth(0).bounding_box()
        chosen = cells.locator(".chosen").bounding_box()
        assert names["x"] >= 0 and names["x"] + names["width"] <= chosen["x"] and chosen["x"] + chosen["width"] <= 390
        assert chosen["width"] >= 24 and chosen["height"] >= 24
        colors = cells.locator("td").evaluate_all("all => all.map(td => getComputedStyle(td).backgroundColor)")
        assert len({*colors}) > 10
        select = [box.bounding_box() for box in window.locator("#choices select").all()]
        assert all(box["height"] >= 44 and box["x"] + box["width"] <= 390 for box in select)
