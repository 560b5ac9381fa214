"""Test the limit on the threads of NumPy's BLAS, and the facts about it."""

import pytest
from command_line import python
from threadpoolctl import threadpool_info

from mie.ops.blas import Blas


def num_threads() -> set[int]:
    return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}


@pytest.mark.skipif(not Blas().is_controlled, reason="threadpoolctl does not support this BLAS")
def test_the_thread_count_is_restored_outside() -> None:
    with Blas().limit(2):
        assert num_threads() == {2}
        with Blas().limit(1):
            assert num_threads() == {1}  # one number for the process
        assert num_threads() == {2}


class _Libraries:
    """Stand in for threadpoolctl's controller of a process with these libraries."""

    def __init__(self, *libraries: dict[str, str]) -> None:
        self._libraries = libraries

    def select(self, **_: str) -> "_Libraries":
        return self

    def info(self) -> list[dict[str, str]]:
        return list(self._libraries)


@pytest.mark.parametrize(
    ("libraries", "core"),
    [
        ((), "unknown"),
        (({"filepath": "/lib/libblis.so"},), "unknown"),
        (
            (
                {"filepath": "/site/scipy.libs/libopenblas.so", "architecture": "Zen"},
                {"filepath": "/site/numpy.libs/libopenblas.so", "architecture": "SkylakeX"},
            ),
            "SkylakeX",
        ),
    ],
)
def test_the_kernels_are_those_of_the_library_of_numpy(libraries, core, monkeypatch) -> None:
    monkeypatch.setattr("threadpoolctl.ThreadpoolController", lambda: _Libraries(*libraries))
    assert Blas().core == core
    assert Blas().is_controlled == bool(libraries)


def test_the_blas_is_found_before_anything_else_has_loaded_it() -> None:
    code = "from mie.ops.blas import Blas; print(Blas().core)"
    assert python("-c", code).stdout == f"{Blas().core}\n"
