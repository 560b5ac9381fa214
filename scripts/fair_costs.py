"""Simulate what fair shares cost and gain, and print the table of docs/scheduling.md.

    python scripts/fair_costs.py

A flood sends 64 requests of 256 prompt tokens and 900 new ones at once. Beside it, another client
sends one request of 64 prompt tokens and 4 new ones after another, with a pause of 2 s. The
scheduler and the memory are the real ones. A step costs what `mie.sim.book.published` says.
"""

from __future__ import annotations

from typing import Any

from mie.config.engine import EngineConfig
from mie.params.sampling import SamplingParams
from mie.sim.book.published import COSTS
from mie.sim.simulated import simulated

NUM_SEATS = 16
NEVER = 1 << 40
POLICIES: dict[str, dict[str, Any]] = {
    "`fcfs`": {"scheduling_policy": "fcfs"},
    "`fair`, turns that never end": {"scheduling_policy": "fair", "fair_turn": NEVER},
    "`fair`, `fair_turn=64`": {"scheduling_policy": "fair", "fair_turn": 64},
    "`fair`": {"scheduling_policy": "fair"},
    "`fair`, `fair_turn=1`": {"scheduling_policy": "fair", "fair_turn": 1},
}


def measure(*, num_blocks: int, is_caching: bool, **settings: Any) -> dict[str, Any]:
    """Run the flood and the other client's requests. Return the figures of a row."""
    config = EngineConfig(
        max_num_seqs=NUM_SEATS,
        num_blocks=num_blocks,
        enable_prefix_caching=is_caching,
        event_log_steps=0,
        **settings,
    )
    bench = simulated(COSTS, config)
    engine, clock = bench.engine, bench.clock
    is_fair = config.scheduling_policy == "fair"

    def add(first_id: int, num_prompt: int, max_tokens: int, client: str) -> str:
        prompt = range(first_id, first_id + num_prompt)
        params = SamplingParams(max_tokens=max_tokens)
        return engine.add_request(prompt, params, client=client if is_fair else None)

    flood = [add(1000 * i, 256, 900, "flood") for i in range(64)]
    requests = [engine.request(name) for name in flood]
    waits, pause_end, only = [], 0.0, None
    while engine.has_work:
        if only is None and clock.now_ns() / 1e9 >= pause_end and engine.request(flood[-1]):
            only = engine.request(add(100_000 + 100 * len(waits), 64, 4, "other"))
        engine.step()
        if only is not None and only.is_finished:
            metrics = only.metrics
            assert metrics.first_token_time is not None
            waits.append(metrics.first_token_time - metrics.arrival_time)
            pause_end, only = clock.now_ns() / 1e9 + 2, None
    last = max(each.metrics.last_token_time or 0.0 for each in requests if each)
    return {
        "waits": waits,
        "flood": 64 * 900 / last,
        "preemptions": sum(each.metrics.num_preemptions for each in requests if each),
        "recomputed": sum(each.metrics.num_recomputed_tokens for each in requests if each),
    }


def main() -> None:
    print(
        "| policy | requests of the other client | mean TTFT | longest TTFT | flood, tokens/s |",
        end="",
    )
    print(" preemptions | recomputed, with cache | without |")
    print("|---|---|---|---|---|---|---|---|")
    for name, settings in POLICIES.items():
        row = measure(num_blocks=2000, is_caching=True, **settings)
        without = measure(num_blocks=2000, is_caching=False, **settings)
        waits = row["waits"]
        print(
            f"| {name} | {len(waits)} | {sum(waits) / len(waits):.2f} s | {max(waits):.2f} s"
            f" | {row['flood']:.0f} | {row['preemptions']} | {row['recomputed']}"
            f" | {without['recomputed']} |"
        )


if __name__ == "__main__":
    main()
