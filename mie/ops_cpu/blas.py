"""Read and set the number of threads of NumPy's BLAS."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The library of NumPy's wheels (2.0 and later, then earlier), and then a system library.
_NAMES = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")
WITH_SMALL_PRODUCTS = ("SkylakeX", "Cooperlake", "SapphireRapids")
"""The CPU types for which OpenBLAS has small-matrix kernels, all with AVX-512."""
_EXTENSIONS = ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath")


class Blas:
    """Controls NumPy's BLAS through its own functions, if it is OpenBLAS.

    The number of threads is one for the whole process, so other users of NumPy in it see it too.
    """

    def __init__(self, library: Any = None) -> None:
        """Look up the functions in ``library``, which is NumPy's own by default."""
        self._library = _numpy_library() if library is None else library
        self._get_num_threads = self._function("get_num_threads")
        self._set_num_threads = self._function("set_num_threads")
        self.is_controlled = None not in (self._get_num_threads, self._set_num_threads)
        """Whether `num_threads` can be read and set."""
        self.core = self._text("get_corename")
        """The CPU type whose kernels it uses, such as "SkylakeX"."""
        self.has_small_products = self.core in WITH_SMALL_PRODUCTS
        """Whether it multiplies small matrices without copying them first."""

    def num_threads(self) -> int | None:
        """The number of threads that a call may use, or None if it is unknown."""
        return None if self._get_num_threads is None else int(self._get_num_threads())

    @contextmanager
    def threads(self, number: int) -> Iterator[None]:
        """Use ``number`` threads for each call inside the context, and restore it afterwards."""
        if self._get_num_threads is None or self._set_num_threads is None:
            yield
            return
        before = self._get_num_threads()
        self._set_num_threads(number)
        try:
            yield
        finally:
            self._set_num_threads(before)

    def _function(self, name: str) -> Any:
        """Return a function of the library, or None."""
        found = (getattr(self._library, pattern.format(name), None) for pattern in _NAMES)
        return next(filter(None, found), None)

    def _text(self, name: str) -> str:
        function = self._function(name)
        if function is None:
            return "unknown"
        function.restype = ctypes.c_char_p
        return (function() or b"unknown").decode(errors="replace")


def _numpy_library() -> ctypes.CDLL:
    """Load NumPy's products. A symbol is searched for in it and in the libraries it links."""
    extension = next(sys.modules[each] for each in _EXTENSIONS if each in sys.modules)
    return ctypes.CDLL(extension.__file__)
