"""Generate workloads from seeds, the same on every machine."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from mie.config.engine import check_integer, check_real
from mie.lab.draws import Draws, Fixed, Lengths, LogNormal, Uniform, exp, ln
from mie.lab.sim.costs import MILLISECOND, SECOND
from mie.lab.workload import Answer, Part, Text, Workload, WorkloadRequest

SHARED_TEXT = 0
"""The text that all requests begin with. The other texts have their own numbers."""


def arrivals(
    draws: Draws, count: int, request_rate: float | None, burstiness: float = 1.0
) -> Iterator[int]:
    """Return the moments, in nanoseconds, at which ``count`` requests arrive.

    Without a rate they arrive all at once. The gaps are gamma-distributed, as in vLLM. A burstiness
    of 1 is a Poisson process, less is burstier, and more is more regular.
    """
    if request_rate is not None:
        check_real("request_rate", request_rate, 0, above_low=True)
    check_real("burstiness", burstiness, 0, above_low=True)
    moment = 0
    for _ in range(count):
        if request_rate is not None:
            moment += int(draws.gamma(burstiness) * SECOND / (request_rate * burstiness))
        yield moment


def _described(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of a generator, for the reader of the file.

    They must not be captured by a comprehension, because Python 3.10 lists such names last.
    """
    return {
        name: repr(value) if isinstance(value, Lengths) else value
        for name, value in arguments.items()
    }


def _numbered(
    rows: Iterable[tuple[tuple[Part, ...], int, int]], n: int = 1
) -> tuple[WorkloadRequest, ...]:
    """Return a request for each prompt, answer length and arrival, with its number as its id."""
    return tuple(
        WorkloadRequest(
            request_id=str(number), prompt=prompt, max_tokens=length, arrival_ns=moment, n=n
        )
        for number, (prompt, length, moment) in enumerate(rows)
    )


def from_lengths(
    lengths: Iterable[tuple[int, int]], moments: Iterable[int] | None = None, *, name: str = "load"
) -> Workload:
    """Return a request for each (prompt, answer) length. The texts share nothing.

    They arrive all at once unless there are ``moments``.
    """
    pairs = list(lengths)
    times = [0] * len(pairs) if moments is None else list(moments)
    rows = enumerate(zip(pairs, times, strict=True), start=1)
    requests = _numbered(
        ((Text(at, prompt),), answer, time) for at, ((prompt, answer), time) in rows
    )
    return Workload(name=name, requests=requests)


def independent(
    *,
    num_requests: int = 100,
    input_len: Lengths = Fixed(128),
    output_len: Lengths = Fixed(64),
    prefix_len: int = 0,
    n: int = 1,
    request_rate: float | None = None,
    burstiness: float = 1.0,
    seed: int = 0,
    name: str = "independent",
) -> Workload:
    """Return independent requests that share only their first ``prefix_len`` tokens."""
    settings = _described(locals())
    check_integer("num_requests", num_requests, 1)
    draws = Draws(seed)
    times = enumerate(arrivals(draws, num_requests, request_rate, burstiness), start=1)
    requests = _numbered(
        (
            ((*_shared(prefix_len), Text(at, input_len.draw(draws))), output_len.draw(draws), time)
            for at, time in times
        ),
        n,
    )
    return Workload(name=name, requests=requests, settings=settings)


def _shared(length: int) -> tuple[Part, ...]:
    return (Text(SHARED_TEXT, length),) if length else ()


def skewed_prefixes(
    *,
    num_requests: int = 1000,
    num_prefixes: int = 100,
    exponent: float = 1.0,
    prefix_len: int = 512,
    input_len: Lengths = Uniform(16, 64),
    output_len: Lengths = Uniform(8, 24),
    request_rate: float | None = 10.0,
    seed: int = 0,
) -> Workload:
    """Return requests that begin with one of several texts, some of them far more often.

    The popularity of prefix number k is 1 / k to the ``exponent`` (Zipf's law).
    """
    settings = _described(locals())
    check_integer("num_prefixes", num_prefixes, 1)
    draws = Draws(seed)
    sums = list(accumulate(exp(-exponent * ln(k)) for k in range(1, num_prefixes + 1)))
    requests = []
    for number, moment in enumerate(arrivals(draws, num_requests, request_rate)):
        prefix = bisect_right(sums, draws.uniform() * sums[-1], hi=num_prefixes - 1)
        own = Text(1 + num_prefixes + number, input_len.draw(draws))
        requests.append(((Text(1 + prefix, prefix_len), own), output_len.draw(draws), moment))
    return Workload(name="skewed-prefixes", requests=_numbered(requests), settings=settings)


def chats(
    *,
    num_chats: int = 16,
    num_turns: Lengths = Uniform(2, 6),
    system_len: int = 256,
    input_len: Lengths = LogNormal(40, 0.8, 4, 512),
    output_len: Lengths = LogNormal(120, 0.7, 8, 512),
    think_ms: Lengths = LogNormal(8_000, 0.6, 500, 60_000),
    request_rate: float | None = 1.0,
    seed: int = 0,
) -> Workload:
    """Return conversations. Each turn quotes everything before it.

    A turn comes when the user has read and thought. ``request_rate`` counts new conversations.
    """
    settings = _described(locals())
    draws, requests, text = Draws(seed), [], 0
    for chat, moment in enumerate(arrivals(draws, num_chats, request_rate)):
        prompt, after = _shared(system_len), None
        for turn in range(num_turns.draw(draws)):
            text += 1
            prompt = (*prompt, Text(text, input_len.draw(draws)))
            request_id = f"{chat}.{turn}"
            requests.append(
                WorkloadRequest(
                    request_id=request_id,
                    prompt=prompt,
                    max_tokens=output_len.draw(draws),
                    arrival_ns=think_ms.draw(draws) * MILLISECOND if after else moment,
                    after=after,
                )
            )
            prompt, after = (*prompt, Answer(request_id)), request_id
    return Workload(name="chats", requests=tuple(requests), settings=settings)


def interference(
    *,
    num_running: int = 16,
    input_len: Lengths = Fixed(64),
    output_len: Lengths = Fixed(256),
    num_long: int = 4,
    long_len: int = 4096,
    long_output_len: int = 16,
    first_ms: int = 500,
    every_ms: int = 1000,
    seed: int = 0,
) -> Workload:
    """Return answers that are being generated while long prompts arrive, one every ``every_ms``.

    This shows how the long prompts delay the next token. Long requests have ids that begin with
    "long".
    """
    settings = _described(locals())
    draws, requests = Draws(seed), []
    for number in range(num_running):
        request = WorkloadRequest(
            request_id=str(number),
            prompt=(Text(1 + number, input_len.draw(draws)),),
            max_tokens=output_len.draw(draws),
        )
        requests.append(request)
    for number in range(num_long):
        request = WorkloadRequest(
            request_id=f"long{number}",
            prompt=(Text(1 + num_running + number, long_len),),
            max_tokens=long_output_len,
            arrival_ns=(first_ms + number * every_ms) * MILLISECOND,
        )
        requests.append(request)
    return Workload(name="interference", requests=tuple(requests), settings=settings)


def agents(
    *,
    num_agents: int = 8,
    branches: int = 4,
    depth: int = 2,
    system_len: int = 512,
    task_len: Lengths = Uniform(64, 256),
    thought_len: Lengths = LogNormal(80, 0.5, 16, 256),
    result_len: Lengths = LogNormal(100, 0.8, 8, 512),
    tool_ms: Lengths = Uniform(50, 500),
    request_rate: float | None = 1.0,
    seed: int = 0,
) -> Workload:
    """Return tree searches by agents that fork and share prefixes.

    An agent requests ``branches`` thoughts at once. After a tool has run, it requests as many from
    each of them, ``depth`` levels in all, with one answer at each leaf. All share the system
    prompt, and a branch shares everything that led to it.
    """
    settings = _described(locals())
    draws, requests, text = Draws(seed), [], 0
    for agent, moment in enumerate(arrivals(draws, num_agents, request_rate)):
        text += 1
        root: tuple[Part, ...] = (*_shared(system_len), Text(text, task_len.draw(draws)))
        level: list[tuple[str, tuple[Part, ...], str | None]] = [(str(agent), root, None)]
        for depth_left in range(depth, -1, -1):
            next_level: list[tuple[str, tuple[Part, ...], str | None]] = []
            for request_id, prompt, after in level:
                n = branches if depth_left else 1
                requests.append(
                    WorkloadRequest(
                        request_id=request_id,
                        prompt=prompt,
                        max_tokens=thought_len.draw(draws),
                        arrival_ns=tool_ms.draw(draws) * MILLISECOND if after else moment,
                        after=after,
                        n=n,
                    )
                )
                for choice in range(n):
                    text += 1
                    result = Text(text, result_len.draw(draws))
                    path = (*prompt, Answer(request_id, choice), result)
                    next_level.append((f"{request_id}.{choice}", path, request_id))
            level = next_level
    return Workload(name="agents", requests=tuple(requests), settings=settings)


_VARIED: Mapping[str, Any] = {
    "input_len": LogNormal(128, 0.8, 4, 1024),
    "output_len": LogNormal(96, 0.6, 4, 512),
    "request_rate": 4.0,
}

PRESETS: Mapping[str, Callable[..., Workload]] = MappingProxyType(
    {
        "burst": partial(independent, name="burst"),
        "poisson": partial(independent, name="poisson", **_VARIED),
        "bursty": partial(independent, name="bursty", burstiness=0.25, **_VARIED),
        "shared-prefix": partial(
            independent,
            num_requests=128,
            prefix_len=512,
            input_len=Uniform(16, 64),
            request_rate=8.0,
            name="shared-prefix",
        ),
        "chats": chats,
        "interference": partial(interference, input_len=Uniform(32, 128)),
        "agents": agents,
    }
)
"""One workload of each kind, by name. The argument is ``seed``."""
