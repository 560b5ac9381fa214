"""Test ``mie sim`` as a process."""

from pathlib import Path

from command_line import mie

from mie.lab.loads import PRESETS


def run(*arguments: str | Path) -> str:
    """Return the standard output of a successful command."""
    process = mie(*arguments)
    assert process.returncode == 0, process.stderr.decode()
    return process.stdout.decode()


def test_a_workload_is_written_to_standard_output_or_a_file(tmp_path: Path):
    path = tmp_path / "load.json"
    assert run("sim", "workload", "burst", "--seed", "3", "-o", path) == ""
    text = path.read_text(encoding="utf-8")
    assert (
        run("sim", "workload", "burst", "--seed", "3") == text == PRESETS["burst"](seed=3).to_json()
    )
    assert run("sim", "workload", "list").split() == list(PRESETS)


def test_devices_and_models_are_listed():
    text = run("sim", "devices")
    assert "| h200             | 4,800 |   989.0 |" in text
    assert "data sheet" in text
    assert "1,100,048,384" in text
