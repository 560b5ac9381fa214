"""Compare rules for keeping snapshots of recurrent states, and the best choice in hindsight."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from bench.book.chapter import DEVICE, Result, Scale, percent, rows
from bench.book.foresight import most_saved, reuses
from mie.checkpoint.tensors import kv_bytes_per_token
from mie.config.engine import EngineConfig
from mie.lab.draws import Draws, LogNormal
from mie.lab.sim.costs import SECOND
from mie.lab.sim.devices import costs_on, find_device, find_shape, state_bytes
from mie.lab.sim.driver import run_load
from mie.lab.sim.simulated import simulated
from mie.lab.workload import Answer, Part, Text, Workload, WorkloadRequest
from mie.memory.layers.states import States
from mie.memory.prefix import Allocation, Node
from mie.memory.table import BlockTable, HostTable

TITLE = "Snapshots of recurrent states"
MODEL = "Qwen3.5-0.8B"
BLOCK_SIZE = 16
BUDGETS = (4, 8, 16, 64)
"""Numbers of snapshots that fit beside the state of the running sequence."""
MIDDLE = 16
"""The budget of the table of work."""


# Loads. Requests come one after another, so that every rule meets them in the same order.


class _Load:
    def __init__(self, seed: int) -> None:
        self.draws = Draws(seed)
        self._num_texts = 0
        self._rows: list[tuple[float, int, tuple[Part, ...], int]] = []

    def text(self, low: int, high: int | None = None) -> Text:
        """Return a new text, with a length that is drawn if there is a ``high``."""
        self._num_texts += 1
        return Text(self._num_texts, low if high is None else self.draws.integer(low, high))

    def ask(self, moment: float, prompt: tuple[Part, ...], low: int, high: int) -> Answer:
        """Add a request, and return its answer."""
        number = len(self._rows)
        self._rows.append((moment, number, prompt, self.draws.integer(low, high)))
        return Answer(str(number))

    def workload(self, name: str) -> Workload:
        requests, before = [], None
        for _, number, prompt, length in sorted(self._rows, key=lambda row: row[:2]):
            request = WorkloadRequest(
                request_id=str(number), prompt=prompt, max_tokens=length, after=before
            )
            requests.append(request)
            before = request.request_id
        return Workload(name=name, requests=tuple(requests))


def _chat() -> Workload:
    """Return conversations with one system prompt. The user edits every seventh turn or so."""
    load = _Load(1)
    system, lengths = load.text(256), LogNormal(60, 0.8, 8, 400)
    for _ in range(12):
        moment = 60 * load.draws.uniform()
        history: tuple[Part, ...] = (system,)
        for _ in range(load.draws.integer(3, 10)):
            is_edited = True
            while is_edited:
                prompt = (*history, load.text(lengths.draw(load.draws)))
                answer = load.ask(moment, prompt, 12, 60)
                moment += 5 + 20 * load.draws.uniform()
                is_edited = load.draws.uniform() < 0.15
            history = (*prompt, answer)
    return load.workload("chat")


def _agents() -> Workload:
    """Return tasks of an agent with tools, each in one to three attempts of several steps."""
    load = _Load(2)
    system = load.text(1500)
    for _ in range(7):
        task: tuple[Part, ...] = (system, load.text(80, 240))
        start = 60 * load.draws.uniform()
        for _ in range(load.draws.integer(1, 3)):
            moment, prompt = start + 60 * load.draws.uniform(), task
            for _ in range(load.draws.integer(3, 8)):
                answer = load.ask(moment, prompt, 8, 32)
                moment += 2 + 10 * load.draws.uniform()
                prompt = (*prompt, answer, load.text(40, 300))
    return load.workload("agents")


def _few_shot() -> Workload:
    """Return questions behind one of several lists of examples, some of them far more often."""
    load = _Load(3)
    system = load.text(64)
    texts = [load.text(500, 1500) for _ in range(16)]
    sums = list(accumulate(1 / k for k in range(1, len(texts) + 1)))
    for number in range(80):
        examples = texts[bisect_right(sums, load.draws.uniform() * sums[-1], hi=len(texts) - 1)]
        load.ask(number, (system, examples, load.text(16, 80)), 8, 16)
    return load.workload("few-shot")


def _documents() -> Workload:
    """Return one to six questions about each of several documents."""
    load = _Load(4)
    system = load.text(128)
    for number in range(16):
        document, moment = load.text(1500, 4000), 20.0 * number
        for _ in range(load.draws.integer(1, 6)):
            load.ask(moment, (system, document, load.text(16, 60)), 8, 32)
            moment += 5 + 240 * load.draws.uniform()
    return load.workload("documents")


LOADS: Mapping[str, Callable[[], Workload]] = MappingProxyType(
    {"chat": _chat, "agents": _agents, "few-shot": _few_shot, "documents": _documents}
)


# Rules. Each changes where snapshots stay, or which is evicted first.


class _Mie(States):
    """The rule of the engine. It notes the tokens that each request stores."""

    histories: list[list[int]]

    def close(self, table: BlockTable) -> None:
        self.histories.append(list(table.token_ids[: table.num_tokens]))
        super().close(table)


class _None(_Mie):
    def usable(self, path: list[Node], host: HostTable | None) -> list[Node]:
        return []

    def commit(self, table: BlockTable) -> None:
        self.states[table].stops = []

    def limit(self, table: BlockTable, count: int) -> int:
        return count


class _Tail(_Mie):
    """Keeps the ends of prompts and answers. The least recently used one is evicted."""

    def _places(self, allocation: Allocation) -> set[int]:
        return {(len(allocation.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE}

    def _value(self, node: Node) -> float:
        return 0


class _EveryBlock(_Tail):
    def _places(self, allocation: Allocation) -> set[int]:
        return {*range(BLOCK_SIZE, len(allocation.token_ids), BLOCK_SIZE)}

    def commit(self, table: BlockTable) -> None:
        super().commit(table)
        node, self.states[table].latest = self.states[table].latest, None
        if node is not None:
            self.snapshots[node].replaced_by = None


class _Branches(_Mie):
    """Keeps branch points and the ends of answers, as Marconi does.

    The snapshot that saves the fewest tokens is evicted first, older ones before newer ones.
    """

    def _places(self, allocation: Allocation) -> set[int]:
        return {self._num_known(allocation)}

    def _value(self, node: Node) -> float:
        has_one_child = len(node.children) == 1
        return super()._value(node) * (2 if has_one_child else 1)


class _NoDistance(_Mie):
    """The rule of the engine without snapshots at distances."""

    def _places(self, allocation: Allocation) -> set[int]:
        return {
            self._num_known(allocation),
            (len(allocation.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE,
        }


RULES: Mapping[str, type[_Mie]] = MappingProxyType(
    {
        "none": _None,
        "every block": _EveryBlock,
        "tail only": _Tail,
        "branch points": _Branches,
        "mie without distances": _NoDistance,
        "mie": _Mie,
    }
)


def run(scale: Scale) -> Result:
    """Run each load with each rule and budget."""
    budgets = BUDGETS if scale == "full" else (MIDDLE,)
    names = list(LOADS) if scale == "full" else ["documents"]
    model = find_shape(MODEL)
    return {
        "settings": {
            "device": DEVICE,
            "model": MODEL,
            "block_size": BLOCK_SIZE,
            "state_bytes": state_bytes(model),
            "kv_bytes_per_token": kv_bytes_per_token(model, find_device(DEVICE).itemsize),
        },
        "loads": {name: _compare(LOADS[name](), budgets) for name in names},
    }


def _compare(load: Workload, budgets: tuple[int, ...]) -> dict[str, Any]:
    rules: dict[str, list[dict[str, Any]]] = {
        name: [{"num_slots": budget, **_numbers(load, rule, budget)[0]} for budget in budgets]
        for name, rule in RULES.items()
    }
    _, histories, lengths = _numbers(load, _Mie, budgets[-1])
    saved = most_saved(reuses(histories, lengths, BLOCK_SIZE), len(lengths))
    return {
        "num_requests": len(lengths),
        "num_prompt_tokens": sum(lengths),
        "rules": rules,
        "best": [saved[min(budget, len(saved) - 1)] / sum(lengths) for budget in budgets],
        "best_of_all": saved[-1] / sum(lengths),
        "num_slots_of_best": len(saved) - 1,
    }


def _numbers(
    load: Workload, rule: type[_Mie], budget: int
) -> tuple[dict[str, Any], list[list[int]], list[int]]:
    """Return the numbers of a run, the tokens that each request stored, and prompt lengths."""
    config = EngineConfig(
        event_log_steps=0, max_num_seqs=1, block_size=BLOCK_SIZE, num_blocks=30_000
    )
    costs = costs_on(find_device(DEVICE), find_shape(MODEL))
    bench = simulated(costs, config, num_states=(budget + 1, 0))
    manager = bench.engine.scheduler.manager
    states: Any = manager.part(States)
    states.__class__ = rule  # so that the memory needs no code for other rules than its own
    states.histories = []
    result = run_load(bench, load)
    lengths = [record.num_prompt for record in result.records]
    numbers = {
        "hit_rate": result.num_cached_tokens / sum(lengths),
        "num_prefill_tokens": result.num_prefill_tokens,
        "num_snapshots": manager.stats.num_snapshots,
        "num_steps": result.num_steps,
        "duration_s": result.duration_ns / SECOND,
    }
    return numbers, states.histories, lengths


# The page.


def facts(result: Result) -> dict[str, str]:
    """Return the texts of the page."""
    settings, loads = result["settings"], result["loads"]
    slot = settings["state_bytes"]
    first = next(iter(loads.values()))["rules"]["mie"]
    at = min(range(len(first)), key=lambda index: abs(first[index]["num_slots"] - MIDDLE))
    work = {name: _sums(loads, name, at) for name in RULES}
    hits = [
        (load, str(row["num_slots"]), *_cells(values, index))
        for load, values in loads.items()
        for index, row in enumerate(values["rules"]["mie"])
    ]
    tokens = {name: sums["num_prefill_tokens"] for name, sums in work.items()}
    return {
        "device": settings["device"],
        "model": settings["model"],
        "state": f"{slot / 2**20:.0f} MiB",
        "state_tokens": f"{slot / settings['kv_bytes_per_token']:,.0f}",
        "num_requests": f"{sum(values['num_requests'] for values in loads.values()):,}",
        "num_loads": str(len(loads)),
        "middle": str(first[at]["num_slots"]),
        "middle_bytes": f"{first[at]['num_slots'] * slot / 2**20:,.0f} MiB",
        "less": _less(tokens["every block"], tokens["mie"]),
        "less_branches": _less(tokens["branch points"], tokens["mie"]),
        "copied": f"{work['every block']['num_snapshots'] * slot / 2**30:,.0f} → "
        f"{work['mie']['num_snapshots'] * slot / 2**30:,.0f} GiB",
        "reached": _reached(loads, "mie"),
        "reached_branches": _reached(loads, "branch points"),
        "gain": _largest_gain(loads, "branch points", "mie without distances"),
        "distance_gain": _largest_gain(loads, "mie without distances", "mie"),
        "distance_loss": _largest_gain(loads, "mie", "mie without distances", is_loss=True),
        "hits": rows(hits),
        "work": rows(
            (
                name,
                f"{sums['num_prefill_tokens']:,.0f}",
                f"{sums['num_snapshots']:,.0f}",
                f"{sums['num_snapshots'] * slot / 2**30:,.1f}",
                f"{sums['duration_s']:,.1f}",
            )
            for name, sums in work.items()
        ),
    }


def _cells(values: Mapping[str, Any], index: int) -> list[str]:
    rates = [values["rules"][name][index]["hit_rate"] for name in RULES]
    return [percent(rate) for rate in (*rates, values["best"][index])]


def _sums(loads: Mapping[str, Any], rule: str, index: int) -> dict[str, float]:
    found = [values["rules"][rule][index] for values in loads.values()]
    return {name: sum(each[name] for each in found) for name in found[0]}


def _less(more: float, less: float) -> str:
    return f"{more:,.0f} → {less:,.0f} (−{percent(1 - less / more)})"


def _reached(loads: Mapping[str, Any], rule: str) -> str:
    """Return which share of the best hit rate a rule reaches, over all loads and budgets."""
    shares = [
        row["hit_rate"] / best
        for values in loads.values()
        for row, best in zip(values["rules"][rule], values["best"], strict=True)
    ]
    return f"{percent(sum(shares) / len(shares))} ({percent(min(shares))} … {percent(max(shares))})"


def _largest_gain(loads: Mapping[str, Any], rule: str, other: str, *, is_loss: bool = False) -> str:
    """Return where the hit rate of another rule exceeds the hit rate of a rule most.

    A loss is told from the other rule's side.
    """
    better, worse, load, slots = max(
        (
            (after["hit_rate"], before["hit_rate"], name, before["num_slots"])
            for name, values in loads.items()
            for before, after in zip(values["rules"][rule], values["rules"][other], strict=True)
        ),
        key=lambda found: found[0] - found[1],
    )
    rates = (better, worse) if is_loss else (worse, better)
    start, end = map(percent, rates)
    return f"from {start} to {end} ({load}, {slots} snapshots)"
