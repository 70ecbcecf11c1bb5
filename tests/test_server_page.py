"""The page in a real browser: conversations, Markdown, tints, tree, comparison, stop; and it talks to nobody else."""

import json
import os
import shutil
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="no browser tests: pip install playwright")
pytest.importorskip("uvicorn", reason="the server is not installed: pip install 'edgespec[server]'")


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SHOTS = os.environ.get("EDGESPEC_SCREENSHOTS")  # a folder, to look at


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no browser tests: Chromium is not installed")
    with (
        playwright.sync_playwright() as pw,
        pw.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser,
    ):
        yield browser


@contextmanager
def shown(browser, port):
    with browser.new_context(viewport={"width": 1300, "height": 900}) as context:
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.asked, page.errors = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("console", lambda line: page.errors.append(line.text) if line.type == "error" else None)
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.origin = f"http://127.0.0.1:{port}"
        page.goto(f"{page.origin}/#key=abc")
        yield page


@pytest.fixture
def page(browser):
    from test_server_clients import listening

    with listening() as (model, port), shown(browser, port) as page:
        page.model = model
        page.click("summary")
        yield page


@pytest.fixture
def following(browser):
    """A function that shows the page of a model that follows a script."""
    from scripted import answering, scripted

    with ExitStack() as stack:

        def show(script, context=4000):
            model = stack.enter_context(scripted(script, context=context))
            page = stack.enter_context(shown(browser, stack.enter_context(answering(model))))
            page.model = model
            return page

        yield show


def ask(page, text, ends="done"):
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#notice:has-text('{ends}')")


def texts(page):
    return page.locator(".message .text").all_inner_texts()


def shoot(page, name):
    if SHOTS:
        page.screenshot(path=str(Path(SHOTS) / f"{name}.png"))


def test_a_model_that_is_not_loaded_yet_is_told_and_then_shown(browser):
    from scripted import running
    from test_server_models import Shelf

    from edgespec.server.app import make_app

    with running(make_app(Shelf().models())) as port, shown(browser, port) as page:
        page.wait_for_selector("#model:has-text('a · is loaded when it is asked')")
        ask(page, "hello")
        page.wait_for_selector("#model:has-text('a · reference')")


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
    answer = page.locator(".message").nth(1).locator(".text")
    assert answer.text_content() == expected.text
    legend = page.eval_on_selector_all("#legend li", "all => all.map(one => [one.dataset.source, one.lastChild.data])")
    assert {source: int(count) for source, count in legend} == expected.stats.tokens_by_source
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

    shoot(page, "wide")
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


def test_a_refused_message_goes_back_into_its_box(page):
    page.fill("#max_tokens", "3")
    ask(page, "<b>c</b>", ends="done: 3 tokens")
    assert page.locator("#log b").count() == 0
    before, refused = texts(page), "a" * 600
    ask(page, refused, ends="500 tokens")
    assert (page.input_value("#prompt"), texts(page)) == (refused, before)


def test_an_answer_that_is_cut_off_says_why(page):
    page.fill("#max_tokens", "3")
    ask(page, "a", ends="it was cut off there, as Settings say")
    page.fill("#max_tokens", "")
    ask(page, "b", ends="the context of 500 tokens is full")


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
    assert page.locator(".message").nth(1).locator(".text").text_content() == expected.text
    assert page.errors == []


def test_a_new_conversation_has_nothing_of_the_one_that_is_still_answered(page, monkeypatch):
    slow_down(page.model, monkeypatch)
    page.fill("#max_tokens", "100")
    page.fill("#prompt", "a secret")
    page.click("#send")
    page.wait_for_selector(".message .token")
    page.click("#new")
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


def test_the_page_waits_for_the_model(browser):
    from test_server_clients import listening

    from edgespec.cli.serve import open_socket, refusing

    with open_socket("127.0.0.1", 0, [], no_key=False) as sock, ExitStack() as stack:
        with refusing(sock, log=False):
            page = stack.enter_context(shown(browser, sock.getsockname()[1]))
            page.wait_for_selector("#model:has-text('the model is loading')")
        with listening(sock=sock):
            page.wait_for_selector("#model:has-text('tiny')")
            stack.close()


MARKDOWN = """\
# Title

Some **bold** `code` &amp; [a link](https://example.org/).

```python
if a < b:
    print("<b>")
```

- [x] one
- two

| a | b |
|---|--:|
| 1 | 2 |
"""
HARMFUL = """\
<script>alert(1)</script>

<img src="http://127.0.0.1:9/a.png" onerror="alert(2)"> <b onclick="alert(3)">b</b>

![remote](http://127.0.0.1:9/b.png) [script](javascript:alert(4)) [data](data:text/html,<script>alert(5)</script>)

<iframe src="javascript:alert(6)"></iframe><svg onload="alert(7)"></svg><style>body { display: none }</style>
"""


def test_markdown_is_shown_and_each_letter_keeps_its_tint(following):
    page = following(lambda prompt: MARKDOWN)
    ask(page, "a")
    answer = page.locator(".markdown")
    found = [one.evaluate("one => one.localName") for one in answer.locator("> *").all()]
    assert found == ["h3", "p", "div", "ul", "div"]
    assert answer.locator("p").inner_html().count("<strong>") == 1
    assert answer.locator("p").inner_text() == "Some bold code & a link."
    assert answer.locator("a").get_attribute("rel") == "noopener noreferrer"
    assert answer.locator("tr").all_inner_texts() == ["a\tb", "1\t2"]
    assert [box.is_checked() for box in answer.locator("li input").all()] == [True]
    code = 'if a < b:\n    print("<b>")'
    assert answer.locator("pre").text_content() == code
    page.evaluate(
        "navigator.clipboard.writeText = async (text) => { window.copied = text; }"
    )  # others use the system's
    answer.locator("button").click()
    answer.locator("button:has-text('Copied')").wait_for()
    assert page.evaluate("window.copied") == code
    tinted = "".join(answer.locator(".token").all_text_contents())
    assert tinted == f"TitleSome bold code & a link.{code}onetwoab12"
    shoot(page, "markdown")
    assert page.errors == []


def test_markup_and_addresses_of_a_model_do_nothing(following):
    page, opened = following(lambda prompt: HARMFUL), []
    page.on("dialog", lambda dialog: (opened.append(dialog.message), dialog.dismiss()))
    ask(page, "a")
    assert page.locator("#log :is(script, img, b, iframe, svg, style, [onerror], [onclick])").count() == 0
    links = page.locator("#log a").all()
    assert [link.get_attribute("href") for link in links] == ["http://127.0.0.1:9/b.png"]  # asked for by a click only
    assert "alert(4)" in texts(page)[1]
    assert (opened, page.errors) == ([], [])
    assert all(url.startswith(page.origin) or url.startswith("data:") for url in page.asked)


def test_an_answer_of_many_levels_is_shown_as_text_where_it_is_too_deep(following):
    page = following(lambda prompt: "> " * (3000 if "deeper" in prompt else 600) + "end", context=9000)
    for question in ("deep", "deeper"):
        ask(page, question)
        assert texts(page)[-1].endswith("> > end")
    assert page.errors == []


def test_the_policy_stops_what_a_mistake_would_let_in(following):
    page = following(lambda prompt: "a")
    page.evaluate("""() => {
        const image = document.createElement("img"), script = document.createElement("script");
        image.src = "http://127.0.0.1:9/a.png";
        script.textContent = "window.ran = true";
        document.body.append(image, script);
        fetch("http://127.0.0.1:9/").catch(() => {});
    }""")
    while len(page.errors) < 3:
        page.wait_for_event("console")
    assert page.evaluate("window.ran") is None
    assert [sum(kind in line for line in page.errors) for kind in ("img-src", "script-src", "connect-src")] == [1, 1, 1]


def answer_to(prompt):
    """Counts the turns that it was shown."""
    return f"answer {prompt.count('answer')}"


def kept(page):
    return page.locator("#conversations option").all_inner_texts()


def test_conversations_are_kept(following):
    page = following(answer_to)
    page.click("summary")
    page.fill("#system", "Be brief.")
    ask(page, "first")
    ask(page, "second")
    page.reload()
    assert texts(page) == ["first", "answer 0", "second", "answer 1"]
    assert page.input_value("#system") == "Be brief."
    page.click("#new")
    assert texts(page) == []
    ask(page, "other")
    assert texts(page) == ["other", "answer 0"]
    assert kept(page) == ["other", "first"]
    page.select_option("#conversations", label="first")
    ask(page, "third")
    assert texts(page)[4:] == ["third", "answer 2"]
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#delete")
    page.reload()
    assert kept(page) == ["New conversation", "other"]
    assert page.errors == []


def test_two_tabs_show_what_the_other_has_written(following):
    page = following(answer_to)
    ask(page, "first")
    other = page.context.new_page()
    other.goto(page.origin)
    other.select_option("#conversations", label="first")
    ask(other, "second")
    page.wait_for_selector(".message:nth-child(4) .text:has-text('answer 1')")
    ask(page, "third")
    assert texts(page) == ["first", "answer 0", "second", "answer 1", "third", "answer 2"]


def test_an_answer_is_written_again_and_a_message_edited(following):
    page = following(answer_to)
    ask(page, "first")
    ask(page, "second")
    page.fill("#prompt", "not sent yet")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.locator("button:has-text('Write again')").nth(1).click()
    page.wait_for_selector("#send:not([disabled])")
    sent = json.loads(asked.value.post_data)["messages"]
    assert [message["content"] for message in sent] == ["first", "answer 0", "second"]
    assert texts(page) == ["first", "answer 0", "second", "answer 1"]
    assert page.input_value("#prompt") == "not sent yet"

    page.locator("button:has-text('Edit')").first.click()
    assert page.input_value("#prompt") == "first"
    page.keyboard.press("Escape")
    assert page.input_value("#prompt") == "not sent yet"
    page.locator("button:has-text('Edit')").nth(1).click()
    ask(page, "changed")
    assert texts(page) == ["first", "answer 0", "changed", "answer 1"]
    assert page.input_value("#prompt") == "not sent yet"


def test_what_was_written_before_a_reload_is_kept_and_a_message_without_an_answer_is_not_lost(page, monkeypatch):
    slow_down(page.model, monkeypatch)
    page.fill("#prompt", "a")
    page.click("#send")
    page.wait_for_selector(".token")
    page.reload()
    (mine, answer) = texts(page)
    assert (mine, len(answer) > 0) == ("a", True)
    page.route("**/v1/chat/completions", lambda route: None)
    page.fill("#prompt", "b")
    page.click("#send")
    page.wait_for_selector(".message:nth-child(4)")
    page.reload()
    assert texts(page) == [mine, answer]
    assert page.input_value("#prompt") == "b"
    page.locator("button:has-text('Write again')").click()  # refused, or ended at once: the answer stays
    page.click("#stop")
    page.wait_for_selector("#send:not([disabled])")
    assert texts(page) == [mine, answer]


def test_a_thought_is_folded(following):
    page = following(lambda prompt: "<think>\nI *see*.\n</think>\n\nYes.")
    ask(page, "a")
    assert page.locator("summary:has-text('Thought')").count() == 1
    assert not page.locator(".thought .markdown").is_visible()
    assert page.locator(".text > .markdown").inner_text() == "Yes."
    page.locator("summary:has-text('Thought')").press("Enter")
    assert page.locator(".thought .markdown").inner_text() == "I see."
    assert "".join(page.locator(".token").all_text_contents()) == "I see.Yes."


def test_drawing_is_linear(following):
    """An answer of twice the length makes twice as many elements, and a pass does not look at all before it."""
    page = following(lambda prompt: "abc" * 100)
    made = page.evaluate(r"""async () => {
        const { Answer } = await import("/static/answer.js"), create = document.createElement;
        let made = 0;
        document.createElement = (...given) => (made += 1, create.apply(document, given));
        return [20, 40].map((paragraphs) => {
            const answer = new Answer(create.call(document, "div"));
            made = 0;
            for (const text of "Some words of a paragraph.\n\n".repeat(paragraphs).match(/\S+\s*/g)) {
                answer.add({ content: text }, [{ text, source: "draft" }]);
                answer.draw(true);
            }
            return made;
        });
    }""")
    assert made[1] < 2.1 * made[0]

    reads = page.evaluate("""async () => {
        const { add, clear, draw } = await import("/static/passes.js");
        const seconds = { prefill: 1, draft: 1, wait: 1, target: 1, plan: 1 };
        const pass = { token_ids: [1], texts: ["a"], parents: [-1], log_probs: [0], sources: [0], path: [0] };
        let reads = 0;
        const counted = { pass, seconds, get tokens() { reads += 1; return [{ text: "a", source: "draft" }]; } };
        return [20, 40].map((passes) => {
            clear();
            reads = 0;
            for (let i = 0; i < passes; i += 1) {
                add(counted);
                draw();
            }
            return reads;
        });
    }""")
    assert reads[1] < 2.1 * reads[0]


def test_an_answer_is_followed_until_the_reader_scrolls_up(following, monkeypatch):
    page = following(lambda prompt: "line\n\n" * 150)
    slow_down(page.model, monkeypatch)
    page.fill("#prompt", "a")
    page.keyboard.press("Enter")
    page.wait_for_selector(".markdown p:nth-child(60)")
    assert (
        page.evaluate("(log => log.scrollHeight - log.scrollTop - log.clientHeight)(document.querySelector('#log'))")
        < 40
    )
    page.evaluate("document.querySelector('#log').scrollTop = 100")
    page.wait_for_selector("#notice:has-text('done')")
    assert page.evaluate("document.querySelector('#log').scrollTop") == 100


def test_dark_follows_the_system_until_the_reader_chooses(following):
    page = following(lambda prompt: "a")

    def back():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    def seen(scheme):
        page.emulate_media(color_scheme=scheme)
        return back()

    light, dark = seen("light"), seen("dark")
    assert light != dark
    page.reload()
    assert seen("light") == light
    page.click("#theme")
    page.reload()
    assert (back(), seen("dark"), seen("light")) == (dark, dark, dark)
    page.click("#theme")  # the system's again
    assert (back(), seen("dark")) == (light, dark)


def test_a_phone_shows_wide_code_within_its_width(following):
    page = following(lambda prompt: f"```\n{'wide ' * 40}\n```\n\n|{'column|' * 20}\n|{'-|' * 20}\n")
    page.set_viewport_size({"width": 390, "height": 800})
    ask(page, "a")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("(log => log.scrollWidth - log.clientWidth)(document.querySelector('#log'))") == 0
    box = page.locator("#prompt").bounding_box()
    assert box["y"] + box["height"] < 800
    shoot(page, "phone")
