"""Test ``mie diff`` as a process: its table, page, JSON and exit codes."""

from pathlib import Path

import pytest
from command_line import error_line, mie
from emulated import needs_compiler

NUMPY = ("--dtype-a", "float64", "--b", "numpy-plain")
"""Arguments for which no compiler is needed."""


def test_float32_and_float64_agree():
    process = mie("diff", *NUMPY)
    assert process.returncode == 0
    out = process.stdout.decode()
    assert out.startswith(
        "A numpy-plain float64 · B numpy-plain float32 · bundled\n2 prompts, 16 new tokens"
    )
    assert "Within tolerance; closest is " in out
    assert "Tokens: both choose the same 16." in out
    assert max(map(len, out.splitlines())) <= 80
    assert process.stderr.decode().splitlines() == [
        "running A: numpy-plain float64",
        "running B: numpy-plain float32",
    ]


def test_an_injected_fault_is_found_and_shown_on_the_page(tmp_path: Path):
    page = tmp_path / "report.html"
    process = mie("diff", *NUMPY, "--inject", "gate_up:2", "--layers", "--html", page)
    assert process.returncode == 1
    assert b"Tolerance exceeded, first at\n  step 1, layer 2, gate_up, element [" in process.stdout
    assert "step 1, layer 2, gate_up, element [" in page.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [page]


def test_a_side_takes_settings_and_operators_can_be_isolated():
    sides = ("--b", "numpy", "--set-b", "num_threads=1", "--kv-cache-dtype-b", "int8")
    process = mie("diff", *sides, "--isolate", "--max-tokens", "2")
    assert process.returncode == 0
    out = process.stdout.decode()
    assert "B numpy float32 num_threads=1 kv_cache_dtype=int8\n" in out
    assert "Each operator alone" in out
    assert max(map(len, out.splitlines())) <= 80


def test_mistakes_give_one_line_and_exit_code_2(tmp_path: Path):
    assert "backend 'nix'" in error_line(mie("diff", "--b", "nix"))
    assert "dtype 'float8'" in error_line(mie("diff", "--b", "numpy", "--dtype-b", "float8"))
    assert "no parameter 'block_size'" in error_line(mie("diff", "--set-b", "block_size=8"))
    assert "--inject takes OP" in error_line(mie("diff", "--inject", "softmax"))
    assert "--html would overwrite" in error_line(mie("diff", "--html", tmp_path))
    nowhere = tmp_path / "nowhere" / "report.html"
    assert "cannot be written: No such file or directory" in error_line(
        mie("diff", "--html", nowhere)
    )
    assert "nowhere" in error_line(mie("diff", *NUMPY, "--model", "./nowhere"))
    assert "block_size" in error_line(mie("diff", *NUMPY, "--block-size", "0"))


@needs_compiler
@pytest.mark.slow
def test_numpy_and_the_emulated_kernels_are_compared_by_default():
    process = mie("diff")
    assert process.returncode == 0, process.stdout.decode()
    assert process.stdout.startswith("A numpy-plain float32 · B cupy-emulated float32".encode())
    assert b"Tokens: both choose the same 16." in process.stdout
