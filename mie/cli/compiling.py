"""Implement ``mie doctor --compile``: compile kernels before a model needs them."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from mie.base.cache_dir import CacheError, open_cache
from mie.cli.options import print_error
from mie.cli.progress import bar
from mie.errors import ConfigError


def compile_for_cpu(model: str | None) -> tuple[int, int, bool]:
    """Compile the kernels of backend jit, for all data types or for the data types of a model.

    Return how many were compiled, how many had been before, and whether all are kept.
    """
    from mie.checkpoint.config import load_model_config
    from mie.checkpoint.locate import locate_model
    from mie.checkpoint.weights import Checkpoint, expected_tensors
    from mie.ops_jit.kernel_cache import CACHE_DTYPES, WEIGHT_DTYPES, Kernels, kernel_names

    names = kernel_names(WEIGHT_DTYPES, CACHE_DTYPES)
    if model is not None:
        directory = locate_model(model)
        config = load_model_config(directory)
        weights = Checkpoint.open(directory, expected_tensors(config), config.quantisation)
        names = kernel_names(weights.matrix_dtypes, {"float32"})
    kernels = Kernels()
    num_compiled = kernels.prepare(names, partial(bar, "compiling kernels", "kernel"))
    return num_compiled, len(names) - num_compiled, kernels.num_kept(names) == len(names)


def compile_for_gpu(model: str, folder: Path) -> tuple[int, int, bool]:
    """Compile the kernels of a model into a folder, by loading it on this machine's GPU."""
    from mie.frontend.llm import LLM

    num_before = len(list(folder.glob("*.cubin")))
    LLM(model, backend="cupy")
    return len(list(folder.glob("*.cubin"))) - num_before, num_before, True


def compile_ahead(args: argparse.Namespace) -> int:
    """Compile the kernels of backend jit, or of a model on a GPU, and return the exit code."""
    is_for_gpu = args.backend == "cupy"
    if is_for_gpu and args.model is None:
        raise ConfigError("--compile --backend cupy needs --model: its kernels follow the model")
    try:
        folder = open_cache("cubins" if is_for_gpu else "jit")
    except CacheError as error:
        print_error(f"compiled kernels cannot be kept: {error}")
        return 1
    found = compile_for_gpu(args.model, folder) if is_for_gpu else compile_for_cpu(args.model)
    num_compiled, num_present, is_kept = found
    text = f"compiled {num_compiled} kernels; {num_present} had been before; they are "
    text += f"kept in {folder}" if is_kept else f"not kept: {folder} cannot be written"
    report = {"num_compiled": num_compiled, "num_present": num_present, "is_kept": is_kept}
    print(json.dumps({**report, "folder": str(folder)}, indent=2) if args.json else text)
    return 0 if is_kept else 1
