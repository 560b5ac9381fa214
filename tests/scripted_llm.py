"""Load an `LLM` with a scripted model, so that a step costs next to nothing."""

from typing import Any

from audit import replace_runner
from scripted_runner import ScriptedRunner, expected_tokens

from mie import LLM, SamplingParams

NUM_BLOCKS, BLOCK_SIZE, LIMIT = 14, 4, 40
BLOCK_BYTES = BLOCK_SIZE * 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head_dim, float32
SETTINGS = [
    {"async_scheduling": False},
    {"async_scheduling": True},
    {"async_scheduling": False, "enable_prefix_caching": False},
    {"async_scheduling": False, "preemption_mode": "swap", "swap_space": 6 * BLOCK_BYTES},
]


def new_llm(directory: Any, settings: dict[str, Any]) -> LLM:
    """Load a tiny model, and replace it with the script."""
    llm = LLM(
        directory,
        skip_tokenizer_init=True,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_model_len=LIMIT,
        num_threads=1,
        **settings,
    )
    engine = llm.engine
    num_host = engine.scheduler.manager.num_host_blocks
    script = ScriptedRunner(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_host_blocks=num_host,
        live_rows=lambda: [seq.table.row for seq in engine.scheduler.running],
        vocab_size=40,
    )
    replace_runner(engine, script)
    return llm


def expected(prompt: list[int], params: SamplingParams, choice: int = 0) -> list[int]:
    """Return the tokens of one choice."""
    return expected_tokens(prompt, params, choice=choice, limit=LIMIT, vocab_size=40)[0]
