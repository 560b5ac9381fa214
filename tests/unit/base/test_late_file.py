"""A file that keeps its former contents until the first write."""

from pathlib import Path

import pytest

from mie.base.files import LateFile
from mie.cli.options import trace_file
from mie.errors import ConfigError


def test_the_first_write_replaces_the_contents(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("an earlier recording\n")
    with LateFile(str(path)) as file:
        assert path.read_text() == "an earlier recording\n"
        file.write("one\n")
        file.write("two\n")
    assert path.read_text() == "one\ntwo\n"


def test_a_command_that_fails_keeps_an_earlier_recording(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("an earlier recording\n")
    with pytest.raises(ConfigError, match="no model"), trace_file(str(path)):
        raise ConfigError("no model")
    assert path.read_text() == "an earlier recording\n"


def test_a_command_that_fails_leaves_no_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(ConfigError, match="no model"), trace_file(str(path)):
        raise ConfigError("no model")
    assert not path.exists()


def test_a_device_is_not_truncated() -> None:
    with LateFile("/dev/null") as file:
        assert file.write("one\n") == 4
