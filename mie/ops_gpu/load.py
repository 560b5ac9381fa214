"""Make the backend of a GPU, or a backend that emulates it."""

import logging

from mie.errors import ConfigError
from mie.ops_gpu.chip import EMULATED_CHIP, current_chip
from mie.ops_gpu.cublas import Cublas
from mie.ops_gpu.cupy_backend import CupyBackend
from mie.ops_gpu.gathers import nccl_of
from mie.ops_gpu.gemm import NumpyGemm
from mie.ops_gpu.host.nccl import EmulatedNccl
from mie.ops_gpu.launcher import CupyLauncher, EmulatedLauncher, import_cupy
from mie.ops_gpu.queue import CupyQueue, EmulatedQueue


def load_cupy_backend(
    dtype: str = "auto",
    *,
    checkpoint_dtype: str = "float16",
    gpu_memory_utilization: float = 0.9,
    batch_invariant: bool = False,
    kv_cache_dtype: str = "auto",
    enforce_eager: bool = False,
    activations: str = "float32",
    rank: int = 0,
    num_ranks: int = 1,
) -> CupyBackend:
    """Return the backend of a GPU. Rank r of several has CuPy's device r.

    dtype "auto" is bfloat16 if the checkpoint is, and else float16. Values of a model trained in
    bfloat16 may not fit float16.
    """
    xp = import_cupy()
    has_ranks = num_ranks > 1 and xp.cuda.is_available()
    nccl = nccl_of(xp, rank, num_ranks) if has_ranks else None
    launcher = CupyLauncher()
    has_bfloat16 = int(xp.__version__.partition(".")[0]) >= 14
    chosen = dtype
    if dtype == "auto":
        chosen = "bfloat16" if checkpoint_dtype == "bfloat16" and has_bfloat16 else "float16"
        if chosen != checkpoint_dtype == "bfloat16":
            logging.getLogger(__name__).warning(
                "the model is bfloat16, which needs CuPy 14 or newer; this is %s, so it runs in "
                "float16, in which some models give NaN (or choose float32)",
                xp.__version__,
            )
    if chosen == "bfloat16" and not has_bfloat16:
        raise ConfigError(
            f"dtype bfloat16 needs CuPy 14 or newer; this is {xp.__version__} (pip install -U the "
            "CuPy that you have, or choose float16)"
        )
    queue = CupyQueue(xp)
    return CupyBackend(
        "cupy",
        launcher,
        Cublas(xp, queue.stream, launcher),
        chosen,
        current_chip(xp),
        queue=queue,
        enforce_eager=enforce_eager,
        is_deterministic=batch_invariant,
        memory_share=gpu_memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
        activations=activations,
        nccl=nccl,
    )


def load_emulated_backend(
    dtype: str = "auto",
    *,
    batch_invariant: bool = False,
    kv_cache_dtype: str = "auto",
    enforce_eager: bool = False,
    activations: str = "float32",
) -> CupyBackend:
    """Return a backend that emulates the kernels on a CPU. dtype "auto" is float32."""
    queue = EmulatedQueue()
    launcher = EmulatedLauncher(submit=queue.submit)
    chosen = "float32" if dtype == "auto" else dtype
    return CupyBackend(
        "cupy-emulated",
        launcher,
        NumpyGemm(queue.submit),
        chosen,
        EMULATED_CHIP,
        queue=queue,
        enforce_eager=enforce_eager,
        is_deterministic=batch_invariant,
        kv_cache_dtype=kv_cache_dtype,
        activations=activations,
        nccl=EmulatedNccl(queue.submit),
    )
