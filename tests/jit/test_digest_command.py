"""Check `mie digest`: the committed digests, and that it sees a change of the last bit."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import python
from compiled import needs_numba

from mie.cli import main

pytestmark = needs_numba

TESTS = Path(__file__).parents[1]
TABLE = json.loads((TESTS / "data/digests.json").read_text())
GOLDEN = sorted((TESTS / "golden/models").iterdir())
QUICK = ("gpt_oss_sinks", "qwen35_delta")
"""Golden models in `make test`: windows, sinks, experts and YaRN, and a recurrence."""
ROW = "2 threads"


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> list[dict[str, Any]]:
    """Run the command line here, and return an object for each model."""
    assert main(["digest", "--json", *map(str, words)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def check(found: list[dict[str, Any]]) -> None:
    """Compare the rows of each model with the table."""
    for model in found:
        own = TABLE[Path(model["model"]).name]
        for row in (row for row in model["rows"] if not row["refused"]):
            assert row["alone"] == row["batch"] == own[row["name"]], (model["model"], row["name"])


def test_the_bundled_model_has_the_committed_digest(capsys: pytest.CaptureFixture[str]) -> None:
    [found] = run(capsys, "--only", ROW)
    assert [row["name"] for row in found["rows"]] == [ROW]
    check([found])


@pytest.mark.slow
def test_all_settings_of_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    [found] = run(capsys, "bundled")
    check([found])
    digests = {row["name"]: row["alone"] for row in found["rows"] if not row["refused"]}
    assert digests.keys() == TABLE["bundled"].keys()
    assert digests["1 thread"] == digests[ROW] == digests["float32 weights"]
    assert len({*digests.values()}) == len(digests) - 2
    page = (TESTS.parent / "docs/numerics.md").read_text()
    assert found["digest"] in page


def test_the_readme_has_the_digest_of_the_page() -> None:
    page, readme = (
        (TESTS.parent / name).read_text(encoding="utf-8")
        for name in ("docs/numerics.md", "README.md")
    )
    [digest] = re.findall(r"^\| bundled \| `(\w{64})` \|$", page, re.MULTILINE)
    assert f"`{digest[:16]}…`" in readme


@pytest.mark.parametrize(
    "directory",
    [pytest.param(each, marks=[] if each.name in QUICK else [pytest.mark.slow]) for each in GOLDEN],
    ids=lambda each: each.name,
)
def test_golden_models(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(run(capsys, "--only", ROW, "--", directory))


@pytest.mark.slow
def test_kernels_of_avx2_give_the_same_bits() -> None:
    """NumPy has no AVX-512 there either. With it, exp, log and powers have other last bits."""
    numpy = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4"
    environment = {**os.environ, "MIE_CPU": "haswell", "NPY_DISABLE_CPU_FEATURES": numpy}
    words = ("-m", "mie", "digest", "--json", "--only", ROW, "--", "bundled", *GOLDEN)
    check([json.loads(line) for line in python(*words, env=environment).stdout.splitlines()])


def test_the_digest_sees_the_last_bit_of_a_log_probability(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy's exp and log take the place of the kernel. Tokens and 52 bits stay equal."""
    from mie.ops import sampling
    from mie.ops_jit.jit_backend import JitBackend

    def top_logprobs(_: Any, logits: Any, row: int, token_id: int, num_top: int) -> Any:
        return sampling.top_logprobs(logits[row], token_id, num_top)

    monkeypatch.setattr(JitBackend, "top_logprobs", top_logprobs)
    [found] = run(capsys, "--only", ROW)
    [row] = found["rows"]
    assert row["alone"] == row["batch"] != TABLE["bundled"][ROW]


def test_the_text_has_a_line_for_each_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["digest", "--backend", "numpy", "--only", "2 threads", "fp8 cache"]) == 0
    title, heads, *rows, last = capsys.readouterr().out.splitlines()
    assert title == "bundled"
    assert heads.split() == ["settings", "alone", "together"]
    assert [row[:16].rstrip() for row in rows] == ["2 threads", "fp8 cache"]
    assert all(len(digest) == 16 for row in rows for digest in row[16:].split())
    assert last.startswith("digest ")
    assert len(last.split()[1]) == 64


def test_settings_that_a_quantised_model_cannot_have_are_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["digest", "--only", "int4 weights", "--", str(TESTS / "data/quantised/w4_group")])
        == 0
    )
    assert "int4 weights     refused: " in capsys.readouterr().out


def test_an_unknown_row_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["digest", "--only", "3 threads"]) == 2
    assert "no settings have the name '3 threads' (there are '1 thread'," in capsys.readouterr().err
