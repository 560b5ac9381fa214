"""The description at ``/openapi.json`` fits the server."""

import re
from typing import Any

import httpx2
import jsonschema_rs
import pytest
from tables import yaml_table

from mie.serve.routes import NOT_SUPPORTED, OPERATIONS, routes


@pytest.fixture(scope="module")
def client(server: Any) -> httpx2.Client:
    return server.client


@pytest.fixture(scope="module")
def document(client: httpx2.Client) -> Any:
    return client.get("/openapi.json").json()


def test_every_route_is_described_with_its_methods(client: httpx2.Client):
    described = {(operation.method.upper(), operation.path) for operation in OPERATIONS}
    refused = {path for paths in NOT_SUPPORTED.values() for path in paths}
    served = {
        (method, re.sub(r":\w+\}", "}", route.path))
        for route in routes()
        for method in (route.methods or set()) - {"HEAD"}
        if route.path not in refused
    }
    assert served <= described
    for method, path in sorted(described - served):  # those of the edge
        assert client.request(method, path).status_code == 200, path


def test_every_reference_has_a_schema(document: Any):
    names = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert names <= document["components"]["schemas"].keys()


def test_every_schema_is_a_schema(document: Any):
    for schema in document["components"]["schemas"].values():
        jsonschema_rs.validator_for(resolved(schema, document))


def resolved(schema: dict[str, Any], document: Any) -> dict[str, Any]:
    """A schema with the others that it may refer to."""
    return {**schema, "components": document["components"]}


def body_schema(document: Any, path: str) -> Any:
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return jsonschema_rs.validator_for(resolved(content["schema"], document))


TABLES = yaml_table("openapi")


@pytest.mark.parametrize(("path", "body"), TABLES["served"])
def test_a_body_that_is_served_and_its_answer_fit_their_schemas(client, document, path, body):
    assert body_schema(document, path).is_valid(body)
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]
    jsonschema_rs.validator_for(resolved(answer["schema"], document)).validate(response.json())


@pytest.mark.parametrize(("path", "change"), TABLES["refused"])
def test_what_is_refused_does_not_fit_its_schema(client, document, path, change):
    body = next(body for each, body in TABLES["served"] if each == path)
    assert not body_schema(document, path).is_valid({**body, **change})
    assert client.post(path, json={**body, **change}).status_code in (400, 404)


@pytest.mark.parametrize(
    "path",
    [
        *("/health", "/ready", "/ping", "/load", "/version", "/v1/models", "/tokenizer_info"),
        *("/api/tags", "/api/ps", "/api/version"),
    ],
)
def test_the_answers_of_plain_routes_fit_their_schemas(client, document, path):
    answer = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
    schema = jsonschema_rs.validator_for(resolved(answer["schema"], document))
    schema.validate(client.get(path).json())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
def test_errors_fit_their_schemas(client: httpx2.Client, document: Any, path: str):
    answer = document["paths"][path]["post"]["responses"]["400"]["content"]["application/json"]
    schema = jsonschema_rs.validator_for(resolved(answer["schema"], document))
    response = client.post(path, json={})
    assert response.status_code == 400
    schema.validate(response.json())
