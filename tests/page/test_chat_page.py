"""The chat in a browser: conversations, the engine's numbers beside them, and hostile markdown."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from audit import engine_of
from browser import Shown, opened
from live_server import live

from mie import AsyncLLM
from mie.checkpoint.locate import BUNDLED_DIRECTORY
from mie.load.directory import ModelsDirectory
from mie.serve.config import ServeConfig
from mie.serve.keys import Keys
from mie.serve.page import feed
from mie.serve.router import ModelsEdge

HOSTILE = (
    "<script>window.bad = 1</script>",
    "<img src=x onerror='window.bad = 1'>",
    "a <b onclick='window.bad = 1'>b</b> <iframe src='javascript:window.bad=1'></iframe>",
    "[a](javascript:window.bad=1) [b](JAVASCRIPT:window.bad=1) [c](java&#x73;cript:window.bad=1)",
    "<javascript:window.bad=1> [d](data:text/html,<script>window.bad=1</script>)",
    "![x](javascript:window.bad=1) ![y](http://example.org/track.png)",
    "[a]: javascript:window.bad=1\n\n[text][a]",
    "```<script>\n</code></pre><script>window.bad = 1</script>\n```",
    "|<script>window.bad=1</script>|b|\n|-|-|\n|<svg onload=window.bad=1>|2|",
    "# <style>*{display:none}</style>\n\n- <input autofocus onfocus=window.bad=1>",
    '[t](https://example.org "\\" onmouseover=window.bad=1")',
    "<details open ontoggle=window.bad=1>\n\n<math><mtext></form><form><mglyph><style>",
    "&lt;script&gt;window.bad=1&lt;/script&gt; &#60;img src=x onerror=window.bad=1&#62;",
    ">" * 5000 + " deep",
    "[" * 3000 + "](" * 3000,
    "a" + "*" * 20000,
)

pytestmark = pytest.mark.slow  # one browser opens in `make test`: test_page_in_browser.py


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("bundled", num_blocks=64, block_size=8, generation_config="vllm")
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def url(browser: Any, engine: AsyncLLM) -> Iterator[str]:
    with live(engine) as url:
        yield url


def say(shown: Shown, text: str) -> None:
    """Send a message, and wait for its answer."""
    size = shown.js("mie.page.talk.messages.length")
    shown.page.get_by_label("Message", exact=True).fill(text)
    shown.page.keyboard.press("Enter")
    shown.until(f"mie.page.talk.messages.length === {size + 2}")
    answered(shown)


def answered(shown: Shown) -> None:
    shown.until("!mie.page.stop && mie.page.talk.branch().at(-1).usage")


def last(shown: Shown) -> dict[str, Any]:
    message: dict[str, Any] = shown.js("mie.page.talk.branch().at(-1)")
    return message


def cached(message: dict[str, Any]) -> int:
    return int(message["usage"]["prompt_tokens_details"]["cached_tokens"])


def settings(shown: Shown, **values: str) -> None:
    shown.js(
        """values => {
            for (const [name, value] of Object.entries(values)) {
                const field = document.getElementById("settings").elements[name];
                field.value = value;
                field.dispatchEvent(new Event("input", {bubbles: true}));
            }
        }""",
        values,
    )


def test_a_second_turn_hits_and_a_new_answer_is_another_branch(browser: Any, url: str) -> None:
    with opened(browser, f"{url}/chat") as shown:
        shown.until("window.mie?.page.model")
        settings(shown, system="You tell stories about a river.", max_tokens="12", temperature="1")
        say(shown, "Tell me about an otter.")
        first = last(shown)
        assert cached(first) == 0
        say(shown, "And then?")
        assert cached(last(shown)) >= first["usage"]["prompt_tokens"]
        facts = shown.js("[...document.querySelectorAll('.facts-of')].at(-1).textContent")
        assert f"{cached(last(shown))} of {last(shown)['usage']['prompt_tokens']}" in facts
        assert "first after" in facts
        shown.page.get_by_role("button", name="regenerate").last.click()
        shown.until("mie.page.stop || mie.page.talk.messages.length === 5")
        answered(shown)
        again = last(shown)
        assert cached(again) == again["usage"]["prompt_tokens"] - 1
        branches = "[...document.querySelectorAll('.branches')].at(-1).textContent"
        assert shown.js(branches) == "‹2 / 2›"
        shown.page.get_by_title("The branch before").click()
        assert shown.js(branches) == "‹1 / 2›"
        link = shown.js("[...document.querySelectorAll('.facts-of a')].at(-1).href")
        with opened(browser, link) as view:
            view.until("window.mie?.store.run && mie.store.selected")
            name = view.js("mie.store.selected.id")
            lane = f"mie.store.run.lanes.all.get({json.dumps(name)}).requestId"
            assert view.js(lane) == last(shown)["request"]
            assert not view.js("mie.store.follows")
        shown.page.reload()
        shown.until("window.mie?.page.model")
        assert shown.js("mie.page.talk.messages.length") == 5, "the browser has kept them"
        assert shown.errors == []


@pytest.mark.slow
def test_a_link_waits_for_a_request_that_the_page_does_not_know_yet(
    browser: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(browser, f"{url}/") as view, opened(browser, f"{url}/chat") as shown:
        view.until("window.mie?.store.run")
        shown.until("window.mie?.page.model")
        monkeypatch.setattr(feed, "TICK_SECONDS", 1.5)
        settings(shown, max_tokens="4")
        say(shown, "Hello")
        request = last(shown)["request"]
        view.js("request => { location.hash = `#live//request:${request}`; }", request)
        view.until("mie.store.selected && !mie.store.follows")
        lane = "mie.store.run.lanes.all.get(mie.store.selected.id).requestId"
        assert view.js(lane) == request
        view.js("location.hash = '#live//request:none'")
        view.until("document.getElementById('notice').textContent.includes('No log has')")


def test_keys_edit_and_stop(browser: Any, url: str, engine: AsyncLLM) -> None:
    def slow_down(_: object) -> None:
        time.sleep(0.02)  # so that the answer cannot end before the key stops it

    with opened(browser, f"{url}/chat", viewport={"width": 360, "height": 700}) as shown:
        shown.until("window.mie?.page.model")
        settings(shown, max_tokens="6")
        say(shown, "one")
        shown.page.get_by_label("Message", exact=True).press("ArrowUp")
        assert shown.js("document.getElementById('message').value") == "one"
        say(shown, "two")
        assert shown.js("mie.page.talk.branch().map(({content}) => content)[0]") == "two"
        assert shown.js("mie.page.talk.messages.length") == 4
        settings(shown, max_tokens="300")
        engine_of(engine).observers.append(slow_down)
        shown.page.get_by_label("Message", exact=True).fill("Tell me a story.")
        shown.page.keyboard.press("Enter")
        shown.until("mie.page.stop && mie.page.talk.branch().at(-1).content")
        shown.page.keyboard.press("Escape")
        shown.until("!mie.page.stop")
        engine_of(engine).observers.remove(slow_down)
        assert last(shown)["reason"] == "stopped"
        assert last(shown)["content"]
        assert shown.js("document.documentElement.scrollWidth") <= 360
        settings(shown, schema='{"type":')
        shown.page.get_by_label("Message", exact=True).fill("three")
        shown.page.keyboard.press("Enter")
        assert "The JSON schema is not JSON" in shown.text("status")


def test_answers_follow_a_schema_and_files_are_added(browser: Any, url: str) -> None:
    with opened(browser, f"{url}/chat") as shown:
        shown.until("window.mie?.page.model")
        schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
        schema["additionalProperties"] = False
        settings(shown, schema=json.dumps(schema), max_tokens="40")
        shown.page.locator("#files").set_input_files(
            {"name": "notes.md", "mimeType": "text/plain", "buffer": b"A ``` fence"}
        )
        shown.until("document.getElementById('files-note').textContent === '1 added'")
        say(shown, "Which number?")
        assert json.loads(last(shown)["content"]) == {"n": 7}
        sent = shown.js("mie.page.talk.branch()[0].content")
        assert sent == "notes.md:\n\n````\nA ``` fence\n````\n\nWhich number?"


def test_hostile_markdown_stays_text(browser: Any, url: str) -> None:
    with opened(browser, f"{url}/chat") as shown:
        shown.until("window.mie?.page.model")
        for text in HOSTILE:
            found = shown.js(
                """text => {
                    const place = document.getElementById("messages");
                    place.replaceChildren(...mie.markdown(text));
                    const bad = [...place.querySelectorAll("*")].filter(node =>
                        /^(script|style|iframe|img|svg|math|object|embed|form|details)$/i
                            .test(node.localName)
                        || [...node.attributes].some(({name}) => name.startsWith("on"))
                        || (node.href && !/^(https?|mailto):/.test(node.href)));
                    return [bad.map(node => node.outerHTML), place.textContent.length > 0];
                }""",
                text,
            )
            assert found == [[], True], text[:60]
        shown.drawn()
        assert shown.js("window.bad") is None
        assert shown.errors == []


def test_markdown_has_its_elements(browser: Any, url: str) -> None:
    text = (
        "# Title\n\nA **bold** *word*, `x<1` &amp; [link](https://example.org).\n\n"
        "- one\n- [x] two\n\n"
        "```py\nprint(1)\n```\n\n|a|b|\n|-|-:|\n|1|2|\n\n> said\n"
    )
    with opened(browser, f"{url}/chat") as shown:
        shown.until("window.mie?.page.model")
        names = shown.js(
            """text => {
                const place = document.createElement("div");
                place.append(...mie.markdown(text));
                const names = [...place.querySelectorAll("*")].map(node => node.localName);
                return [names, place.querySelector("p").textContent];
            }""",
            text,
        )
        wanted = {"h3", "strong", "em", "code", "a", "ul", "li", "input", "pre", "table", "td"}
        assert wanted <= set(names[0])
        assert "blockquote" in names[0]
        assert names[1] == "A bold word, x<1 & link."


@pytest.mark.slow
def test_a_key_of_any_client_opens_the_chat(browser: Any, engine: AsyncLLM) -> None:
    config = ServeConfig(keys=Keys.of(["sk-one", "sk-two"], None))
    with live(engine, config) as url, opened(browser, f"{url}/chat") as shown:
        shown.until("!document.getElementById('login').hidden")
        shown.page.locator("#key").fill("sk-two")
        shown.page.keyboard.press("Enter")
        shown.until("window.mie.page.model && document.getElementById('login').hidden")
        settings(shown, max_tokens="4")
        say(shown, "Hello")
        assert last(shown)["usage"]["completion_tokens"] > 0
        assert shown.js("JSON.stringify(localStorage).includes('sk-two')") is False


@pytest.mark.slow
def test_the_chat_offers_the_models_of_a_folder(browser: Any, tmp_path: Path):
    for name in ("first", "second"):
        (tmp_path / name).symlink_to(BUNDLED_DIRECTORY)
    directory = ModelsDirectory(tmp_path, {"num_blocks": 64, "block_size": 8})
    config = ServeConfig(models_dir=str(tmp_path))
    edge = ModelsEdge(directory, lambda planned: AsyncLLM(**planned.settings), config)
    try:
        with live(edge) as url:
            with opened(browser, f"{url}/chat") as shown:
                shown.until("document.querySelectorAll('#model option').length === 2")
                shown.page.get_by_label("Model").select_option("second")
                say(shown, "Tell me a story.")
                link = shown.js("document.querySelector('.facts-of a').getAttribute('href')")
                assert link.startswith("./?model=second#live//request:")
            assert [model.name for model in edge.models.catalogue.loaded] == ["second"]
            with opened(browser, f"{url}/?model=second") as shown:
                shown.until("mie.store.run?.title === 'second'")
    finally:
        edge.shutdown()
