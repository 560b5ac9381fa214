"""Get facts from libraries that may be missing, broken or slow: ``python -m mie.doctor.ask TOPIC``.

It prints one JSON object. `Machine.ask` runs it as a separate process, so a driver that crashes or
hangs affects nothing else.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mie.doctor.machine import Facts
from mie.errors import MieError

TRIED_SHAPE = (2048, 2048)
"""The shape of a matrix in a middling model."""

_ATTRIBUTES = {"integrated": 18, "major": 75, "minor": 76}
"""The device attributes to ask for, as cuda.h numbers them in CUdevice_attribute."""


def numpy_facts() -> Facts:
    """Return NumPy's version, and the BLAS it was built with."""
    import numpy as np

    config: Any = np.show_config(mode="dicts")  # type: ignore[call-overload, unused-ignore]
    blas = (config or {}).get("Build Dependencies", {}).get("blas", {})
    names = {"blas": blas.get("name", "unknown"), "blas_version": blas.get("version", "unknown")}
    return {"version": np.__version__, **names}


def products_facts() -> Facts:
    """Return the kernels of NumPy's BLAS and the linear plan that the probe finds faster with them.

    The facts include the remembered shapes whose plan differs from the rest.
    """
    from mie.ops_cpu.cpu_backend import CpuBackend
    from mie.ops_cpu.linear.plan_answers import PLANS_CACHE
    from mie.ops_cpu.linear.probe import TOLERATED
    from mie.system.cache_dir import open_cache

    backend = CpuBackend()
    probe = backend.find_probe()
    with backend.blas.threads(1):
        plan, ratio = probe.plan(*TRIED_SHAPE)
        is_clear = (ratio <= TOLERATED) == (plan == "tiled")
        facts: Facts = {"plan": plan, "ratio": ratio, "is_clear": is_clear}
    facts |= {"kernels": backend.blas.core, "is_controlled": backend.blas.is_controlled}
    facts["num_threads"] = backend.workers.num_threads
    facts["odd_plans"] = [
        f"{each.shape} {each.plan} (tiled takes {each.ratio:.2f} x as long, {each.day})"
        for each in probe.answers.odd_ones()
    ]
    _add(facts, "cache", lambda: str(open_cache(PLANS_CACHE)))
    return facts


def driver_facts(load: Callable[[str], Any] = ctypes.CDLL) -> Facts:
    """Return the CUDA version of the NVIDIA driver and its GPUs, through libcuda."""
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        return {"found": False}
    facts: Facts = {}
    version, count, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_char_p()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
        facts["cuda"] = _version(version.value)
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if code:
        cuda.cuGetErrorName(code, ctypes.byref(name))
        facts["error"] = (name.value or f"error {code}".encode()).decode()
    return {**facts, "gpus": [_driver_gpu(cuda, index) for index in range(count.value)]}


def _driver_gpu(cuda: Any, index: int) -> Facts:
    device, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    values = {key: ctypes.c_int() for key in _ATTRIBUTES}
    for key, value in values.items():
        cuda.cuDeviceGetAttribute(ctypes.byref(value), _ATTRIBUTES[key], device)
    about = {key: value.value for key, value in values.items()}
    return {"name": name.value.decode(errors="replace"), "memory": size.value, **about}


def cupy_facts() -> Facts:
    """Return CuPy's version, the CUDA libraries it uses, and the free memory of each GPU."""
    facts: Facts = {"packages": _cupy_packages(sys.path)}
    _add(facts, "numpy", lambda: numpy_facts()["version"])
    try:
        import cupy
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return {**facts, "found": False}
        # CuPy frames the error with advice for many systems.
        return {**facts, "error": _line(error).rpartition("Original error: ")[2].strip(" =")}
    facts["version"] = str(cupy.__version__)
    _add(facts, "cuda", lambda: _version(cupy.cuda.runtime.runtimeGetVersion()))
    _add(facts, "nvrtc", lambda: list(cupy.cuda.nvrtc.getVersion()))
    _add(facts, "cublas", lambda: _cublas_version(cupy))
    devices, gpus = cupy.cuda.runtime.getDeviceCount, cupy.cuda.Device
    _add(facts, "free", lambda: [gpus(index).mem_info[0] for index in range(devices())])
    return facts


def _cublas_version(cupy: Any) -> list[int]:
    """Return the version of the cuBLAS that backend cupy multiplies with."""
    from mie.ops_gpu.cublas import load_library

    library, parts = load_library(cupy), [ctypes.c_int() for _ in range(3)]
    for property_type, part in enumerate(parts):  # major, minor and patch level: library_types.h
        library.cublasGetProperty(property_type, ctypes.byref(part))
    return [part.value for part in parts]


def _cupy_packages(folders: Sequence[str]) -> dict[str, str]:
    """Return the versions of the installed distributions of CuPy: {"cupy-cuda12x": "14.2.0"}."""
    paths = [path for folder in folders for path in Path(folder or ".").glob("cupy*.dist-info")]
    pattern = r"(cupy(?:_cuda\w+|_rocm\w+)?)-([^-]+)\.dist-info"
    found = [match for path in paths if (match := re.fullmatch(pattern, path.name))]
    return {match[1].replace("_", "-"): match[2] for match in found}


def backend_facts(name: str) -> Facts:
    """Return whether the backend ``name`` computes a step of four operators correctly."""
    try:
        token_id = _small_step(name)
    except Exception as error:
        kind = "" if isinstance(error, MieError) else f"{type(error).__name__}: "
        return {"works": False, "reason": f"{kind}{_line(error)}"}
    if token_id != 37:
        return {"works": False, "reason": f"it computed token {token_id}, expected 37"}
    return {"works": True}


def _small_step(name: str) -> int:
    """Run a hidden state of eight ones through a head whose row 37 is the largest, giving 37."""
    import numpy as np

    from mie.load.backends import load_backend
    from mie.ops.sampling import RowControls

    backend = load_backend(name)
    head = np.zeros((64, 8), np.float32)
    head[37] = 1
    hidden = backend.silu_mul(backend.load_vector(np.ones((1, 16), np.float32)))
    hidden = backend.rms_norm(hidden, backend.load_vector(np.ones(8, np.float32)), 1e-5)
    logits = backend.linear(hidden, backend.load_linear((64, 8), [head]))
    [token_id] = backend.sample(logits, [RowControls()])
    return token_id


def _add(facts: Facts, name: str, find: Callable[[], Any]) -> None:
    """Set ``facts[name]``, or ``facts[name + "_error"]`` if it cannot be found."""
    try:
        facts[name] = find()
    except Exception as error:
        facts[f"{name}_error"] = _line(error)


def _version(number: int) -> list[int]:
    """Convert CUDA's number for a version, such as 12060, to [12, 6]."""
    return [number // 1000, number % 1000 // 10]


def _line(error: BaseException) -> str:
    """Return the message in one line."""
    return " ".join(str(error).split()) or type(error).__name__


TOPICS: Mapping[str, Callable[..., Facts]] = {
    "numpy": numpy_facts,
    "products": products_facts,
    "driver": driver_facts,
    "cupy": cupy_facts,
    "backend": backend_facts,
}


def main(arguments: Sequence[str]) -> None:
    """Print the facts of one topic, apart from what libraries write to standard output."""
    output = os.dup(1)
    os.dup2(2, 1)
    facts = TOPICS[arguments[0]](*arguments[1:])
    os.write(output, json.dumps(facts).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
