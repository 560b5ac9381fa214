"""Test the sdist, the wheel and the editable install."""

import os
import tarfile
from pathlib import Path
from zipfile import ZipFile

import check_build
import pytest
from command_line import python

pytest.importorskip("hatchling")
pytest.importorskip("hatch_fancy_pypi_readme")

ROOT = Path(__file__).parents[2]

BACKEND = "import sys, hatchling.build; hatchling.build.{hook}(sys.argv[1])"


def build(hook: str, directory: Path) -> Path:
    """Run a hook of the build backend and return the only file that it leaves in ``directory``."""
    python("-c", BACKEND.format(hook=hook), directory, cwd=ROOT)
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
    steps = {f"mie/learn/steps/step_{number}.py" for number in range(1, 10)}
    assert packaged == files_under("mie") | steps
    assert {"mie/py.typed", "mie/assets/tiny/model.safetensors"} <= packaged
    assert any(name.endswith(".cu") for name in packaged)


def test_the_description_begins_with_the_install_and_leads_nowhere(wheel: ZipFile) -> None:
    assert wheel.filename is not None
    assert check_build.problems_of(Path(wheel.filename)) == []
    metadata = metadata_of(wheel)
    assert "beginning with `docs/index.md`" in metadata
    assert "schema, an expression or a grammar, and a model can call tools" in " ".join(
        metadata.split()
    )
    assert "## How it is checked" in metadata


def test_the_check_of_a_build_notices_a_picture_and_a_relative_link(tmp_path: Path) -> None:
    path = tmp_path / "mie-9-py3-none-any.whl"
    with ZipFile(path, "w") as wheel:
        wheel.writestr("mie-9.dist-info/METADATA", "Name: mie\n\n# mie\n![a](b.svg) [c](d.md)\n")
        wheel.writestr("tests/e.py", "")
    text = "; ".join(check_build.problems_of(path))
    for part in ("tests/e.py", "install command", "'![a]'", "'](d.md)'"):
        assert part in text
    assert check_build.undated("9", "## 9 (unreleased)\n")
    assert not check_build.undated("9", "## 9 (2026-11-24)\n")


@pytest.mark.slow
def test_the_sdist_has_the_tests_and_everything_for_a_build(tmp_path: Path) -> None:
    with tarfile.open(build("build_sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert files_under("mie", "tests", "examples", "scripts", "docs") <= names
    assert {
        "README.md",
        "SECURITY.md",
        "LICENSE",
        "pyproject.toml",
        "Makefile",
        "constraints.txt",
    } <= names
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


def test_an_editable_install_works_beside_a_folder_named_mie(editable, tmp_path) -> None:
    """A cloned folder named mie is a namespace package if Python finds no regular package."""
    (tmp_path / "home" / "mie").mkdir(parents=True)
    code = f"import site; site.addsitedir({str(editable)!r}); import mie; print(mie.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = python("-S", "-c", code, cwd=tmp_path / "home", env=environment).stdout
    assert shown == f"{ROOT / 'mie' / '__init__.py'}\n"
