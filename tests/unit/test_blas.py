"""Test the number of threads of NumPy's BLAS, and the behaviour with other libraries."""

import pytest

from mie.ops_cpu.blas import Blas

needs_openblas = pytest.mark.skipif(
    not Blas().is_controlled, reason="NumPy's BLAS here is no OpenBLAS"
)


@needs_openblas
def test_the_thread_count_is_restored_outside():
    blas = Blas()
    with blas.threads(2):
        assert blas.num_threads() == 2
        with blas.threads(1):
            assert Blas().num_threads() == 1  # one number for the process
        assert blas.num_threads() == 2


def test_another_library_is_not_controlled():
    blas = Blas(library=object())
    assert not blas.is_controlled
    assert (blas.core, blas.has_small_products, blas.num_threads()) == ("unknown", False, None)
    before = Blas().num_threads()
    with blas.threads(7):
        assert Blas().num_threads() == before
