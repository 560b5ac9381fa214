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

from mie.errors import MieError

Facts = dict[str, Any]

TRIED_SHAPE = (2048, 2048)
"""The shape of a matrix in a middling model."""

# CUdevice_attribute, in cuda.h.
_INTEGRATED, _MAJOR, _MINOR = 18, 75, 76


def numpy_facts() -> Facts:
    """Return NumPy's version, and the BLAS it was built with."""
    import numpy as np

    config: Any = np.show_config(mode="dicts")  # type: ignore[call-overload, unused-ignore]
    blas = (config or {}).get("Build Dependencies", {}).get("blas", {})
    return {
        "version": np.__version__,
        "blas": str(blas.get("name", "unknown")),
        "blas_version": str(blas.get("version", "unknown")),
    }


def products_facts() -> Facts:
    """Return the kernels of NumPy's BLAS and the linear plan that the probe finds faster with them.

    The facts include the remembered shapes whose plan differs from the rest.
    """
    from mie.ops_cpu.cpu_backend import CpuBackend
    from mie.ops_cpu.linear.plan_answers import PLANS_CACHE
    from mie.system.cache_dir import CacheError, open_cache

    backend = CpuBackend()
    probe, cache = backend.find_probe(), {}
    with backend.blas.threads(1):
        plan = probe.choose(*TRIED_SHAPE)
    try:
        cache["cache"] = str(open_cache(PLANS_CACHE))
    except CacheError as error:
        cache["cache_problem"] = str(error)
    return {
        **cache,
        "odd_plans": [
            f"{each.shape} {each.plan} (tiled takes {each.ratio:.2f} x as long, {each.day})"
            for each in probe.answers.odd_ones()
        ],
        "plan": plan,
        "kernels": backend.blas.core,
        "is_controlled": backend.blas.is_controlled,
        "num_threads": backend.workers.num_threads,
    }


def driver_facts(load: Callable[[str], Any] = ctypes.CDLL) -> Facts:
    """Return the CUDA version of the NVIDIA driver and its GPUs, through libcuda."""
    try:
        cuda = load("libcuda.so.1")
    except OSError as error:
        return {"found": False, "error": _line(error)}
    facts: Facts = {"found": True, "gpus": []}
    version = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
        facts["cuda"] = _version(version.value)
    count = ctypes.c_int()
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if code:
        facts["error"] = _cuda_error(cuda, code)
    facts["gpus"] = [_driver_gpu(cuda, index) for index in range(count.value)]
    return facts


def _cuda_error(cuda: Any, code: int) -> str:
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(name))
    return (name.value or f"error {code}".encode()).decode()


def _driver_gpu(cuda: Any, index: int) -> Facts:
    device = ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGetName(name, len(name), device)
    size = ctypes.c_size_t()
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    return {
        "name": name.value.decode(errors="replace"),
        "capability": [attribute(_MAJOR), attribute(_MINOR)],
        "memory": size.value,
        "integrated": bool(attribute(_INTEGRATED)),
    }


def cupy_facts() -> Facts:
    """Return CuPy's version, the CUDA and the NVRTC it uses, and the GPUs it sees."""
    facts: Facts = {"packages": _cupy_packages(sys.path), "installed": True}
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            return {**facts, "installed": False}
        facts["error"] = _line(error)
    except Exception as error:
        # CuPy frames the error with advice for many systems.
        facts["error"] = _line(error).rpartition("Original error: ")[2].strip(" =")
    _add(facts, "numpy", _numpy_version)
    if "error" in facts:
        return facts
    facts["version"] = str(cupy.__version__)
    _add(facts, "cuda", lambda: _version(cupy.cuda.runtime.runtimeGetVersion()))
    _add(facts, "nvrtc", lambda: list(cupy.cuda.nvrtc.getVersion()))
    _add(facts, "cublas", lambda: _cublas_version(cupy))
    _add(facts, "gpus", lambda: _cupy_gpus(cupy.cuda))
    return facts


def _cublas_version(cupy: Any) -> list[int]:
    """Return the version of the cuBLAS that backend cupy multiplies with."""
    from mie.ops_gpu.cublas import load_library

    library, parts = load_library(cupy), []
    for property_type in (0, 1, 2):  # major, minor and patch level, in library_types.h
        value = ctypes.c_int()
        library.cublasGetProperty(property_type, ctypes.byref(value))
        parts.append(value.value)
    return parts


def _numpy_version() -> str:
    import numpy as np

    return str(np.__version__)


def _cupy_packages(folders: Sequence[str]) -> dict[str, str]:
    """Return the versions of the installed distributions of CuPy: {"cupy-cuda12x": "14.2.0"}."""
    found = {}
    for folder in folders:
        for path in Path(folder or ".").glob("cupy*.dist-info"):
            match = re.fullmatch(r"(cupy(?:_cuda\w+|_rocm\w+)?)-([^-]+)\.dist-info", path.name)
            if match:
                found[match[1].replace("_", "-")] = match[2]
    return found


def _cupy_gpus(cuda: Any) -> list[Facts]:
    gpus = []
    for index in range(cuda.runtime.getDeviceCount()):
        about = cuda.runtime.getDeviceProperties(index)
        with cuda.Device(index):
            free, _ = cuda.runtime.memGetInfo()
        gpus.append(
            {
                "name": about["name"].decode(errors="replace"),
                "capability": [about["major"], about["minor"]],
                "memory": about["totalGlobalMem"],
                "free": free,
                "integrated": bool(about.get("integrated", 0)),
            }
        )
    return gpus


def backend_facts(name: str) -> Facts:
    """Return whether the backend ``name`` computes a step of four operators correctly."""
    try:
        token_id = _small_step(name)
    except MieError as error:
        return {"works": False, "reason": _line(error)}
    except Exception as error:
        return {"works": False, "reason": f"{type(error).__name__}: {_line(error)}"}
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
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(filter(None, lines)) or type(error).__name__


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
