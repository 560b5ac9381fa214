"""Test how a model's name leads to its directory."""

import fnmatch
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from mie.checkpoint.locate import locate_model
from mie.errors import ModelError


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
