"""No number of a client ends a request in a 500, or hurts the engine and its metrics.

The fields come from the published schemas, so that a new field is tested too.
"""

import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from edge_helpers import DIALECTS, MESSAGES, asks, call_app, load

from mie.serve.app import create_app
from mie.serve.config import ServeConfig
from mie.serve.json_text import json_object
from mie.serve.openapi import document
from mie.serve.router import OWN_OPERATIONS
from mie.serve.routes import OPERATIONS

NUMBERS = (
    *("1", "0", "-0", "-0.0", "-1", "-2", "1.0", "1.5"),
    *(str(2**31), str(2**53 - 1), str(2**53 + 1), str(2**63 - 1)),
    *(str(2**63), str(-(2**63) - 1), str(2**64), "1" + "0" * 400, "-1" + "0" * 400),
    *("1e300", "-1e300", "1e400", "1" + "0" * 400 + ".0", "1e-400", "NaN", "Infinity"),
)
"""Numbers as they are written in JSON, or nearly."""
ALWAYS = (str(2**63), "1" + "0" * 400, "1e400")
"""Numbers that each numeric field gets. The others take turns in `make test`."""
HUGE = ("1" + "0" * 400, "1e400", "-1e300", "NaN")
"""Numbers for fields that may have any value. They take turns in `make test`."""
BODIES: dict[str, dict[str, Any]] = {
    **DIALECTS,
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/load_lora_adapter": {"lora_name": "poet", "lora_path": "adapters/poet"},
    "/v1/unload_lora_adapter": {"lora_name": "poet"},
    "/tokenize": {"prompt": "Once"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": MESSAGES},
    "/api/show": {},
}
"""The least that a request needs, by its route. Other routes have no fields of their own."""
SHORT = {
    "/v1/completions": {"max_tokens": 1},
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/messages": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1},
    "/api/chat": {"options": {"num_predict": 1}, "stream": False},
    "/api/generate": {"options": {"num_predict": 1}, "stream": False},
}
Place = tuple[str | int, ...]


def places(schema: dict[str, Any], parts: dict[str, Any], above: Place = ()) -> Iterator[Any]:
    """Yield the place of each value in a body, with its schema, or an empty one for any value."""
    if "$ref" in schema:
        yield from places(parts[schema["$ref"].rpartition("/")[2]], parts, above)
        return
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        if len(above) < 6 and ("$ref" in each or "type" in each):
            yield from places(each, parts, above)
    for name, each in schema.get("properties", {}).items():
        if len(above) < 6:
            yield from places(each, parts, (*above, name))
    if isinstance(schema.get("items"), dict) and len(above) < 6:
        yield from places(schema["items"], parts, (*above, 0))
    if isinstance(schema.get("additionalProperties"), dict):
        yield from places(schema["additionalProperties"], parts, (*above, "5"))
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "integer" in kinds or "number" in kinds:
        yield above, schema
    elif above and not {"anyOf", "oneOf", "type", "$ref"} & schema.keys():
        yield above, {}


def fields_of(operations) -> dict[str, dict[Place, dict[str, Any]]]:
    """Return the fields that may be numbers, by the names of the schemas of bodies."""
    parts = document(ServeConfig(), operations, None)["components"]["schemas"]
    found: dict[str, dict[Place, dict[str, Any]]] = {}
    for operation in operations:
        if operation.body is not None:
            schema = parts[operation.body.__name__]
            found[operation.path] = {}
            for place, each in places(schema, parts):
                known = found[operation.path].get(place)
                found[operation.path][place] = each or known or {}
    return found


@functools.cache
def fields() -> dict[str, dict[Place, dict[str, Any]]]:
    """Return the fields of all routes of one model."""
    return fields_of(OPERATIONS)


def with_number(body: dict[str, Any], place: Place, number: str) -> bytes:
    """Return a body as JSON text that has a number in a place."""
    body = json.loads(json.dumps(body))
    at: Any = body
    for key, after in itertools.pairwise(place):
        empty: Any = [None] if isinstance(after, int) else {}
        if isinstance(key, str):
            inner = at.get(key)
            at[key] = inner if isinstance(inner, type(empty)) and inner else empty
        else:
            at[key] = at[key] if isinstance(at[key], type(empty)) and at[key] else empty
        at = at[key]
    at[place[-1]] = "<number>"
    return json.dumps(body).replace('"<number>"', number).encode()


async def post(app, path: str, data: bytes, method: str = "POST") -> tuple[int, bytes]:
    """Send a request to an app in this process."""
    answer: list[Any] = []

    async def send(message):
        answer.append(message)

    await call_app(app, path, data, send, method)
    return answer[0]["status"], b"".join(each.get("body", b"") for each in answer)


@pytest.mark.parametrize("operations", [OPERATIONS, OWN_OPERATIONS], ids=["one", "many"])
def test_every_number_of_every_body_has_a_lowest_and_a_highest_value(operations):
    numbers = 0
    for path, found in fields_of(operations).items():
        for place, schema in found.items():
            if not schema:
                continue
            numbers += 1
            low = schema.get("minimum", schema.get("exclusiveMinimum"))
            assert low is not None, (path, place)
            assert abs(low) <= 2**63, (path, place)
            assert "maximum" in schema, (path, place)
            assert schema["maximum"] < 2**63, (path, place)
    assert numbers > 60


def test_every_route_with_numbers_is_tried():
    assert {path for path, found in fields().items() if found} <= BODIES.keys()


@pytest.fixture(scope="module")
def engine():
    engine = load(max_model_len=64, num_blocks=64, enable_lora=True)
    yield engine
    engine.shutdown()


def numbers_for(index: int, schema: dict[str, Any], is_thorough: bool) -> tuple[str, ...]:
    """Return the numbers for a field: all numbers, or the numbers of this run."""
    if is_thorough:
        return NUMBERS if schema else HUGE
    return (*ALWAYS, *NUMBERS[index % 7 :: 7]) if schema else (HUGE[index % len(HUGE)],)


@pytest.mark.parametrize(
    "is_thorough", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize("path", BODIES)
def test_any_number_in_any_field_is_answered_or_refused_and_hurts_nobody(engine, path, is_thorough):
    async def ask() -> None:
        app = create_app(engine, ServeConfig(allow_runtime_lora_updating=True))
        async with app.router.lifespan_context(app):
            for index, (place, schema) in enumerate(fields()[path].items()):
                for number in numbers_for(index, schema, is_thorough):
                    body = {**BODIES[path], **SHORT.get(path, {})}
                    status, answer = await post(app, path, with_number(body, place, number))
                    assert status in (200, 400, 404), (place, number, status, answer)
                    if status == 200:
                        json_object(answer)
                status, answer = await post(app, "/metrics", b"", "GET")
                assert status == 200, (place, answer)
            data = json.dumps({"prompt": ["Once"] * 11, "max_tokens": 1}).encode()
            for _ in range(6):  # ended requests are added up after 64
                assert (await post(app, "/v1/completions", data))[0] == 200
            assert (await post(app, "/metrics", b"", "GET"))[0] == 200

    asks(ask())
