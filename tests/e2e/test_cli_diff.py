"""Test ``mie diff`` as a process: its table, JSON and exit codes."""

import json
from typing import Any

import numpy as np
import pytest
from command_line import error_line, mie
from emulated import needs_compiler

from mie.cli import main
from mie.ops.numpy_backend import NumpyBackend

NUMPY = ("--dtype-a", "float64", "--b", "numpy")
"""Arguments for which no compiler is needed."""


def test_float32_and_float64_agree():
    process = mie("diff", *NUMPY)
    assert process.returncode == 0
    out = process.stdout.decode()
    assert out.startswith("A numpy float64 · B numpy float32 · bundled\n2 prompts, 16 new tokens")
    assert "Within tolerance; closest is " in out
    assert "a number near zero may differ by many ULP" in out
    assert "Tokens: both choose the same 16." in out
    assert max(map(len, out.splitlines())) <= 80
    assert process.stderr.decode().splitlines() == [
        "running A: numpy float64",
        "running B: numpy float32",
    ]


@pytest.mark.parametrize("form", [(), ("--layers",), ("--json",)])
def test_a_fault_gives_exit_code_1_and_is_named(form, monkeypatch, capsys):
    linear = NumpyBackend.linear

    def spoiled(self: NumpyBackend, *args: Any, **options: Any) -> Any:
        result = linear(self, *args, **options)
        return result * 1.01 if self.dtype == np.float32 else result

    monkeypatch.setattr(NumpyBackend, "linear", spoiled)
    assert main(["diff", *NUMPY, *form]) == 1
    out = capsys.readouterr().out
    if "--json" in form:
        first = json.loads(out)["first"]
        assert (first["step"], first["layer"], first["operator"]) == (1, 0, "qkv")
    else:
        assert "Tolerance exceeded, first at\n  step 1, layer 0, qkv, element [" in out


def test_a_report_has_no_page_and_the_command_injects_no_faults():
    for option in ("--html", "--inject"):
        process = mie("diff", option, "x")
        assert (process.returncode, process.stdout) == (2, b"")
        assert f"error: unknown option {option}" in process.stderr.decode()


def test_a_side_takes_settings_and_operators_can_be_isolated():
    sides = ("--b", "numpy", "--set-b", "num_threads=1", "--kv-cache-dtype-b", "int8")
    process = mie("diff", *sides, "--isolate", "--max-tokens", "2")
    assert process.returncode == 0
    out = process.stdout.decode()
    assert "B numpy float32 num_threads=1 kv_cache_dtype=int8" in out
    assert "Each operator alone" in out
    assert max(map(len, out.splitlines())) <= 80


def test_mistakes_give_one_line_and_exit_code_2():
    assert "backend 'nix'" in error_line(mie("diff", "--b", "nix"))
    assert "dtype 'float8'" in error_line(mie("diff", "--b", "numpy", "--dtype-b", "float8"))
    assert "no parameter 'block_size'" in error_line(mie("diff", "--set-b", "block_size=8"))
    assert "nowhere" in error_line(mie("diff", *NUMPY, "--model", "./nowhere"))
    assert "block_size" in error_line(mie("diff", *NUMPY, "--block-size", "0"))


@needs_compiler
@pytest.mark.slow
def test_numpy_and_the_emulated_kernels_are_compared_by_default():
    process = mie("diff")
    assert process.returncode == 0, process.stdout.decode()
    assert process.stdout.startswith("A numpy float32 · B cupy-emulated float32".encode())
    assert b"Tokens: both choose the same 16." in process.stdout
