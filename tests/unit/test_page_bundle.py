"""Test how the page's modules are joined into one file."""

from __future__ import annotations

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

from mie.events.page.assets import RECORDED_RUNS, assets
from mie.events.page.bundle import EmbeddedRun, bundle, page_html
from mie.events.page.records import PAGE_VERSION

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
    assert [each["title"] for each in embedded] == ["</script><b>"] * 2
    for each, run in zip(embedded, RECORDED_RUNS, strict=True):
        lines = gzip.decompress(base64.b64decode(each["gzip"])).decode().splitlines()
        head = json.loads(lines[0])
        assert (head["record"], head["version"]) == ("head", PAGE_VERSION)
        assert gzip.decompress(run.compressed()).decode().splitlines() == lines


def test_all_files_of_the_page_together_are_below_150_kb() -> None:
    assert sum(len(asset.content) for asset in assets().values()) < 150_000
