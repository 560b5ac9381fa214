"""State the types of the public API for type checkers and editors. mypy reads this, no test
runs it.

mypy warns of an unnecessary ``ignore``, so each ``ignore`` here is a mistake that it must notice.
"""

from mie import LLM, AsyncEngineArgs, EngineArgs


def right() -> LLM:
    LLM()
    LLM("bundled", max_num_seqs=8, tensor_parallel_size=1, hf_overrides={"rope_theta": 1e6})
    LLM(model="bundled", backend="cupy", gpu_memory_utilization=0.5)
    return LLM.from_engine_args(AsyncEngineArgs("bundled", load_format="dummy"))


def wrong() -> None:
    LLM("bundled", max_num_seqs="8")  # type: ignore[arg-type]
    LLM("bundled", max_num_sequences=8)  # type: ignore[call-arg]
    LLM("bundled", None)  # type: ignore[call-arg]
    EngineArgs("bundled", block_size=1.5)  # type: ignore[arg-type]
    EngineArgs("bundled", max_num_sequences=8)  # type: ignore[call-arg]
    EngineArgs("bundled").max_num_sequences  # type: ignore[attr-defined]  # noqa: B018
