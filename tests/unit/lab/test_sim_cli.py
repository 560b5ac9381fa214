"""Test the refusals of ``mie bench`` and ``mie sim``, each with one line."""

import pytest

from mie.cli import main

SIMULATED = ("--device", "a10g", "--model-shape", "TinyLlama-1.1B")


def error_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the only line on standard error of a command that did nothing."""
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert line.startswith("mie: error: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("throughput", "--device", "a10"), "it has jetson-orin-nano, a10g"),
        (("throughput", "--model-shape", "bundled"), "needs --device"),
        (("serve", "--device", "a10g", "--model", "x"), "--model-shape"),
        (
            ("serve", "--device", "a10g", "--backend", "numpy"),
            "--backend has no effect on a simulated engine",
        ),
        (("serve", *SIMULATED, "--request-rate", "0"), "request_rate"),
        (("serve", *SIMULATED, "--metric-percentiles", "x"), "metric-percentiles"),
        (("throughput", *SIMULATED, "--num-prompts", "0"), "num_requests"),
        (("throughput", *SIMULATED, "--trace", "/nowhere/x"), "cannot write --trace"),
    ],
)
def test_a_wrong_benchmark_is_refused(arguments, message, capsys):
    assert message in error_line(capsys, "bench", *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("workload", "storm"), "known are: burst"),
        (("workload", "calibration"), "known are: burst"),
        (("workload", "burst", "-o", "/nowhere/x"), "cannot write /nowhere/x"),
    ],
)
def test_a_wrong_simulation_is_refused(arguments, message, capsys):
    assert message in error_line(capsys, "sim", *arguments)


@pytest.mark.parametrize("command", ["calibrate", "extract", "predict"])
def test_recorded_runs_are_no_costs(command: str, capsys):
    assert main(["sim", command, "run.jsonl"]) == 2
    assert f"invalid choice '{command}'" in capsys.readouterr().err


def test_costs_are_those_of_a_device(capsys):
    assert main(["bench", "throughput", "--costs", "costs.json", "--num-blocks", "9"]) == 2
    assert "unknown option --costs" in capsys.readouterr().err
