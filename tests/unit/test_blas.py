"""The number of threads of NumPy's BLAS, and what there is where it is another library."""

import pytest

from mie.ops_cpu.threads.blas import Blas

needs_openblas = pytest.mark.skipif(
    not Blas().is_controlled, reason="NumPy's BLAS here is no OpenBLAS"
)


@needs_openblas
def test_threads_are_set_inside_the_context_and_restored_after_it():
    blas = Blas()
    with blas.threads(2):
        assert blas.num_threads() == 2
        with blas.threads(1):
            assert Blas().num_threads() == 1  # one number for the process
        assert blas.num_threads() == 2


@needs_openblas
def test_blas_reports_its_core_and_version():
    blas = Blas()
    assert blas.version.startswith("OpenBLAS")
    assert blas.core in blas.version


def test_another_library_is_not_controlled():
    blas = Blas(library=object())
    assert not blas.is_controlled
    assert (blas.core, blas.version, blas.num_threads()) == ("unknown", "unknown", None)
    before = Blas().num_threads()
    with blas.threads(7):
        assert Blas().num_threads() == before
