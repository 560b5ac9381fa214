"""Describe the NVIDIA driver, its GPUs, CuPy, and the CUDA libraries that CuPy uses.

The driver is asked through libcuda, so that its facts need no CuPy. Only the standard library is
imported, so that `mie doctor` can always ask.
"""

import ctypes
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_ATTRIBUTES = {"integrated": 18, "major": 75, "minor": 76}
"""The device attributes to query, as cuda.h numbers them in CUdevice_attribute."""


OLDEST_CAPABILITY = (8, 0)
"""Compute capability of the oldest GPU: cp.async and bfloat16 products need Ampere."""


def remedy_for(capability: tuple[int, ...]) -> str | None:
    """Return why a GPU of this compute capability is refused and the remedy, or None if it runs."""
    if capability >= OLDEST_CAPABILITY:
        return None
    oldest = ".".join(map(str, OLDEST_CAPABILITY))
    return f"the kernels need {oldest} (Ampere) or later; use backend numpy"


def driver_facts() -> dict[str, Any]:
    """Return the CUDA version of the NVIDIA driver, such as "12.6", and its GPUs.

    The facts are "found", "cuda", "error" and "gpus". Without a driver, only "found" is there. Each
    GPU has "name", "capability", "memory" in bytes, and "integrated" (true if the memory is the
    host's).
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"found": False}
    facts: dict[str, Any] = {"found": True}
    version, count, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_char_p()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:  # a stub library has no version
        facts["cuda"] = _version(version.value)
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if code:
        cuda.cuGetErrorName(code, ctypes.byref(name))
        facts["error"] = (name.value or f"error {code}".encode()).decode()
    return {**facts, "gpus": [_gpu(cuda, index) for index in range(count.value)]}


def _gpu(cuda: Any, index: int) -> dict[str, Any]:
    device, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    values = {key: ctypes.c_int() for key in _ATTRIBUTES}
    for key, value in values.items():
        cuda.cuDeviceGetAttribute(ctypes.byref(value), _ATTRIBUTES[key], device)
    return {
        "name": name.value.decode(errors="replace"),
        "memory": size.value,
        "capability": f"{values['major'].value}.{values['minor'].value}",
        "integrated": bool(values["integrated"].value),
    }


def _version(number: int) -> str:
    """Convert CUDA's number for a version, such as 12060, to "12.6"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def cupy_facts() -> dict[str, Any]:
    """Return the installed packages of CuPy, and the facts about its libraries.

    The facts are "packages", its installed distributions and their versions, and then "found" false
    if there is no CuPy, or the "error" with which it cannot be imported, or its "version" and the
    `library_facts`.
    """
    facts: dict[str, Any] = {"packages": _cupy_packages(sys.path)}
    try:
        import cupy
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return {**facts, "found": False}
        # CuPy frames the error with advice for many systems.
        return {**facts, "error": one_line(error).rpartition("Original error: ")[2].strip(" =")}
    return {**facts, "version": str(cupy.__version__), **library_facts(cupy)}


def _cupy_packages(folders: Sequence[str]) -> dict[str, str]:
    """Return the versions of the installed distributions of CuPy: {"cupy-cuda12x": "14.2.0"}."""
    paths = [path for folder in folders for path in Path(folder or ".").glob("cupy*.dist-info")]
    pattern = r"(cupy(?:_cuda\w+|_rocm\w+)?)-([^-]+)\.dist-info"
    found = [match for path in paths if (match := re.fullmatch(pattern, path.name))]
    return {match[1].replace("_", "-"): match[2] for match in found}


def _cublas_version(cupy: Any) -> str:
    from mie.ops_gpu.cublas import library_version  # imports NumPy, which the driver does not need

    return library_version(cupy)


def _free_bytes(cupy: Any) -> list[int]:
    gpus = range(cupy.cuda.runtime.getDeviceCount())
    return [cupy.cuda.Device(index).mem_info[0] for index in gpus]


_LIBRARY_FACTS: Mapping[str, Callable[[Any], Any]] = {
    "cuda": lambda cupy: _version(cupy.cuda.runtime.runtimeGetVersion()),
    "nvrtc": lambda cupy: "{}.{}".format(*cupy.cuda.nvrtc.getVersion()),
    "cublas": _cublas_version,
    "free": _free_bytes,
}
"""Functions of the module ``cupy``. Each raises if its library is missing or too new."""


def library_facts(cupy: Any) -> dict[str, Any]:
    """Return the versions of CUDA, NVRTC and cuBLAS that CuPy uses, and the GPUs' free bytes.

    The facts are "cuda", "nvrtc", "cublas" and "free". A fact that CuPy cannot tell is missing, and
    its "nvrtc_error", for example, says why.
    """
    facts = {}
    for name, find in _LIBRARY_FACTS.items():
        try:
            facts[name] = find(cupy)
        except Exception as error:  # the error is the answer
            facts[f"{name}_error"] = one_line(error)
    return facts


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
