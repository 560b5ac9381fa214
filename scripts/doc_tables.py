"""Write the tables of the documentation from declarations, data and the ledgers.

    python scripts/doc_tables.py

* A table of settings is between ``<!-- settings: SECTION -->`` and ``<!-- end of settings -->``.
  SECTION is one of `mie.config.settings.Setting`.
* docs/fields.md has the fields of requests without an effect, of mie/serve/fields.yaml, between
  ``<!-- fields -->`` and ``<!-- end of fields -->``.
* docs/gpu/predictions.md compares predicted with published times, of docs/gpu/published.json.

Tests check that the pages are up to date.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mie.base.arithmetic import ceil_div
from mie.config.engine import RequestLimits
from mie.config.engine_args import EngineArgs
from mie.config.settings import BACKENDS, Setting, settings_of
from mie.lab.sim.costs import decode_work
from mie.lab.sim.devices import DEVICES, costs_on, find_shape, window_of
from mie.model.config import ModelConfig
from mie.ops_gpu import wide_rows
from mie.ops_gpu.chip import Chip
from mie.ops_gpu.weights import UNIT

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


def predicted_ms(line: Mapping[str, Any]) -> float:
    """Return the milliseconds of a decode step. "bits" are for the layers and for the head."""
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
    tables = {
        "steps": _steps,
        "attention": _attention,
        "heads": _heads,
        "wide": _wide,
        "codes": _codes,
        "few rows": _few_rows,
        "predicted": _predicted,
    }
    rows = tables[section]()
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


def _heads() -> Iterator[tuple[str, ...]]:
    """Scale the rate of heads of 128 by the operations of an instruction.

    The slowest that the plain kernel may be takes as many instructions a second, and the fastest
    issues one a clock from each of a multiprocessor's four schedulers.
    """
    yield "device", "heads", "tensor cores", "CUDA cores", "ratio"
    yield ("---",) * 5
    work = PUBLISHED["heads"]
    for name, clock in work["clock_ghz"].items():
        device = DEVICES[name]
        assert device.gpu is not None
        a_second = device.flops * device.attention_percent / 100 / work["flops_of_128"]
        most = 4 * device.gpu.num_multiprocessors * clock * 1e9
        for line in work["sizes"]:
            new = a_second * line["tensor_cores"] / 1e12
            low, high = (rate * line["cuda_cores"] / 1e12 for rate in (a_second, most))
            rates = f"{new:.1f}", f"{low:.2f}–{high:.2f}", f"{new / high:.0f}–{new / low:.0f}"
            yield name, line["heads"], *rates


def _wide() -> Iterator[tuple[str, ...]]:
    """Scale the rate of heads of 128 by the operations of an instruction, with more rows a warp.

    A product of a warp is 4,096 operations. Each size has the products and the instructions of a
    loop over keys.
    """
    yield "heads", *(f"instructions a product, {n} rows" for n in (16, 32)), "TFLOP/s", "of GEMM"
    yield ("---",) * 5
    work = PUBLISHED["wide"]
    device = DEVICES[work["device"]]
    for line in work["sizes"]:
        products, instructions = line["of_32_rows"]
        each = device.flops * device.attention_percent / 1e14 / PUBLISHED["heads"]["flops_of_128"]
        rate = each * 4096 * products / instructions
        counts = (f"{line[key][1] / line[key][0]:.2f}" for key in ("of_16_rows", "of_32_rows"))
        yield line["heads"], *counts, f"{rate:.0f}", f"{100 * rate / work['gemm_tflops']:.0f} %"


def _few_rows() -> Iterator[tuple[str, ...]]:
    """Add a fixed time for each launch to the time of its bytes.

    The rate is a fraction of the rate at which the chip reads its memory.
    """
    yield "weights", "launch", "MB", "measured µs, before", "predicted µs"
    yield ("---",) * 5
    work = PUBLISHED["few_rows"]
    rate = work["read_gb_s"] * work["percent"] / 1e5  # MB a µs
    for form in work["weights"]:
        steps = [0.0, 0.0]
        head = {"name": "head", "mb": form["head_mb"], "count": 1, "us": form["head_us"]}
        for line in (*form["launches"], head):
            times = [line["mb"] / rate + line["count"] * fixed for fixed in work["launch_us"]]
            layers = 1 if line is head else work["layers"]
            steps = [step + layers * us for step, us in zip(steps, times, strict=True)]
            band = "–".join(f"{us:.1f}" for us in times)
            yield form["name"], line["name"], f"{line['mb']:.1f}", f"{line['us']:.1f}", band
        steps = [(step + work["layers"] * form["attention_us"]) / 1000 for step in steps]
        band = "–".join(f"{step:.2f}" for step in steps)
        yield form["name"], "step, ms", "", f"{form['now_ms']:.2f}", f"**{band}**"


def _codes() -> Iterator[tuple[str, ...]]:
    """Predict steps in which codes are multiplied, or widened first, beside weights of 16 bits."""
    yield "device", "model", "requests", "weights", "codes", "widened first", "16 bits"
    yield ("---",) * 7
    for line in PUBLISHED["codes"]["steps"]:
        device, shape = DEVICES[line["device"]], find_shape(line["model"])
        name = line.get("weights", "int4")
        bits = PUBLISHED["codes"]["weights"][name]["bits"]
        dense, plain = predicted_ms(line), costs_on(device, shape)
        codes = costs_on(device, shape, layer_bits=bits[0], head_bits=bits[1])
        formula = max(codes.weights_ps, line["requests"] * (codes.token_ps + codes.logits_ps))
        products = max(codes.weights_ps, codes_products_ps(line, name, shape))
        narrow = predicted_ms({**line, "bits": bits}) + (products - formula) / 1e9
        widened = dense + (codes.weights_ps + plain.weights_ps) / 1e9  # read, and written
        times = (f"{ms:.2f}" for ms in (narrow, widened, dense))
        yield line["device"], line["model"], str(line["requests"]), name, *times


def codes_products_ps(line: Mapping[str, Any], weights: str, shape: ModelConfig) -> int:
    """Return the time of all products by the instructions of the busiest multiprocessor.

    A stage of a block has the instructions of its eight warps. Four schedulers issue them.
    """
    gpu, work, heads = DEVICES[line["device"]].gpu, PUBLISHED["codes"], PUBLISHED["heads"]
    assert gpu is not None
    chip = Chip(num_multiprocessors=gpu.num_multiprocessors, shared_bytes=gpu.shared_bytes)
    rows = wide_rows.FEW if line["requests"] <= wide_rows.FEW else wide_rows.MANY
    width, hidden = shape.num_heads * shape.head_dim, shape.hidden_size
    matrices = [
        (width + 2 * shape.num_kv_heads * shape.head_dim, hidden),
        (hidden, width),
        (2 * shape.intermediate_size, hidden),
        (hidden, shape.intermediate_size),
    ]
    of_layers, of_head = work["weights"][weights][str(rows)]
    instructions = 0  # of a warp, by the busiest multiprocessor
    for matrix, each in (
        *((matrix, shape.num_layers * of_layers) for matrix in matrices),
        ((shape.vocab_size, hidden), of_head),
    ):
        splits = wide_rows.splits_of(matrix, chip)
        of_split = ceil_div(ceil_div(matrix[1], wide_rows.UNITS * UNIT), splits)
        blocks = splits * ceil_div(matrix[0], wide_rows.OUTPUTS) * ceil_div(line["requests"], rows)
        instructions += each * ceil_div(blocks, gpu.num_multiprocessors) * of_split
    clocks = instructions * wide_rows.WARPS / 4 / (work["issue_percent"] / 100)
    return round(clocks / heads["clock_ghz"][line["device"]] * 1000)


def _predicted() -> Iterator[tuple[str, ...]]:
    """Predict tokens a second by the formula, and by launches at some shares of the bandwidth.

    A launch takes the fixed time of `_few_rows`, which grows as the clock falls. The share that an
    aim needs leaves the launches their time.
    """
    work, few, clocks = (PUBLISHED[name] for name in ("predicted", "few_rows", "heads"))
    percents, name = work["percents"], work["device"]
    shares = (f"{percent} %" for percent in percents)
    yield "model", "weights", "MB", "launches", "formula", *shares, "aim", "share"
    yield ("---",) * (7 + len(percents))
    device, of_clock = DEVICES[name], clocks["clock_ghz"]
    launch_ms = sum(few["launch_us"]) / 2e3 * of_clock[few["device"]] / of_clock[name]
    for line in work["lines"]:
        shape, aim = find_shape(line["model"]), line["aim"]
        costs = costs_on(device, shape, layer_bits=line["bits"][0], head_bits=line["bits"][1])
        read_ps = costs.weights_ps + work["context"] * costs.context_ps
        read_ms = read_ps * device.bandwidth_percent / 1e11  # at the whole bandwidth
        launches = work["launches"]["step"] + line.get("more_launches", 0)
        launches += work["launches"]["layer"] * shape.num_layers
        fixed_ms = (device.step_ns + device.seq_ns) / 1e6 + launches * launch_ms
        formula = 1000 / predicted_ms({"device": name, "context": work["context"], **line})
        rates = [formula, *(1000 / (fixed_ms + 100 * read_ms / percent) for percent in percents)]
        sizes = f"{read_ms * device.bandwidth / 1e9:.0f}", str(launches)
        share = f"{100 * read_ms / (1000 / aim - fixed_ms):.0f} %"
        yield line["model"], line["weights"], *sizes, *(f"{n:.0f}" for n in rates), str(aim), share


def _use(line: Mapping[str, Any]) -> str:
    return "fit" if "is_fit" in line else "check"


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
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"wrote {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
