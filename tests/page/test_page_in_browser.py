"""The page shows the engine's true state: its buttons, its steps and its files.

One browser and one server are open for all tests. Most of them share one page.
"""

import json
import random
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from audit import engine_of
from browser import PATIENCE, Shown, cells, opened, serious
from command_line import mie
from live_server import live

from mie import AsyncLLM
from mie.events import read_log
from mie.events.replay import at
from mie.page.cells import NodeText, key_record
from mie.serve.config import ServeConfig
from mie.serve.keys import Keys
from mie.serve.page import feed

NUM_BLOCKS, BLOCK_SIZE = 24, 8
NUM_TABS = 8


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        "bundled",
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=6,
        max_num_batched_tokens=32,
        generation_config="vllm",
    )
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def url(browser: Any, engine: AsyncLLM) -> Iterator[str]:
    with live(engine) as url:
        yield url


@pytest.fixture(scope="module")
def shown(browser: Any, url: str) -> Iterator[Shown]:
    with opened(browser, f"{url}/") as shown:
        shown.until("window.mie?.store.run")
        yield shown


@pytest.fixture(autouse=True)
def _no_errors(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test may leave an error in the console: a policy that was violated is one, too."""
    yield
    if "shown" in request.fixturenames:
        assert request.getfixturevalue("shown").errors == []


def metric(url: str, name: str) -> float:
    text = httpx2.get(f"{url}/metrics", timeout=PATIENCE).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.M))


def test_a_request_sent_twice_hits_what_the_answer_says(shown: Shown) -> None:
    sentence = shown.do("twice")
    shown.settle()
    [*hits] = shown.events("hit")
    second = hits[-1]["num_full"] + hits[-1]["num_partial"]
    usage = shown.js("mie.answers()[0].usage")
    assert usage["prompt_tokens_details"]["cached_tokens"] == second > 0
    assert f"found {second} of its {usage['prompt_tokens']}" in sentence


@pytest.mark.slow
def test_a_fork_shares_the_prompt_and_each_writer_copies_once(shown: Shown) -> None:
    sentence = shown.do("fork")
    shown.settle()
    forks = shown.events("fork")[-3:]
    step = forks[0]["step"]
    assert [each["step"] for each in forks] == [step] * 3
    names = [forks[0]["parent"], *(each["seq"] for each in forks)]
    tables = shown.at(step)["tables"]
    assert len({json.dumps(tables[name]) for name in names}) == 1
    shared = tables[names[0]][1]
    refs = {block: refs for block, _, refs, _ in shown.at(step)["blocks"]}
    assert all(refs[block] >= 4 for block in shared)
    copies = [each for each in shown.events("copy") if each["seq"] in names]
    copies = [each for each in copies if each["cause"] == "fork"]
    assert {each["source"] for each in copies} == {shared[-1]}
    assert len(copies) == len({each["seq"] for each in copies}) == 3
    assert f"{len(shared)} blocks" in sentence
    assert "3 copies" in sentence


def test_a_small_pool_preempts_as_often_as_the_counters_say(shown: Shown, url: str) -> None:
    before = len(shown.events("preempt"))
    sentence = shown.do("twelve")
    shown.settle()
    preempted = shown.events("preempt")
    num = len(preempted) - before
    assert num > 0
    assert sentence == f"The engine preempted {num} times, and all 12 answers are complete."
    assert shown.state()["counters"]["num_preemptions"] == len(preempted)
    assert metric(url, "vllm:num_preemptions_total") == len(preempted)
    lane = f"mie.store.run.lanes.all.get('{preempted[-1]['seq']}')"
    assert preempted[-1]["rule"] in shown.js(f"mie.describe({lane}.marks)")


@pytest.mark.slow
def test_a_long_prompt_is_computed_in_chunks_beside_answers(shown: Shown) -> None:
    sentence = shown.do("long")
    shown.settle()
    last = shown.events("add")[-1]
    name = f"{last['number']}.0"
    chunks = [each for each in shown.events("prefill") if each["seq"] == name]
    end = next(i for i, each in enumerate(chunks) if each["choices"]) + 1
    chunks = chunks[:end]  # there are more if it was preempted afterwards
    assert len(chunks) > 1
    assert all(each["count"] <= 32 for each in chunks)
    assert f"A prompt of {last['num_prompt']} tokens" in sentence
    hits = [each for each in shown.events("hit") if each["seq"] == name]
    computed = {at for each in chunks for at in range(each["start"], each["start"] + each["count"])}
    cached = min((each["num_full"] + each["num_partial"] for each in hits), default=0)
    assert computed | {*range(cached)} == {*range(last["num_prompt"])}
    busy = {each["step"] for each in shown.events("decode")}
    assert busy & {each["step"] for each in chunks}


@pytest.mark.parametrize("tick", [0.1, pytest.param(1.5, marks=pytest.mark.slow)])
def test_a_disconnect_frees_the_cells(
    shown: Shown, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch, tick: float
) -> None:
    """Also when the answers are far ahead of the records that the page gets."""
    monkeypatch.setattr(feed, "TICK_SECONDS", tick)
    monkeypatch.setattr(feed, "TRUTH_TICKS", 1)
    core = engine_of(engine)
    has_work = type(core).has_work.fget

    def rests(core: Any) -> bool:
        """Return whether the answers have 60 tokens. Then the engine rests, and none ends early."""
        running = core.scheduler.running
        return bool(running) and all(seq.num_generated >= 60 for seq in running)

    monkeypatch.setattr(
        type(core), "has_work", property(lambda core: has_work(core) and not rests(core))
    )
    sentence = shown.do("leave")
    shown.settle()
    assert re.fullmatch(r"3 answers left\. Blocks in use: [1-9]\d* before, 0 now\.", sentence)
    assert {kind for _, kind, _, _ in shown.state()["blocks"]} <= {2}
    ends = shown.js(
        "[...mie.store.run.lanes.all.values()].slice(-3).map(each => each.marks.at(-1))"
    )
    assert [each["event"]["reason"] for each in ends] == ["abort"] * 3


def test_every_step_is_the_state_of_the_servers_replay(shown: Shown, url: str) -> None:
    first, last = shown.js("[mie.store.run.first, mie.store.run.last]")
    steps = random.Random(5).sample(range(first + 1, last + 1), 20)
    for step in steps:
        key = httpx2.get(f"{url}/mie/state", params={"step": step}, timeout=PATIENCE).json()
        assert cells(shown.at(step)) == cells(key), f"at step {step}"
    # The state that is drawn is the same one.
    shown.js("step => mie.seek(step)", steps[0])
    shown.until(f"mie.store.run.isExact({steps[0]})")
    assert cells(shown.state()) == cells(shown.at(steps[0]))
    shown.js("document.getElementById('live').click()")


@pytest.mark.slow
def test_a_page_that_nobody_sees_leaves_its_connection_to_others(shown: Shown, url: str) -> None:
    hide = """is => {
        Object.defineProperty(document, "hidden", {value: is, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    shown.js(hide, True)
    shown.until("!mie.isConnected()")
    body = {"prompt": "Nobody sees this", "max_tokens": 20}
    httpx2.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).raise_for_status()
    shown.js(hide, False)
    shown.settle()
    assert shown.events("add")[-1]["num_prompt"] > 0
    assert shown.js("mie.store.run.lanes.all.values().every(lane => lane.end !== null)")


@pytest.mark.slow  # tests/web/hub.test.js shares it among tabs that are objects
def test_tabs_share_one_stream_which_outlives_the_first(
    browser: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser opens six connections to a server. A tab that joins needs a second stream."""
    monkeypatch.setattr(feed, "MAX_PAGES", 3)  # the other tests have one
    context = browser.new_context(reduced_motion="reduce")
    body = {"prompt": "All see this", "max_tokens": 20, "ignore_eos": True}
    with ExitStack() as first, ExitStack() as rest:
        shows = [first.enter_context(opened(context, f"{url}/"))]
        shows += [rest.enter_context(opened(context, f"{url}/")) for _ in range(NUM_TABS - 1)]
        for shown in shows:
            shown.until("window.mie?.store.run")
        for num_closed in range(2):
            httpx2.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).raise_for_status()
            for shown in shows[num_closed:]:
                shown.settle()
                assert cells(shown.state()) == cells(
                    httpx2.get(f"{url}/mie/state", timeout=PATIENCE).json()
                )
                assert shown.errors == []
            first.close()
    context.close()


@pytest.mark.slow
def test_a_departure_shows_both_branches_with_their_texts(shown: Shown, url: str) -> None:
    story = "In a mill by a lake there lived an {} who had a bell and a kite."
    for word in ("otter", "owl"):
        answer = httpx2.post(
            f"{url}/v1/completions",
            json={"prompt": story.format(word), "max_tokens": 1},
            timeout=PATIENCE,
        )
    token, _, _ = answer.headers["x-mie-prefix-departs"].removeprefix("token ").partition(" of ")
    shown.settle()
    [*departures] = shown.events("depart")
    last = departures[-1]
    assert (last["position"], last["reason"]) == (int(token), "other tokens")
    shown.js(f"mie.seek({last['step']}); mie.select({{kind: 'seq', id: '{last['seq']}'}})")
    shown.until(f"document.getElementById('tree-note').textContent.includes('at token {token}')")
    shown.until(
        "/cached.* otter.*got.* owl/.test(document.getElementById('inspector').innerText"
        ".replaceAll('\\n', ' '))"
    )
    shown.js("mie.select(null)")


def test_page_server_and_metrics_agree(shown: Shown) -> None:
    shown.settle()
    assert "agree: 11 numbers" in shown.text("truth")
    # The page says so when they do not.
    wrong = shown.js("mie.compare({server: {num_running: 3}, metrics: {num_running: 0}})")
    assert wrong == ["running: page 0, server 3, /metrics 0"]


def test_a_token_leads_to_its_step_and_its_block_and_back(shown: Shown) -> None:
    ask(shown)
    shown.settle()
    shown.js("document.querySelector('.answer .tokens span:nth-child(12)').click()")
    shown.until("mie.store.selected?.kind === 'block'")
    block, step = shown.js("[mie.store.selected.id, mie.store.step]")
    number = shown.events("add")[-1]["number"]
    [*decodes] = [each for each in shown.events("decode") if f"{number}.0" in each["seqs"]]
    assert step == decodes[11]["step"], "the twelfth decode stores the twelfth token"
    assert block in shown.at(step)["tables"][f"{number}.0"][1]
    shown.until("document.querySelectorAll('.answer .tokens span.lit').length")
    place = shown.at(step)["tables"][f"{number}.0"][1].index(block)
    num_prompt = shown.at(step)["seqs"][f"{number}.0"]["num_prompt"]
    lit = shown.js(
        "[...document.querySelector('.answer .tokens').children]"
        ".flatMap((span, i) => span.classList.contains('lit') ? [i] : [])"
    )
    slots = range(place * BLOCK_SIZE, (place + 1) * BLOCK_SIZE)
    assert lit == [slot - num_prompt for slot in slots if slot >= num_prompt]
    shown.js("document.getElementById('live').click()")


def ask(shown: Shown) -> None:
    """Send the form with a seed, so that the answer is the same in any order of tests."""
    shown.js("document.getElementById('ask').elements.seed.value = 5")
    shown.js("document.getElementById('ask').requestSubmit()")
    shown.until("mie.answers()[0].state === 'done'")


@pytest.mark.slow
def test_no_step_shows_the_text_of_another_one(shown: Shown, url: str) -> None:
    last = httpx2.get(f"{url}/mie/state", timeout=PATIENCE).json()["step"]
    known = "mie.store.run.textOfBlock(mie.store.run.at(mie.store.step), block)"
    for step in random.Random(2).sample(range(last // 2, last), 4):
        shown.js("async step => { await mie.at(step); mie.seek(step); }", step)
        tree = list(map(int, shown.at(step)["tree"]))
        blocks = ",".join(map(str, tree))
        answer = httpx2.get(
            f"{url}/mie/text", params={"blocks": blocks, "step": step}, timeout=PATIENCE
        )
        texts = [answer.json()["blocks"][str(block)]["text"] for block in tree]
        now = shown.js(f"{tree}.map(block => {known})")
        assert all(text.startswith(part) for part, text in zip(now, texts, strict=True))
        shown.until(f"String({tree}.map(block => {known})) === String({json.dumps(texts)})")
    shown.js("document.getElementById('live').click()")


@pytest.mark.slow
def test_five_alternatives_are_shown_for_a_token(shown: Shown) -> None:
    shown.drawn()
    shown.page.hover(".answer .tokens span:nth-child(3)")
    shown.until("!document.getElementById('tip').hidden")
    assert shown.js("document.querySelectorAll('#tip .row').length") == 5
    shown.page.mouse.move(1, 1)


def test_keys_alone_move_through_steps_blocks_and_nodes(shown: Shown) -> None:
    keyboard = shown.page.keyboard
    shown.js("document.activeElement.blur()")
    keyboard.press("End")
    last = shown.js("mie.store.step")
    keyboard.press("ArrowLeft")
    keyboard.press("Shift+ArrowLeft")
    assert shown.js("mie.store.step") == last - 11
    keyboard.press("Home")
    assert shown.js("mie.store.step") == shown.js("mie.store.run.first")
    keyboard.press("End")
    assert shown.js("mie.store.follows")
    keyboard.press("Escape")
    shown.drawn()
    shown.page.focus("#map")
    keyboard.press("ArrowRight")
    keyboard.press("ArrowRight")
    assert shown.js("mie.store.selected") == {"kind": "block", "id": 1}
    assert "Block 1" in shown.text("announce")
    shown.page.focus("#tree")
    keyboard.press("ArrowDown")
    assert shown.js("mie.store.selected.id") in shown.js("[...mie.store.run.newest.tree.keys()]")
    keyboard.press("Escape")
    assert shown.js("mie.store.selected") is None


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_axe_finds_nothing_serious(shown: Shown, theme: str) -> None:
    assert serious(shown, theme) == []


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("name", ["story.html", "chat"])
@pytest.mark.slow
def test_axe_finds_nothing_serious_on_the_other_pages(
    browser: Any, url: str, name: str, theme: str
) -> None:
    with opened(browser, f"{url}/{name}") as other:
        other.until("window.mie && (mie.page?.model || mie.store?.run)")
        assert serious(other, theme) == []


@pytest.mark.slow
def test_the_tables_have_what_the_canvases_show(shown: Shown) -> None:
    shown.js("document.querySelectorAll('#tables details').forEach(each => { each.open = true; })")
    shown.until("document.querySelectorAll('#tables tbody tr').length")
    rows = shown.js(
        "[...document.querySelectorAll('#tables details')[1].querySelectorAll('tbody tr')]"
        ".map(row => [...row.children].slice(0, 4).map(cell => cell.textContent))"
    )
    kinds = ["free", "in use", "only cached", "held for a copy"]
    blocks = sorted(shown.state()["blocks"])
    assert rows == [[str(b), kinds[kind], str(refs), str(fill)] for b, kind, refs, fill in blocks]
    shown.js("document.querySelectorAll('#tables details').forEach(each => { each.open = false; })")


def trace_of(folder: Path) -> Path:
    """Write the event log of a run that forks, shares and preempts."""
    path = folder / "run.jsonl"
    prompts = ["Once upon a time", "Once upon a time there was an owl", "The mill"]
    options = ["--num-blocks", "12", "--block-size", "8", "--n", "2", "--max-tokens", "30"]
    mie("generate", *options, "--seed", "3", "--ignore-eos", "--trace", path, *prompts)
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Path:
    return trace_of(tmp_path_factory.mktemp("trace"))


def drawn_by_the_command(trace: Path, step: int) -> dict[int, str]:
    """Return the fill and the references of each block that `mie trace --step` draws."""
    text = mie("trace", trace, "--step", str(step)).stdout.decode()
    found = {}
    for line in text.splitlines():
        row = re.fullmatch(r" *(\d+)((?: +(?:\S+ +\d+×\d+|·))+) *", line)
        if row:
            for place, cell in enumerate(re.findall(r"\S+ +(\d+×\d+)|·", row[2])):
                found[int(row[1]) + place] = cell
    return {block: cell for block, cell in found.items() if cell}


def test_a_dropped_trace_is_what_the_command_shows(shown: Shown, trace: Path) -> None:
    shown.page.set_input_files("#file", str(trace))
    shown.until("mie.store.run.title === 'run.jsonl'")
    segments = list(read_log(trace))
    last = shown.js("mie.store.run.last")
    assert last == segments[-1].last
    assert shown.events("preempt")
    for step in (1, last // 2):
        drawn = drawn_by_the_command(trace, step)
        blocks = shown.at(step)["blocks"]
        assert {block: f"{fill}×{refs}" for block, _, refs, fill in blocks} == drawn
    for step in random.Random(1).sample(range(1, last + 1), 20):
        key = json.loads(json.dumps(key_record(at(segments, step), NodeText(shows_tokens=False))))
        assert cells(shown.at(step)) == cells(key), f"at step {step}"
    shown.page.select_option("#source", "live")
    shown.until("mie.store.run.isLive")


@pytest.mark.slow
def test_a_wrong_file_is_refused_and_nothing_is_lost(shown: Shown, tmp_path: Path) -> None:
    wrong = tmp_path / "photo.jsonl"
    wrong.write_text('{"no": "record"}\n')
    shown.page.set_input_files("#file", str(wrong))
    shown.until("!document.getElementById('notice').hidden")
    assert shown.text("notice") == "photo.jsonl: this file has no page records"
    assert shown.js("mie.store.run.isLive")


@pytest.mark.slow
def test_one_file_opens_from_the_disk(browser: Any, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.html"
    mie("trace", trace, "--html", out)
    asked: list[str] = []
    with opened(browser, "about:blank") as shown:
        shown.page.on("request", lambda request: asked.append(request.url))
        shown.page.goto(out.as_uri())
        shown.until("window.mie?.store.run")
        assert shown.js("mie.store.run.last") == list(read_log(trace))[-1].last
        assert not shown.js("document.getElementById('play').checkVisibility()")
        assert [each for each in asked if not each.startswith(("file:", "data:", "blob:"))] == []
        assert shown.errors == []


@pytest.mark.slow
def test_a_key_is_asked_for_and_kept_in_a_cookie(browser: Any, engine: AsyncLLM) -> None:
    config = ServeConfig(keys=Keys.of(["secret"]), root_path="/llm")
    with live(engine, config) as url, opened(browser, f"{url}/llm/") as shown:
        shown.until("document.getElementById('key')")
        shown.page.fill("#key", "wrong")
        shown.page.keyboard.press("Enter")
        shown.until("!document.getElementById('notice').hidden")
        shown.page.fill("#key", "secret")
        shown.page.keyboard.press("Enter")
        shown.until("window.mie?.store.run?.isLive")
        ask(shown)
        # The two answers 401 stand in the console.
        assert [each for each in shown.errors if "401 (Unauthorized)" not in each] == []
        shown.page.click("#logout button")
        shown.until("document.getElementById('key')")


@pytest.mark.slow
def test_a_small_window_shows_everything_without_scrolling_sideways(browser: Any, url: str) -> None:
    size = {"width": 360, "height": 740}
    with opened(browser, f"{url}/", viewport=size, color_scheme="light") as shown:
        shown.until("window.mie?.store.run")
        wide = shown.js(
            "[...document.querySelectorAll('body *')].filter(each => each.checkVisibility()"
            " && !each.closest('.sr, .skip, details') && each.getBoundingClientRect().right > 361)"
            ".map(each => each.outerHTML)"
        )
        assert wide == []
        assert shown.js("document.documentElement.scrollWidth") <= 360
        assert shown.js("document.documentElement.dataset.theme") == "light"
        shown.page.click("#theme")
        assert shown.js("document.documentElement.dataset.theme") == "dark"
        assert shown.errors == []
