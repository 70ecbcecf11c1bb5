"""The page in a real browser: tints, tree, comparison, stop, themes; and it talks to nobody else."""

import json
import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="no browser tests: pip install playwright")
pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'edgespec[server]'")


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHOTS = os.environ.get("EDGESPEC_SCREENSHOTS")  # a folder, to look at


@contextmanager
def chromium():
    if CHROMIUM is None:
        pytest.skip("no browser tests: Chromium is not installed")
    with (
        playwright.sync_playwright() as pw,
        pw.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser,
    ):
        yield browser


@pytest.fixture
def page():
    from test_server_clients import listening

    with listening() as (model, port), chromium() as browser:
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.set_default_timeout(10_000)
        page.model, page.asked, page.errors = model, [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("console", lambda line: page.errors.append(line.text) if line.type == "error" else None)
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.origin = f"http://127.0.0.1:{port}"
        page.goto(f"{page.origin}/#key=abc")
        page.click("summary")
        yield page


def shoot(page, name):
    if SHOTS:
        page.screenshot(path=str(Path(SHOTS) / f"{name}.png"))


def test_the_page(page):
    page.wait_for_selector("#model:has-text('tiny')")
    assert page.url == f"{page.origin}/"  # the key is gone from the address
    page.fill("#seed", "3")
    page.fill("#max_tokens", "60")
    page.fill("#temperature", "1")
    page.fill("#prompt", "hello hello hello hello")
    page.keyboard.press("Enter")
    page.wait_for_selector("#notice:has-text('done: 60 tokens')")
    expected = page.model.chat("hello hello hello hello", max_tokens=60, temperature=1.0, seed=3)
    answer = page.locator(".message").nth(1).locator("div")
    assert answer.text_content() == expected.text
    tints = {
        source: page.locator(f".message .token.source-{source}").count() for source in ("target", "draft", "input")
    }
    counts = expected.stats.tokens_by_source
    assert tints == {source: counts[source] for source in tints}
    assert page.locator("#strip i").count() == 1 + expected.stats.passes  # the prompt gives the first token

    # Each has its tree; the keyboard goes through them.
    page.focus("#strip")
    page.keyboard.press("Home")
    sizes = []
    for _ in range(1 + expected.stats.passes):
        sizes.append(page.locator("#tree rect").count())
        assert page.locator("#tree g.kept").count() >= 1
        page.keyboard.press("ArrowRight")
    assert sum(sizes) == expected.stats.drafted + expected.stats.passes + 1
    page.keyboard.press("Home")
    for _ in range(sizes.index(max(sizes))):
        page.keyboard.press("ArrowRight")

    page.click("#compare")
    page.wait_for_selector("#notice:has-text('the same 60 tokens')")
    assert page.locator(".token.different").count() == 0

    for name in ("light", "dark"):
        while page.evaluate("document.documentElement.dataset.theme") != name:
            page.click("#theme")
        shoot(page, name)
    page.set_viewport_size({"width": 420, "height": 900})
    shoot(page, "narrow")
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    assert all(url.startswith(page.origin) or url.startswith("data:") for url in page.asked)
    assert page.errors == []


def slow_down(model, monkeypatch):
    """An answer lasts long enough for something to happen meanwhile."""
    forward = model.target.forward
    monkeypatch.setattr(model.target, "forward", lambda batch: (time.sleep(0.02), forward(batch))[1])


def test_stop_frees_the_model(page, monkeypatch):
    slow_down(page.model, monkeypatch)
    page.fill("#max_tokens", "400")
    page.fill("#prompt", "a")
    page.click("#send")
    page.wait_for_selector("#stop:not([disabled])")
    page.click("#stop")
    page.wait_for_selector("#notice:has-text('stopped')")
    page.wait_for_function("!document.querySelector('#send').disabled")
    page.fill("#max_tokens", "5")
    page.fill("#prompt", "b")
    page.click("#send")
    page.wait_for_selector("#notice:has-text('done: 5 tokens')")
    assert page.model.scheduler.active == 0
    assert page.model.scheduler.counts.requests["interrupted"] == 1


def test_an_error_is_shown_and_markup_stays_text(page):
    page.fill("#prompt", "<img src=x onerror=alert(1)>" + "a" * 600)
    page.click("#send")
    page.wait_for_selector("#notice:has-text('holds 500')")
    assert page.locator("#log img").count() == 0
    page.fill("#prompt", "<b>c</b>")
    page.fill("#max_tokens", "3")
    page.click("#send")
    page.wait_for_selector("#notice:has-text('done: 3 tokens')")
    assert page.locator("#log b").count() == 0


def test_a_prompt_is_read_while_it_is_typed(page):
    """At a pause the answer is begun; Enter takes it over, and what is typed on is another prompt."""
    page.fill("#max_tokens", "40")
    page.fill("#temperature", "1")
    page.fill("#seed", "3")
    counts, told = page.model.scheduler.counts, []
    page.on("response", lambda answer: told.append(answer) if "draft-prompt" in answer.url else None)
    page.type("#prompt", "hello you", delay=20)
    with page.expect_response(lambda answer: '"pause":true' in (answer.request.post_data or "")):
        pass
    while sum(counts.tokens.values()) < 16:
        time.sleep(0.01)
    assert page.locator(".message").count() == 0
    page.keyboard.press("Enter")
    page.wait_for_selector("#notice:has-text('done: 40 tokens')")
    assert sum(counts.tokens.values()) == 40  # nothing was written twice
    assert [answer.status for answer in told] == [200] * len(told)
    expected = page.model.chat("hello you", max_tokens=40, temperature=1.0, seed=3)
    assert page.locator(".message").nth(1).locator("div").text_content() == expected.text
    assert page.errors == []


def test_a_new_conversation_has_nothing_of_the_one_that_is_still_answered(page, monkeypatch):
    slow_down(page.model, monkeypatch)
    page.fill("#max_tokens", "100")
    page.fill("#prompt", "a secret")
    page.click("#send")
    page.wait_for_selector(".message .token")
    page.click("#forget")
    page.wait_for_selector("#send:not([disabled])")
    assert messages_after(page, "b") == [{"role": "user", "content": "b"}]
    page.wait_for_selector("#notice:has-text('done: 3 tokens')")
    assert page.model.scheduler.counts.requests["interrupted"] == 1


def test_a_thought_is_sent_back_as_a_thought(page):
    """Templates drop or place earlier thoughts, and some refuse their markers in the content."""

    def with_a_thought(route):
        deltas = [{"content": "", "reasoning_content": "I "}, {"content": "", "reasoning_content": "see."}]
        deltas += [{"content": "Yes"}, {"content": "!"}]
        texts = ["<think>I ", "see.</think>", "Yes"]
        step = {"token_ids": [1], "texts": ["a"], "parents": [-1], "log_probs": [0], "sources": [0], "path": [0]}
        seconds = dict.fromkeys(("prefill", "draft", "wait", "target", "plan"), 0)
        chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
        for chunk, text in zip(chunks, texts, strict=False):  # the last text has no pass
            chunk["edgespec"] = {"tokens": [{"text": text, "source": "target"}], "pass": step, "seconds": seconds}
        chunks.append({"choices": [], "usage": {}, "edgespec": {"seed": 1, "stats": [{"tokens": 4}]}})
        route.fulfill(body="".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks))

    page.route("**/v1/chat/completions", with_a_thought, times=1)
    page.fill("#prompt", "a")
    page.click("#send")
    page.wait_for_selector("#notice:has-text('done: 4 tokens')")
    assert messages_after(page, "b") == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Yes!", "reasoning_content": "I see."},
        {"role": "user", "content": "b"},
    ]


def messages_after(page, text):
    """The messages that the page sends after `text` is typed."""
    page.fill("#max_tokens", "3")
    page.fill("#prompt", text)
    with page.expect_request("**/v1/chat/completions") as asked:
        page.click("#send")
    return json.loads(asked.value.post_data)["messages"]


def test_the_page_waits_for_the_model():
    from test_server_clients import listening

    from edgespec.cli.serve import open_socket, refusing

    with open_socket("127.0.0.1", 0, [], no_key=False) as sock, chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(10_000)
        with refusing(sock, log=False):
            page.goto(f"http://127.0.0.1:{sock.getsockname()[1]}/")
            page.wait_for_selector("#model:has-text('the model is loading')")
        with listening(sock=sock):
            page.wait_for_selector("#model:has-text('tiny')")
        page.close()
