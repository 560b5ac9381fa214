"""Measure this machine's best memory bandwidth and sgemm rate with NumPy. Prints JSON.

    python -m bench.limits THREADS      in scripts/

    bandwidth   bytes read per second. Each thread reads its own array, too large for any cache. The
                better of a maximum and a dot product counts.
    sgemm       floating-point operations per second. Each thread multiplies its own float32
                matrices. The best of a few sizes counts. The FMA units could do a little more.

Run it with OPENBLAS_NUM_THREADS=1, because it starts its own threads.
"""

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

READ_BYTES = 512 << 20
"""Bytes that each thread reads."""
SIZES = (512, 1024, 2048)
FLOPS = 2 * 2048**3
"""Operations of each thread at every size."""
NUM_TRIES = 5


def best_rate(amount: float, work: Callable[[Any], object], inputs: list[Any]) -> float:
    """Return ``amount`` per second at the best of a few tries, with a thread for each input."""
    best = 0.0
    with ThreadPoolExecutor(len(inputs)) as pool:
        list(pool.map(work, inputs))  # threads started, pages touched
        for _ in range(NUM_TRIES):
            start = time.perf_counter()
            list(pool.map(work, inputs))
            best = max(best, amount / (time.perf_counter() - start))
    return best


def sgemm(size: int, num_threads: int) -> float:
    """Return the floating-point operations per second of matrix products of a size."""

    def multiply(each: Any) -> None:
        for _ in range(FLOPS // (2 * size**3)):
            np.matmul(each[0], each[1], out=each[2])

    matrices = [np.full((3, size, size), 1.5, np.float32) for _ in range(num_threads)]
    return best_rate(num_threads * FLOPS, multiply, matrices)


if __name__ == "__main__":
    count = int(sys.argv[1])
    arrays = [np.ones(READ_BYTES // 4, np.float32) for _ in range(count)]
    readers: tuple[Callable[[Any], object], ...] = (np.max, lambda array: np.dot(array, array))
    bandwidth = max(best_rate(count * READ_BYTES, reader, arrays) for reader in readers)
    print(json.dumps({"bandwidth": bandwidth, "sgemm": max(sgemm(s, count) for s in SIZES)}))
