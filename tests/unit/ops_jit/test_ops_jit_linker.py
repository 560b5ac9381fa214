"""Load object files, and refuse the ones that kernels never are."""

import ctypes
import re

import pytest
from object_files import object_file

pytest.importorskip("llvmlite")

from mie.ops_jit import linker
from mie.ops_jit.linker import CannotLink, Library


def call(library: Library, code: bytes, argument: int) -> int:
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(library.load(code))
    return int(function(argument))


def test_functions_and_constants_are_found() -> None:
    library = Library()
    codes = object_file("call i64 @other(i64 %x)"), object_file("add i64 %x, 30")
    assert [call(library, code, 2) for code in (*codes, *codes)] == [11, 32, 11, 32]


@pytest.mark.parametrize(
    ("value", "is_large", "why"),
    [
        ("call i64 @strlen(ptr null)", True, "is in another library"),
        ("load i64, ptr @zeros", True, "is in another library"),
        ("call i64 @other(i64 %x)", False, r"relocation \d+ of machine \d+ is not read"),
    ],
    ids=["call by name", "common", "small code model"],
)
def test_what_kernels_do_not_have_is_refused(value: str, is_large: bool, why: str) -> None:
    with pytest.raises(CannotLink, match=why):
        Library().load(object_file(value, is_large=is_large))


def test_a_system_that_refuses_memory_for_code_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linker.mmap, "PROT_EXEC", 1 << 20)  # is no permission
    with pytest.raises(CannotLink, match=re.escape("memory for code: Invalid argument")):
        Library().load(object_file("add i64 %x, 1"))
