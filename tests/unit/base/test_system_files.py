"""Test reading untrusted files and JSON: refusals, their messages, and open files."""

import json
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mie.base.files import MAX_DIGITS, open_file, parse_json, read_file


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def make_directory(path: Path) -> None:
    path.mkdir()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def make_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (make_directory, "it is a directory, not a regular file"),
        (os.mkfifo, "it is a pipe, not a regular file"),
        (make_link_to_a_device, "it is a device, not a regular file"),
        (make_socket, "No such device or address"),
    ],
)
def test_what_is_no_file_is_refused_and_nothing_stays_open(make, reason, tmp_path) -> None:
    path = tmp_path / "x"
    make(path)
    before = num_open_files()
    with pytest.raises(OSError, match=r".") as caught:
        open_file(path)
    assert caught.value.strerror == reason
    assert num_open_files() == before


@pytest.mark.parametrize("name", ["a\0b", "half of a pair: \udc80\ud800"])
def test_a_name_that_no_file_can_have_is_an_os_error(name: str) -> None:
    with pytest.raises(OSError, match="its name is not a file name") as caught:
        open_file(name)
    assert caught.value.filename == name


def test_a_pipe_with_a_writer_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    keeps_it_open = os.open(path, os.O_RDWR)
    with open_file(path, allow_pipe=True) as pipe:
        os.write(keeps_it_open, b"one\ntwo")
        assert pipe.readline() == b"one\n"
        os.close(keeps_it_open)
        assert pipe.read() == b"two"


def test_a_file_may_have_as_many_bytes_as_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes, which is the limit"):
        read_file(path, 4)


# JSON.

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(name=st.text(), first=values, second=values, depth=st.integers(0, 3))
def test_a_name_may_be_given_twice_only_with_equal_values(name, first, second, depth) -> None:
    inner = f"{{{json.dumps(name)}: {json.dumps(first)}, {json.dumps(name)}: {json.dumps(second)}}}"
    data = ("[" * depth + inner + "]" * depth).encode()
    if first != second:
        with pytest.raises(ValueError, match="is given twice"):
            parse_json(data)
        return
    found = parse_json(data)
    for _ in range(depth):
        [found] = found
    assert found == {name: first}


def test_an_integer_has_a_limited_number_of_digits() -> None:
    assert parse_json(b"9" * MAX_DIGITS) == 10**MAX_DIGITS - 1
    with pytest.raises(ValueError, match="an integer has 1,001 digits; the limit is 1,000"):
        parse_json(b"9" * (MAX_DIGITS + 1))
