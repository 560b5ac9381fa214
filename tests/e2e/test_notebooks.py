"""Check that the notebooks run offline: as plain programs, and in a Jupyter kernel."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run_warm

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
PATIENCE = 600
"""Seconds that a kernel gets."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run_as_a_program(path: Path, tmp_path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells), "outputs are not committed"
    program = tmp_path / "cells.py"
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    program.write_text("\n".join(code), encoding="utf-8")
    process = run_warm(program, directory=tmp_path)
    assert process.returncode == 0, process.stderr.decode()
    assert process.stdout.count(b"\n") >= 4


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_kernel(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    program = (
        "import nbclient, nbformat, sys\n"
        "notebook = nbformat.read(sys.argv[1], as_version=4)\n"
        f"nbclient.NotebookClient(notebook, timeout={PATIENCE}).execute()\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(path)]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=2 * PATIENCE)
    assert process.returncode == 0, process.stderr.decode()
