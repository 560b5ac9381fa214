"""Measure what drafts gain, by the share of right ones and by the number of running requests."""

from typing import Any

from bench.book.chapter import DEVICE, MODEL, Result, Scale, device_costs, rows
from mie.config.engine import EngineConfig
from mie.lab.draws import Fixed
from mie.lab.loads import independent
from mie.lab.metrics import summarize
from mie.lab.sim.driver import run_load
from mie.lab.sim.simulated import simulated

TITLE = "Drafts"
SHARES = (0, 30, 60, 80, 90)
SEATS = (1, 8, 64)
DRAFTS = {"method": "ngram", "num_speculative_tokens": 7}


def run(scale: Scale) -> Result:
    """Run loads with drafts and without, for shares of right drafts and numbers of requests."""
    load = {"input_len": 100, "output_len": 200 if scale == "full" else 40}
    shares = SHARES if scale == "full" else SHARES[::2]
    plain = {seats: _throughput(load, seats, None, 0) for seats in SEATS}
    return {
        "settings": {"device": DEVICE, "model": MODEL, **load, **DRAFTS},
        "without": [{"seats": seats, "output_throughput": plain[seats]} for seats in SEATS],
        "shares": [
            {
                "right_percent": share,
                "gains": [_throughput(load, n, DRAFTS, share) / plain[n] for n in SEATS],
            }
            for share in shares
        ],
    }


def _throughput(
    load: dict[str, int], seats: int, drafts: dict[str, Any] | None, right_percent: int
) -> float:
    config = EngineConfig(
        event_log_steps=0, num_blocks=4000, max_num_seqs=seats, speculative_config=drafts
    )
    bench = simulated(device_costs(), config, right_percent=right_percent)
    lengths: dict[str, Any] = {name: Fixed(length) for name, length in load.items()}
    result = run_load(bench, independent(num_requests=2 * seats, seed=1, **lengths))
    summary = summarize(result.records, result.duration_ns, metrics=())
    return float(summary["output_throughput"] or 0)


def facts(result: Result) -> dict[str, str]:
    """Return the texts of the page."""
    settings, shares = result["settings"], result["shares"]
    by_share = {each["right_percent"]: each["gains"] for each in shares}
    middle = min(by_share, key=lambda share: abs(share - 60))
    alone, some, many = (f"{gain:.2f} ×" for gain in by_share[middle])
    return {
        "device": settings["device"],
        "model": settings["model"],
        "most": str(settings["num_speculative_tokens"]),
        "share": str(middle),
        "alone": alone,
        "some": some,
        "many": many,
        "wrong": " and ".join(f"{gain:.2f}" for gain in (min(by_share[0]), max(by_share[0]))),
        "shares": rows(
            (f"{share} %", *(f"{gain:.2f}" for gain in gains)) for share, gains in by_share.items()
        ),
    }
