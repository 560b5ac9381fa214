"""Run scripts of benchmarks and GPUs without a GPU, and check that their pages are up to date."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench import cpu
from bench.gpu import attention
from bench.gpu import main as gpu_bench
from bench.gpu.device import DryDevice
from bench.gpu.inputs import decode_inputs, prefill_inputs
from bench.gpu.report import BenchReport
from bench.gpu.shapes import TINY, TINY_PREFILL
from command_line import python
from emulated import needs_compiler
from gpu import check as gpu_check
from gpu import parts
from gpu.page import beside_simulated

from mie.cli.sim import cluster_table
from mie.lab.sim.cluster import ROUTERS, ClusterLoad, simulate_cluster
from mie.ops.backend import Memory

# Inputs and correct results.


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_kernels_are_correct_on_the_benchmarks_inputs(dtype: str):
    device = DryDevice()
    for stored in ("auto", "int8", "int4"):
        inputs = decode_inputs(device, replace(TINY, dtype=dtype, kv_cache_dtype=stored))
        assert len(inputs.checked_places()) == 2
        assert 0 < inputs.error() < attention.ERRORS[dtype]
    prompts = prefill_inputs(device, replace(TINY_PREFILL, dtype=dtype))
    assert len(prompts.checked_places()) == 3
    assert 0 < prompts.error() < attention.ERRORS[dtype]


# Goals and time limits.


ROOT = Path(__file__).parents[3]


def results(directory: Path) -> tuple[dict[str, Any], str]:
    values = json.loads((directory / "gpu_check.json").read_text())
    return values, (directory / "gpu_check.md").read_text()


# The check.


@needs_compiler
@pytest.mark.slow
def test_a_dry_run_goes_through_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ample = {name: (part, 1000) for name, (part, _) in parts.PARTS.items()}  # on a slow machine too
    monkeypatch.setattr(gpu_check, "PARTS", ample)
    options = ["--dry-run", "--output", str(tmp_path), "--commit", "abc123", "--seconds", "10000"]
    assert gpu_check.main(options) == 0
    values, page = results(tmp_path)
    statuses = {part["name"]: part["status"] for part in values["parts"]}
    assert statuses == dict.fromkeys(parts.PARTS, "passed")
    assert values["state"]["commit"] == "abc123"
    assert values["parts"][1]["details"]["passed"] > 0
    assert values["parts"][-1]["details"]["decode"]
    rows = values["parts"][-2]["details"]["rows"]
    assert [row["setting"] for row in rows] == ["as it is", "enforce_eager=True"]
    assert {kind[1] for kind in rows[1]["launched"]} == {"never captured"}
    for words in (
        "dry run",
        "## Arrivals",
        "* commit: abc123",
        "| parity | passed |",
        "### Decode attention",
    ):
        assert words in page
    assert "exit code: 0" in (tmp_path / "gpu_check.log").read_text()


def test_the_limits_of_parts_grow_with_the_time_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given: list[float] = []

    def note(run: Any, seconds: float) -> Any:
        given.append(seconds)
        return parts.Outcome(status="passed")

    noting = {name: (note, limit) for name, (_, limit) in parts.PARTS.items()}
    monkeypatch.setattr(gpu_check, "PARTS", noting)
    for seconds in ("530", "1060"):
        options = ["--dry-run", "--output", str(tmp_path), "--seconds", seconds, "--only", "parity"]
        assert gpu_check.main(options) == 0
    assert given == [150, 300]


def test_processes_of_tests_fit_the_machine():
    counts = [parts.num_workers(*each) for each in ((16, 100 << 30), (6, 5 << 30), (6, 1 << 30))]
    assert counts == [14, 3, 1]


@needs_compiler
def test_caches_that_do_not_fit_are_skipped_by_name(monkeypatch: pytest.MonkeyPatch):
    little = Memory(available_bytes=1000, is_shared=True)
    monkeypatch.setattr("bench.gpu.inputs.device_memory", lambda xp, share: little)
    monkeypatch.setattr(
        gpu_bench,
        "parts",
        lambda device, report: [("tiny", lambda: attention.bench_decode(device, TINY, report))],
    )
    report = BenchReport(state={}, prefix=None, is_dry_run=True)
    gpu_bench.bench(DryDevice(), report, 1000)
    [skipped] = report.skipped
    assert skipped["name"] == "tiny"
    assert "MemoryError: 6 caches of" in skipped["reason"]
    assert not report.failures


def test_measured_steps_are_beside_the_simulators():
    row = {"engine": "mie", "model": "TinyLlama-1.1B", "num_requests": 64, "num_tokens": 9600}
    parts = [{"name": "benchmark", "details": {"end_to_end": [{**row, "step_ms": 2.0}]}}]
    state = {"device": "NVIDIA H200", "num_multiprocessors": 132}
    values = {"is_dry_run": False, "state": state, "parts": parts}
    [*_, (line)] = beside_simulated(values)
    what, measured, simulated, ratio = line.strip("| ").split(" | ")
    assert (what, measured) == ("mie, TinyLlama-1.1B, 64 requests", "2.000")
    assert float(ratio) == pytest.approx(2.0 / float(simulated), abs=0.01)
    agx = {"device": "Orin", "num_multiprocessors": 16}  # which an Orin Nano has eight of
    [unknown] = beside_simulated({**values, "state": agx})
    assert "The simulator has no 'Orin' of 16 multiprocessors; it has" in unknown


def test_a_missing_device_gives_one_line(tmp_path: Path):
    code = "import sys; sys.modules['cupy'] = None; from gpu.check import main; sys.exit(main())"
    settings = {"cwd": ROOT / "scripts", "env": {"PYTHONPATH": str(ROOT)}}
    done = python("-c", code, "--child", "environment", code=2, **settings)
    assert len(done.stdout.splitlines()) == 1
    assert "needs CuPy" in done.stdout


def test_every_ptx_wrapper_has_golden_vectors():
    """The wrappers are named in the kernels of the emulator's tests, or in the headers that these
    use."""
    kernels = ROOT / "mie" / "ops_gpu" / "kernels"
    wrappers = re.findall(
        r"__device__ __forceinline__ \w+ (\w+)\(", (kernels / "mie_ptx.cuh").read_text()
    )
    tried = (ROOT / "tests" / "kernels" / "emulator.cu").read_text()
    tried += (kernels / "mie_cuda.cuh").read_text() + (kernels / "quantized.cuh").read_text()
    assert len(wrappers) > 10
    assert [name for name in wrappers if not re.search(rf"{name}\b", tried)] == ["shared_address"]


DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_on_clusters_has_the_table_of_the_results():
    rows = json.loads((DOCS / "scale.json").read_text(encoding="utf-8"))["clusters"]
    table = "\n".join(cluster_table(rows))
    assert table in (DOCS / "scale.md").read_text(encoding="utf-8")
    found = [(row["num_replicas"], row["router"]) for row in rows]
    assert found == [(size, name) for size in (1, 3, 10, 30, 100, 300, 1000) for name in ROUTERS]
    for row in rows[:4]:  # those that take a second
        assert simulate_cluster(ClusterLoad(), row["num_replicas"], row["router"]) == row


SCRIPT = runpy.run_path(str(ROOT / "scripts" / "draw_readme.py"))
PICTURE = ROOT / "docs" / "pictures" / "blocks.svg"


def test_the_picture_is_what_the_script_draws() -> None:
    drawn = SCRIPT["draw"](*SCRIPT["record_run"]())
    assert drawn == PICTURE.read_text(encoding="utf-8"), "run scripts/draw_readme.py"


def test_the_readme_begins_with_the_installation_lines_that_work_and_the_picture() -> None:
    beginning = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert len(beginning.splitlines()) <= 75  # with a table of up to eight rows
    assert "    make demo " in beginning[:1000]
    assert "    make test " in beginning[:1000]
    places = [beginning.index(each) for each in ("recording.webp", "pip install mie", "```python")]
    assert places == sorted(places)


def test_rows_of_files_are_refused_by_name():
    with pytest.raises(ValueError, match=r"mie, llama.cpp, ik_llama\.cpp; got ctranslate2"):
        cpu.rows_of_files(["ctranslate2"], (), ())
