"""Check the web page's modules, the file that they are joined to, its records, and docs/page.md."""

import base64
import gzip
import hashlib
import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from event_stories import STORY, write_story

from mie.events import read_log
from mie.events.replay import State
from mie.page.assets import RECORDED_RUNS, EmbeddedRun, assets, bundle, page_html
from mie.page.cells import PAGE_VERSION, SHOWN, event_of
from mie.page.follow import MAX_SPLIT

FILES = {
    "main.js": (
        'import {add, twice as double} from "./lib/sums.js";\n'
        'import {\n  NAME,\n  Box\n} from "./names.js";\n'
        'import {draw} from "./chart.js";\n'
        "console.log(NAME, add(1, 2), double(4), new Box().size, draw());\n"
    ),
    "lib/sums.js": (
        'import {NAME} from "../names.js";\n'
        "export function add(a, b) { return a + b; }\n"
        "export const twice = (x) => add(x, x);\n"
        "const hidden = NAME;\n"
    ),
    "names.js": (
        'export const NAME = "otter";\nconst hidden = 1;\n'
        "export class Box { size = hidden + 2; }\n"
        "export async function later() {}\nexport const $ = 1;\n"
    ),
    "chart.js": "export function draw() { return 'drawn'; }\n",
}


def test_joined_modules_do_what_the_modules_do(tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    script = tmp_path / "script.js"
    script.write_text(bundle(FILES))
    done = subprocess.run(["node", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "otter 3 8 3 drawn\n"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"chart.js": 'import {add} from "./main.js";\n'}, "imports itself"),
        ({"chart.js": "export let count = 0;\n"}, "cannot be joined"),
        ({"chart.js": "const a = 1;\nexport {a};\n"}, "cannot be joined"),
        ({"chart.js": 'import "./names.js";\n'}, "cannot be joined"),
        ({"chart.js": 'import {x} from "https://cdn.example/x.js";\n'}, "cannot be joined"),
        ({"chart.js": 'import {x} from "./nothing.js";\n'}, "imports nothing.js"),
        ({"chart.js": "const end = '</script>';\n"}, "</script"),
    ],
)
def test_a_module_of_another_form_is_refused(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        bundle({**FILES, **changed})


def test_the_file_loads_nothing_and_allows_only_what_is_inside() -> None:
    runs = [
        EmbeddedRun(name=run.name, title="</script><b>", gzip=run.compressed())
        for run in RECORDED_RUNS
    ]
    page = page_html(runs)
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert found is not None
    policy = html.unescape(found[1])
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    blocks = re.findall(r'<(?:style|script type="module")>(.*?)</(?:style|script)>', page, re.S)
    assert len(blocks) == 2
    for block in blocks:
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)
    data = re.search(r'id="mie-runs">(.*?)</script>', page, re.S)
    assert data is not None
    embedded = json.loads(data[1])
    assert [each["title"] for each in embedded] == ["</script><b>"] * len(RECORDED_RUNS)
    for each, run in zip(embedded, RECORDED_RUNS, strict=True):
        lines = gzip.decompress(base64.b64decode(each["gzip"])).decode().splitlines()
        head = json.loads(lines[0])
        assert (head["record"], head["version"]) == ("head", PAGE_VERSION)
        assert gzip.decompress(run.compressed()).decode().splitlines() == lines


def test_the_page_is_small() -> None:
    files = {name: asset for name, asset in assets().items() if not name.startswith("runs/")}
    assert sum(len(asset.compressed) for asset in files.values()) < 160_000
    assert len(gzip.compress(page_html([]).encode())) < 100_000
    assert sum(len(run.compressed()) for run in RECORDED_RUNS) < 50_000


TEXT = (Path(__file__).parents[3] / "docs" / "page.md").read_text(encoding="utf-8")


def test_every_kind_of_event_has_an_example() -> None:
    section = TEXT.partition("### events\n")[2].partition("\n### ")[0]
    named = set(re.findall(r'\["(\w+)",', section)) | set(
        re.findall(r"`(\w+)` has\s+no\s+fields", section)
    )
    assert named == SHOWN.keys()


def test_examples_have_the_fields_of_their_kind() -> None:
    section = TEXT.partition("### events\n")[2].partition("\n### ")[0]
    for kind, names in re.findall(r'^ +\["(\w+)",[^\n]*\] {2,}([a-z_ ]+)', section, re.MULTILINE):
        assert tuple(names.split()[: len(SHOWN[kind])]) == SHOWN[kind], kind


@pytest.fixture
def segment(tmp_path):
    [segment] = read_log(write_story(tmp_path / "story.jsonl", [*STORY, *[[]] * MAX_SPLIT]))
    return segment


@pytest.mark.parametrize(
    ("record", "event"),
    [
        (("decode", (1, 0)), ["decode", ["12.3", "7.0"]]),
        (("decode", ()), ["decode", []]),
        (("prefill", (7, 0), 8, 5, (0, 1)), ["prefill", "7.0", 8, 5, [0, 1]]),
        (("fork", (7, 1), (7, 0), 2), ["fork", "7.1", "7.0", 2]),
        (("finish", (7, 0), 'a "stop"'), ["finish", "7.0", 'a "stop"']),
        (("rebuild", {}), ["rebuild"]),
        (
            ("depart", (7, 0), 9, "other tokens", (40, 41), (7,), 5),
            ["depart", "7.0", 9, "other tokens", 5],
        ),
    ],
)
def test_an_event_is_its_record_in_json(record, event):
    state = State(block_size=4, num_blocks=8, num_host_blocks=0)
    state.rows.update({0: (7, 0), 1: (12, 3)})
    found = event_of(record, state)
    assert found is not None
    assert json.loads(found) == event


ROOT = Path(__file__).parents[3]


def node_version() -> tuple[int, int] | None:
    if shutil.which("node") is None:
        return None
    shown = subprocess.run(["node", "--version"], capture_output=True, text=True, timeout=60)
    found = re.match(r"v(\d+)\.(\d+)", shown.stdout)
    return (int(found[1]), int(found[2])) if found else None


@pytest.mark.parametrize(
    "command",
    [("tsc", "--project", "tests/web/tsconfig.json"), ("eslint", "mie/page/web", "tests/web")],
    ids=lambda command: command[0],
)
def test_the_modules_pass_types_and_lint(command: tuple[str, ...]) -> None:
    program = ROOT / "node_modules" / ".bin" / command[0]
    if not program.exists():
        pytest.skip(f"{command[0]} is not installed (npm install --no-package-lock)")
    done = subprocess.run(
        [program, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif((node_version() or (0, 0)) < (20, 0), reason="needs node 20 or later")
def test_the_modules_pass_their_own_tests() -> None:
    files = sorted(str(path) for path in (ROOT / "tests/web").glob("*.test.js"))
    done = subprocess.run(
        ["node", "--test", *files], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"^# pass (\d+)", done.stdout, re.MULTILINE)[0]) >= 20
