"""Test the sdist, the wheel and the editable install."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

pytest.importorskip("hatchling")
pytest.importorskip("hatch_fancy_pypi_readme")

ROOT = Path(__file__).parents[2]
BACKEND = "import sys, hatchling.build; hatchling.build.{hook}(sys.argv[1])"


def build(hook: str, directory: Path) -> Path:
    """Run a hook of the build backend and return the only file that it leaves in ``directory``."""
    subprocess.run(
        [sys.executable, "-c", BACKEND.format(hook=hook), str(directory)],
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    (built,) = directory.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    return ZipFile(build("build_wheel", tmp_path_factory.mktemp("wheel")))


def files_under(*folders: str) -> set[str]:
    """Return the files of the tree, without Python's cache files."""
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def metadata_of(wheel: ZipFile) -> str:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return wheel.read(name).decode()


def test_the_wheel_is_the_package_and_nothing_else(wheel: ZipFile) -> None:
    packaged = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packaged == files_under("mie")
    assert {"mie/py.typed", "mie/assets/tiny/model.safetensors"} <= packaged
    assert any(name.endswith(".cu") for name in packaged)


def test_the_description_has_no_relative_links(wheel: ZipFile) -> None:
    metadata = metadata_of(wheel)
    assert "docs/architecture.md is the map" in metadata
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", metadata)


def test_the_description_leaves_out_the_picture_and_nothing_around_it(wheel: ZipFile) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, rest = readme.partition("![")
    after = rest.split("\n\n", maxsplit=1)[1]
    description = metadata_of(wheel)
    assert before + after.partition("[")[0] in description
    assert ".svg" not in description


def test_the_wheel_runs_a_model(wheel: ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    paths = [str(tmp_path / "site"), *filter(None, sys.path[1:])]
    code = (
        f"import sys; sys.path[:] = {paths}; from mie import LLM; print(LLM('bundled').directory)"
    )
    assert str(tmp_path) in python("-c", code, cwd=tmp_path)


def test_the_sdist_has_the_tests_and_everything_for_a_build(tmp_path: Path) -> None:
    with tarfile.open(build("build_sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert files_under("mie", "tests", "examples", "scripts", "docs") <= names
    assert {"README.md", "LICENSE", "pyproject.toml", "Makefile", "constraints.txt"} <= names
    assert not any(name.startswith(("shared", ".git/", ".venv")) for name in names)


@pytest.fixture
def editable(tmp_path: Path) -> Path:
    """A folder with the files that an editable install puts into site-packages."""
    wheel = build("build_editable", tmp_path)
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    return tmp_path / "site"


def test_an_editable_install_is_a_plain_path(editable: Path) -> None:
    """Type checkers read such a file. They do not run the import hooks of other build backends."""
    (pth,) = editable.glob("*.pth")
    assert [line for line in pth.read_text().splitlines() if line] == [str(ROOT)]


def test_an_editable_install_works_beside_a_folder_named_mie(
    editable: Path, tmp_path: Path
) -> None:
    """A cloned folder named mie is a namespace package if Python finds no regular package."""
    (tmp_path / "home" / "mie").mkdir(parents=True)
    code = f"import site; site.addsitedir({str(editable)!r}); import mie; print(mie.__file__)"
    shown = python("-S", "-c", code, cwd=tmp_path / "home")
    assert shown == f"{ROOT / 'mie' / '__init__.py'}\n"


def python(*arguments: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
