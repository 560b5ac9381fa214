"""Write the tables of the documentation from declarations, data and the ledgers.

    python scripts/doc_tables.py

* A table of settings is between ``<!-- settings: SECTION -->`` and ``<!-- end of settings -->``.
  SECTION is one of `mie.config.settings.Setting`.
* docs/fields.md has the fields of requests without an effect, of mie/serve/fields.yaml, between
  ``<!-- fields -->`` and ``<!-- end of fields -->``.
* docs/gpu/predictions.md compares predicted with published times, of docs/gpu/published.json.
* docs/vllm.md says which names of vLLM's offline API run in mie, and why the others do not. The
  names come from docs/vllm.json (vllm_names.py), and the answers from mie itself: its classes, and
  the tables of its refusals.

Tests check that the pages are up to date.
"""

import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mie
from mie.base.refusals import NEUTRAL, REFUSED
from mie.base.stats.request import RequestMetrics
from mie.config.engine import RequestLimits
from mie.config.engine_args import EngineArgs
from mie.config.settings import BACKENDS, Setting, settings_of
from mie.config.vllm_names import NEUTRAL as _ENGINE_ARGS
from mie.frontend.outputs import Logprob
from mie.lab.sim.costs import decode_work
from mie.lab.sim.devices import DEVICES, costs_on, find_shape, window_of

DOCS = Path(__file__).resolve().parent.parent / "docs"


# Settings.


ALL = (*settings_of(EngineArgs), *settings_of(RequestLimits))
SECTIONS = tuple(dict.fromkeys(declared.section for _, _, declared in ALL))
TABLE = re.compile(r"(<!-- settings: (.+?) -->\n).*?(<!-- end of settings -->)", re.DOTALL)


_ON_THE_COMMAND_LINE = {
    "seed": ["`--seed` of `mie generate` and `mie chat` is each request's own"],
    "trace": ["`--trace` takes the name of the file"],
}
"""The meaning of options that are not the setting of the same name."""


def rewritten(page: str) -> str:
    """Return the page with its tables as declared."""
    page = TABLE.sub(lambda match: f"{match[1]}{table(match[2])}{match[3]}", page)
    return PREDICTIONS.sub(lambda match: f"{match[1]}{predictions(match[2])}{match[3]}", page)


def table(section: str) -> str:
    """Return the rows of a section as Markdown."""
    assert section in SECTIONS, f"there is no section {section!r}; there are {SECTIONS}"
    return "".join(_of_mie(section))


def _of_mie(section: str) -> Iterator[str]:
    yield "| setting | default | meaning |\n|---|---|---|\n"
    for name, default, declared in ALL:
        if declared.section == section and not declared.alias_of:
            yield f"| `{name}` | {_default(default, declared)} | {_meaning(name, declared)} |\n"


def _default(default: object, declared: Setting) -> str:
    if declared.default_text:
        return declared.default_text.replace("|", "\\|")
    return "" if default is None else f"`{default}`"


def _meaning(name: str, declared: Setting) -> str:
    notes = [declared.help]
    aliases = [other for other, _, each in settings_of(EngineArgs) if each.alias_of == name]
    notes += [f"`{other}` is another name of it" for other in aliases]
    if declared.choices and declared.kind == "choice":
        notes.append("one of " + ", ".join(f"`{choice}`" for choice in declared.choices))
    if declared.backends and set(declared.backends) != set(BACKENDS):
        notes.append("backends: " + ", ".join(declared.backends))
    notes += _ON_THE_COMMAND_LINE.get(name, ())
    return "; ".join(notes).replace("|", "\\|")


# Predicted times.


PUBLISHED: Mapping[str, Any] = json.loads((DOCS / "gpu/published.json").read_text(encoding="utf-8"))
PREDICTIONS = re.compile(
    r"(<!-- predictions: (.+?) -->\n).*?(<!-- end of predictions -->)", re.DOTALL
)
SMALL_BITS = (4 + 32 / 128, 8 + 32 / 128)
"""Bits of a weight of the layers and of the head, in groups of 128 with float32 scales."""


def predicted_ms(line: Mapping[str, Any]) -> float:
    """Return the milliseconds of a decode step. "bits" are those of the layers and of the head."""
    layer_bits, head_bits = line.get("bits", (None, None))
    count = line.get("requests", 1)
    device, shape = DEVICES[line["device"]], find_shape(line["model"])
    work = decode_work(count, count * line["context"], window_of(shape))
    return costs_on(device, shape, layer_bits=layer_bits, head_bits=head_bits).step_ns(work) / 1e6


def errors() -> Iterator[tuple[Mapping[str, Any], float, float]]:
    """Yield each line about a step, its predicted and its published milliseconds."""
    for line in PUBLISHED["steps"]:
        yield line, predicted_ms(line), line.get("step_ms") or 1000 / line["tokens_per_second"]


def predictions(section: str) -> str:
    """Return a table of predictions.md as Markdown."""
    rows = {"steps": _steps, "attention": _attention, "predicted": _predicted}[section]()
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _steps() -> Iterator[tuple[str, ...]]:
    yield "device", "engine", "model", "predicted ms", "published ms", "error", "use", "source"
    yield ("---",) * 8
    for line, ours, theirs in errors():
        times = f"{ours:.2f}", f"{theirs:.2f}", f"{100 * (ours / theirs - 1):+.1f} %"
        names = line["device"], line["engine"], line["model"]
        yield *names, *times, _use(line), line["source"]


def _attention() -> Iterator[tuple[str, ...]]:
    yield "kernel", "predicted", "published", "error", "use", "source"
    yield ("---",) * 6
    for line in PUBLISHED["attention"]:
        device, theirs = DEVICES[line["device"]], line["tflops"]
        ours = device.flops * device.attention_percent / 1e14
        numbers = f"{ours:.0f}", f"{theirs:g}", f"{100 * (ours / theirs - 1):+.1f} %"
        yield line["engine"], *numbers, _use(line), line["source"]


def _predicted() -> Iterator[tuple[str, ...]]:
    yield "model", "predicted ms", "predicted tokens/s", "band", "aim"
    yield ("---",) * 5
    for line in PUBLISHED["predicted"]:
        ms = predicted_ms({"bits": SMALL_BITS, "context": 512, **line})
        fits = [o / t for e, o, t in errors() if "is_fit" in e and e["device"] == line["device"]]
        low, high = (f"{bound * 1000 / ms:.0f}" for bound in (min(fits), max(fits)))
        yield line["model"], f"{ms:.2f}", f"{1000 / ms:.1f}", f"{low}–{high}", str(line["aim"])


def _use(line: Mapping[str, Any]) -> str:
    return "fit" if "is_fit" in line else "check"


# Names of vLLM.


DATA: Mapping[str, Any] = json.loads((DOCS / "vllm.json").read_text(encoding="utf-8"))
NAMES: Mapping[str, list[str]] = DATA["names"]
PAGE = DOCS / "vllm.md"
BEGIN = "<!-- names of vLLM -->\n"

ACCEPTED: Mapping[str, Mapping[str, tuple[tuple[Any, ...] | None, str]]] = {
    "EngineArgs": _ENGINE_ARGS,
    "AsyncEngineArgs": _ENGINE_ARGS,
    "LLM.__init__": _ENGINE_ARGS,
    "SamplingParams": NEUTRAL["SamplingParams"],
    "SamplingParams.from_optional": NEUTRAL["SamplingParams"],
    "BeamSearchParams": NEUTRAL["BeamSearchParams"],
}
"""Names that are accepted at some values only, by owner; other methods have those of the calls."""

_ELSEWHERE = {"RequestMetrics": RequestMetrics, "Logprob": Logprob}


@dataclass(frozen=True)
class Status:
    """The treatment of a name in mie."""

    kind: str
    """"runs", "neutral" or "refused"."""
    allowed: tuple[Any, ...] | None = None
    """The values of a neutral name that are accepted; None for all."""
    why: str = ""
    """The reason, or the remedy."""


def status(owner: str, name: str) -> Status:
    """Return the treatment of a name of an owner: a module, a class, or ``Class.method``."""
    if name in REFUSED.get(owner, ()):
        return Status("refused", why=REFUSED[owner][name])
    neutral = ACCEPTED.get(owner, NEUTRAL["calls"] if "." in owner and not is_module(owner) else {})
    if name in neutral:
        return Status("neutral", *neutral[name])
    assert has(owner, name), f"mie does not know {name} of {owner}: add it to mie.base.refusals"
    return Status("runs")


def is_module(owner: str) -> bool:
    """Return whether the owner is a module."""
    return owner.split(".")[0] == "vllm"


def has(owner: str, name: str) -> bool:
    """Return whether mie's module, class or method has the name."""
    if is_module(owner):
        return hasattr(importlib.import_module(owner.replace("vllm", "mie", 1)), name)
    class_name, _, method = owner.partition(".")
    cls = class_of(class_name)
    if method == "from_optional":
        return name in inspect.signature(cls).parameters
    if method:
        takes = "chat" if method == "enqueue_chat" else method  # it passes on the options of chat
        return name in inspect.signature(getattr(cls, takes)).parameters
    return name in LLM_ATTRIBUTES.get(owner, ()) or hasattr(cls, name) or name in _fields(cls)


LLM_ATTRIBUTES = {
    "LLM": ("llm_engine", "model_config", "runner_type", "supported_tasks"),
    "LLMEngine": ("model_config",),
}
"""Attributes that only an object has. A test reads them."""


def class_of(name: str) -> Any:
    """Return mie's class with a name of vLLM's class."""
    return _ELSEWHERE.get(name) or getattr(mie, name)


def _fields(cls: Any) -> set[str]:
    return {*getattr(cls, "__annotations__", ())} | {
        name for base in getattr(cls, "__orig_bases__", ()) for name in base.__annotations__
    }


def owners() -> Iterator[str]:
    """Yield the owners: modules, classes, and the methods that mie has."""
    yield from filter(is_module, NAMES)
    for owner in NAMES:
        class_name, _, method = owner.partition(".")
        is_refused = method in REFUSED.get(class_name, ())
        if not is_module(owner) and not is_refused:
            yield owner


def section(owner: str) -> Iterator[str]:
    """Yield the lines about the names of one owner."""
    found = {name: status(owner, name) for name in NAMES[owner]}
    runs = [f"`{name}`" for name, each in found.items() if each.kind == "runs"]
    yield f"## {owner.replace('vllm', 'mie', 1) if is_module(owner) else owner}\n"
    yield f"Runs: {', '.join(runs) or 'nothing'}.\n"
    alike: dict[str, list[str]] = {}
    for name, each in found.items():
        if each.kind != "runs":
            alike.setdefault(f"{_accepted(each)} | {each.why}", []).append(f"`{name}`")
    if alike:
        yield "| names | accepted | because, or instead |\n|---|---|---|"
        yield from (f"| {', '.join(names)} | {cells} |" for cells, names in alike.items())
        yield ""


def _accepted(each: Status) -> str:
    if each.kind == "refused":
        return "refused"
    return ", ".join(f"`{value!r}`" for value in each.allowed) if each.allowed else "anything"


def page(text: str) -> str:
    """Return the page with its tables written anew, below the introduction."""
    introduction, mark, _ = text.partition(BEGIN)
    assert mark, f"{PAGE.name} lacks the line {BEGIN.strip()}"
    counts = [status(owner, name).kind for owner in owners() for name in NAMES[owner]]
    summary = (
        f"These are the {len(counts)} public names of vLLM {DATA['vllm']}: {counts.count('runs')} "
        f"run, {counts.count('neutral')} are accepted at the values without effect, and "
        f"{counts.count('refused')} are refused by name.\n"
    )
    return "\n".join([introduction + BEGIN, summary, *(x for o in owners() for x in section(o))])


# Fields of requests.


FIELDS = re.compile(r"(<!-- fields -->\n).*?(<!-- end of fields -->)", re.DOTALL)
OBJECTS = {
    "openai": "`/v1/completions`, `/v1/chat/completions`, `/tokenize`",
    "stream_options": "`stream_options` of these routes",
    "responses": "`/v1/responses`",
    "responses.input.reasoning": "an item `reasoning` in `input` of `/v1/responses`",
    "messages": "`/v1/messages`",
    "messages.tools": "an entry of `tools` of `/v1/messages`",
    "ollama": "`/api/chat`, `/api/generate`",
    "ollama_options": "`options` of these routes",
}


def with_fields(text: str) -> str:
    """Return the page with its table of the fields without an effect."""
    return FIELDS.sub(lambda match: f"{match[1]}{''.join(_of_fields())}{match[2]}", text)


def _of_fields() -> Iterator[str]:
    import yaml  # of the extra 'serve'

    rows = yaml.safe_load((DOCS.parent / "mie/serve/fields.yaml").read_text(encoding="utf-8"))
    for name, fields in rows.items():
        route, _, place = name.partition(".")
        of_place = f"`{place}` of `/v1/{route}`"
        yield f"\n### Fields of {OBJECTS.get(name, of_place)}\n\n"
        yield "| field | neutral | hint | otherwise |\n|---|---|---|---|\n"
        for field, row in fields.items():
            yield f"| `{field}` | {' | '.join(_of_field(row))} |\n"
    yield "\n"


def _of_field(row: Any) -> tuple[str, str, str]:
    """Return the cells of a field: neutral values, hints, and the reason of a refusal."""
    if row is None:
        return "any value", "", ""
    if not isinstance(row, Mapping):
        return _values(row[1:]), "", f"refused: {row[0]}"
    hints, neutral, why = row["hints"], _values(row.get("neutral", ())), row["why"]
    if hints == "any":
        return neutral, f"any {'other ' if neutral else ''}value: {why}", ""
    return neutral, f"{_values(hints)}: {why}", "refused"


def _values(values: Sequence[Any]) -> str:
    return ", ".join(f"`{json.dumps(each)}`" for each in values)


def main() -> None:
    """Write every page that changes."""
    for path in sorted(DOCS.rglob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = with_fields(rewritten(before))
        after = page(after) if path == PAGE else after
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"wrote {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
