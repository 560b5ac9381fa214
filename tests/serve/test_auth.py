"""Keys: only the routes that tell the server's health are open, and keys share no cache."""

import asyncio
import hashlib
import hmac
import re

import pytest
from audit import loop_of
from edge_helpers import DIALECTS, client_of, held, load, server_of
from starlette.routing import Route

from mie.config.engine import ClientQuota, EngineConfig
from mie.errors import ConfigError
from mie.serve import auth
from mie.serve import keys as keys_module
from mie.serve.asgi import OPEN_ROUTES, SHELL_ROUTES, is_open
from mie.serve.auth import WrongKeys
from mie.serve.config import ServeConfig
from mie.serve.keys import Keys
from mie.serve.page.access import Sessions
from mie.serve.server import check_sockets
from mie.structured.compiler import Compiler

KEY, OTHER = "sk-one", "sk-two"
PROMPT = "Once upon a time there was an otter who lived by a mill. " * 3


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def locked(**options):
    return ServeConfig(keys=Keys.of([KEY, OTHER]), **options)


async def test_every_route_but_a_few_needs_a_key(engine):
    async with client_of(engine, locked()) as client:
        routes = [route for route in client.app.routes if isinstance(route, Route)]
        found = {}
        for route in routes:
            path = re.sub(r"{\w+}", "x", route.path)
            for method in route.methods - {"HEAD"}:
                response = await client.request(method, path)
                found[route.path] = response.status_code
        for path in ("/nothing", "/v1", "/health/", "/mie/page", "/v1/%2e%2e/health"):
            found[f"unknown {path}"] = (await client.get(path)).status_code
    opened = {path for path, status in found.items() if status != 401}
    assert opened == OPEN_ROUTES | SHELL_ROUTES | {"/mie/page/{path:path}"}
    assert len(found) >= 9


async def test_a_key_is_taken_as_openai_and_as_anthropic_clients_send_it(engine):
    async with client_of(engine, locked()) as client:
        for headers in (bearer(KEY), bearer(OTHER), {"x-api-key": KEY}):
            assert (await client.get("/load", headers=headers)).status_code == 200
        for headers in (
            {},
            bearer("sk-three"),
            bearer(KEY + " x"),
            {"authorization": KEY},
            {"authorization": f"Basic {KEY}"},
            {"x-api-key": OTHER.upper()},
            bearer(""),
            bearer("é".encode()),
        ):
            response = await client.get("/load", headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert KEY not in response.text


ADMIN = "sk-admin"
OF_ADAPTERS = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
OF_CLIENTS = {*("/tokenize", "/detokenize", "/tokenizer_info", "/apply-template", "/load")}


@pytest.mark.parametrize("has_keys", [True, False])
async def test_with_an_admin_key_all_that_is_not_for_clients_needs_it(
    engine, has_keys, monkeypatch
):
    monkeypatch.setattr(auth, "SECONDS", 0.0)
    options = {"admin_keys": Keys.of_one("admin", ADMIN), "keys": Keys.of([KEY])}
    if not has_keys:
        del options["keys"]
    of_client = bearer(KEY) if has_keys else {}
    async with client_of(engine, ServeConfig(**options)) as client:
        routes = [route for route in client.app.routes if isinstance(route, Route)]
        paths = {re.sub(r"{\w+(:path)?}", "x", route.path) for route in routes}
        found = {}
        for path in (*paths, "/", "/unknown", "/mie/state"):
            method = "GET" if path in ("/metrics", "/mie/state", "/") else "POST"
            for who, headers in (("client", of_client), ("admin", bearer(ADMIN))):
                response = await client.request(method, path, headers=headers)
                found[path, who] = response
            response = await client.request(method, path, headers=bearer("sk-nobody"))
            found[path, "nobody"] = response
    locked_up = {401, 403}
    refused = {who: set() for who in ("client", "admin", "nobody")}
    for (path, who), response in found.items():
        if response.status_code in locked_up:
            refused[who].add(path)
    admins = {
        path
        for path, _ in found
        if not path.startswith(("/v1/", "/api/")) or path in OF_ADAPTERS
        if path not in OF_CLIENTS | {"/openapi.json"}
        if not is_open(path)
    }
    assert {"/metrics", "/reset_prefix_cache", "/unknown", "/mie/state", *OF_ADAPTERS} <= admins
    assert refused["admin"] == set()
    assert refused["client"] == admins
    assert refused["nobody"] == (
        {path for path, _ in found if not is_open(path)} if has_keys else admins
    )
    assert found["/metrics", "admin"].status_code == 200
    error = found["/metrics", "client"]
    assert error.status_code == (403 if has_keys else 401)
    assert ("admin key" in error.json()["error"]["message"]) == has_keys
    assert ADMIN not in error.text


def test_a_client_may_not_have_the_name_of_the_admins_key(tmp_path):
    file = tmp_path / "keys.txt"
    file.write_text("admin sk-x\n")
    keys, admin_keys = Keys.of([], str(file)), Keys.of_one("admin", ADMIN)
    with pytest.raises(ConfigError, match="'admin' is the admin key's"):
        check_sockets(ServeConfig(keys=keys, admin_keys=admin_keys))


async def test_the_document_says_which_routes_need_the_admin_key(engine):
    config = ServeConfig(admin_keys=Keys.of_one("admin", ADMIN))
    async with client_of(engine, config) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert {"401", "403"} <= paths["/metrics"]["get"]["responses"].keys()
    assert "security" in paths["/reset_prefix_cache"]["post"]
    assert "security" not in paths["/v1/completions"]["post"]


async def test_a_websocket_is_closed(engine):
    from mie.serve.auth import Authentication

    sent = []

    async def send(message):
        sent.append(message)

    keys, sessions = Keys.of([KEY]), Sessions()
    app = Authentication(None, keys, sessions, WrongKeys(), share_prefix_cache=False)
    scope = {"type": "websocket", "path": "/", "headers": []}
    await app(scope, None, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def cached_tokens(client, key, salt):
    body = {"prompt": PROMPT, "max_tokens": 2, "cache_salt": salt}
    response = await client.post("/v1/completions", json=body, headers=bearer(key))
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("salt", [None, "the same"])
@pytest.mark.parametrize("shares", [False, True])
async def test_a_key_learns_nothing_from_the_cache_of_another(engine, shares, salt):
    assert await engine.reset_prefix_cache()
    async with client_of(engine, locked(share_prefix_cache=shares)) as client:
        assert await cached_tokens(client, KEY, salt) == 0
        assert await cached_tokens(client, KEY, salt) > 0
        assert (await cached_tokens(client, OTHER, salt) > 0) == shares


@pytest.mark.parametrize("salt", [None, "the same"])
@pytest.mark.parametrize("shares", [False, True])
async def test_a_key_learns_nothing_from_the_schemas_of_another(engine, monkeypatch, shares, salt):
    pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")
    compiled = []
    submit = Compiler.submit
    monkeypatch.setattr(
        Compiler, "submit", lambda *given: (compiled.append(given[1]), submit(*given))[1]
    )
    schema = {"const": f"{shares} {salt}"}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"prompt": PROMPT, "max_tokens": 1, "response_format": form, "cache_salt": salt}
    async with client_of(engine, locked(share_prefix_cache=shares)) as client:
        for key, expected in ((KEY, 1), (KEY, 1), (OTHER, 1 if shares else 2)):
            answer = await client.post("/v1/completions", json=body, headers=bearer(key))
            assert answer.status_code == 200, answer.text
            assert len(compiled) == expected


@pytest.mark.parametrize(("path", "body"), DIALECTS.items())
async def test_a_request_is_cancelled_by_its_own_key_only(path, body):
    engine = load()
    with held(engine) as hold:
        async with server_of(engine, keys=Keys.of([KEY, OTHER])) as running:
            client, asked = running.client, {**body, "temperature": 0, "stream": True}
            async with client.stream("POST", path, json=asked, headers=bearer(KEY)) as answer:
                await hold.reached()
                [running_id] = running.server.app.state.serving.running
                route = f"/v1/requests/{running_id}/cancel"
                assert (await client.post(route, headers=bearer(OTHER))).status_code == 404
                own = asyncio.ensure_future(client.post(route, headers=bearer(KEY)))
                while not loop_of(engine).has_mail and not own.done():
                    await asyncio.sleep(0.01)
                hold.release()
                assert (await own).json() == {"id": running_id, "cancelled": True}
                await answer.aread()


def test_salts_tell_nothing_of_the_keys():
    one, again = Keys.of([KEY]), Keys.of([KEY])
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    assert one.salt("key-1") != again.salt("key-1"), "each start has its own"
    assert one.salt("key-1") not in (KEY, digest)


def test_every_key_is_compared_in_constant_time(monkeypatch):
    compared, original = [], hmac.compare_digest

    def compare(a, b):
        compared.append((len(a), len(b)))
        return original(a, b)

    monkeypatch.setattr(keys_module.hmac, "compare_digest", compare)
    keys = Keys.of([KEY, OTHER])
    assert keys.find(KEY) == "key-1"
    assert compared == [(32, 32)] * 2, "digests, and no early end"


def test_keys_come_from_a_file(tmp_path):
    file = tmp_path / "keys"
    hashed = hashlib.sha256(OTHER.encode()).hexdigest()
    file.write_text(f"# ours\n\nalice {KEY}\nbob sha256:{hashed}\n")
    keys = Keys.of(["sk-zero"], str(file))
    assert [keys.find(key) for key in ("sk-zero", KEY, OTHER, hashed)] == [
        "key-1",
        "alice",
        "bob",
        None,
    ]
    assert repr(keys) == "Keys(key-1, alice, bob)"
    assert Keys.of([]) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alice", "keys:1 must be NAME KEY; it has 1 words"),
        ("alice sk-one sk-x", "keys:1: after NAME KEY there may be weight=X and max_num_seqs=N"),
        ("alice sk-one weight=1 weight=2", "there may be weight=X and max_num_seqs=N, once each"),
        ("alice sk-one weight=two", "keys:1: weight must be a number; got 'two'"),
        ("alice sk-one weight=0", "keys:1: weight must be a number in .0, inf.; got 0.0"),
        ("alice sk-one max_num_seqs=0", "max_num_seqs must be an integer at least 1; got 0"),
        ("alice sk-one\nalice sk-two", "has the name 'alice' twice"),
        ("a/b sk-one", "a key's name has 1"),
        ("alice schlüssel", "a key must be printable ASCII"),
    ],
)
def test_a_bad_file_is_refused_without_showing_a_key(tmp_path, text, message):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        Keys.of([], str(file))
    assert "sk-" not in str(caught.value)


def test_a_keys_quota_reaches_the_engine(tmp_path):
    from mie.cli.serve import with_quotas

    file = tmp_path / "keys"
    file.write_text("alice sk-one weight=2\nbob sk-two\njobs sk-three weight=0.5 max_num_seqs=8\n")
    keys = Keys.of([], str(file))
    settings = with_quotas({"scheduling_policy": "fair"}, keys)
    quotas = {"alice": ClientQuota(weight=2), "jobs": ClientQuota(weight=0.5, max_num_seqs=8)}
    assert EngineConfig(**settings).client_quotas == quotas
    assert with_quotas({}, None) == with_quotas({}, Keys.of(["sk-one"])) == {}
    declared = {"client_quotas": {"carol": {"weight": 3}}}
    assert with_quotas(declared, keys)["client_quotas"].keys() == {"alice", "jobs", "carol"}
    with pytest.raises(ConfigError, match="key 'alice' has a quota in --api-key-file and in"):
        with_quotas({"client_quotas": {"alice": {}}}, keys)
    with pytest.raises(ConfigError, match="client_quotas needs scheduling_policy='fair'"):
        EngineConfig(**with_quotas({}, keys))


@pytest.mark.parametrize("key", ["", " sk", "sk\n", "schlüssel"])
def test_a_bad_key_is_refused(key):
    with pytest.raises(ConfigError, match="a key must be printable ASCII"):
        Keys.of([key])


def test_the_command_line_takes_keys_from_three_places(tmp_path, monkeypatch):
    import argparse

    from mie.cli.serve import keys_of

    file = tmp_path / "keys"
    file.write_text("alice sk-three\n")
    monkeypatch.setenv("MIE_API_KEY", OTHER)
    args = argparse.Namespace(api_key=[KEY], api_key_file=str(file))
    keys = keys_of(args)
    assert [keys.find(key) for key in (KEY, OTHER, "sk-three")] == ["key-1", "key-2", "alice"]
    monkeypatch.delenv("MIE_API_KEY")
    assert keys_of(argparse.Namespace(api_key=None, api_key_file=None)) is None
