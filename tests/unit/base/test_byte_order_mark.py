"""A byte order mark at the beginning of a text changes nothing, whichever part reads the text."""

import argparse
import codecs
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mie
from mie.base.files import parse_json, read_utf8, without_bom
from mie.cli import main
from mie.cli.options import add_sampling_options, sampling_params
from mie.cli.terminal import read_all_from_pipe
from mie.events import read_log
from mie.frontend.batch.lines import raw_lines
from mie.lab.loads import from_lengths
from mie.lab.workload import Workload
from mie.serve.config import arguments_of
from mie.serve.keys import Keys
from mie.text.tokenizer import read_text

WORKLOAD = from_lengths([(3, 2)], name="w").to_json()


def regex_in(path: Path) -> Any:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser, max_tokens=3)
    return sampling_params(parser.parse_args(["--regex", f"@{path}"]))


def message_in(path: Path) -> str:
    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(sys, "stdin", SimpleNamespace(buffer=file))
        return read_all_from_pipe()


def key_in(path: Path) -> str | None:
    keys = Keys.of((), str(path))
    assert keys is not None
    return keys.find("secret")


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "JSON": ('{"a": [1]}', lambda path: parse_json(path.read_bytes())),
    "text": ("a\r\nb\n", read_utf8),
    "lines": ("One day\n", lambda path: [line for _, _, line in raw_lines(str(path))]),
    "template": ("{{ messages }}", lambda path: read_text(path, 1000)),
    "options": ("port: 9000\n", lambda path: arguments_of(str(path), ["--port"])),
    "keys": ("user secret\n", key_in),
    "workload": (WORKLOAD, lambda path: Workload.load(path)),
    "regex": ("[ab]+", regex_in),
    "message": ("Hello\n", message_in),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_text_with_a_byte_order_mark_reads_as_without(
    name: str, ending: str, tmp_path: Path
) -> None:
    text, read = READERS[name]
    data = text.replace("\r\n", "\n").replace("\n", ending).encode()
    plain, marked = tmp_path / "plain", tmp_path / "marked"
    plain.write_bytes(data)
    marked.write_bytes(codecs.BOM_UTF8 + data)
    assert read(marked) == read(plain)


def test_a_trace_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    command = ["generate", "--max-tokens", "2", "--trace", str(path), "Once"]
    assert main(command) == 0
    [before] = read_log(path)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    [after] = read_log(path)
    assert after == before


def test_an_evaluation_does_not_see_a_byte_order_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for mark in (b"", codecs.BOM_UTF8):
        path = tmp_path / "text.txt"
        path.write_bytes(mark + b"Once upon a time there was a fox.")
        assert main(["eval", str(path), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]


def test_only_the_first_mark_of_a_text_is_one() -> None:
    assert without_bom(codecs.BOM_UTF8 * 2 + b"a") == codecs.BOM_UTF8 + b"a"
    assert without_bom(b"a" + codecs.BOM_UTF8) == b"a" + codecs.BOM_UTF8


def test_one_function_removes_the_mark() -> None:
    root = Path(mie.__file__).parent
    pattern = re.compile(r"utf-?8-sig|BOM_UTF8|\\xef\\xbb\\xbf|\\ufeff", re.IGNORECASE)
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if pattern.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"base/files.py"}
