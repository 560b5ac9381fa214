"""A server of the bundled model for the tests of this folder, and a client of it."""

import asyncio
import inspect
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import uvicorn.server
from audit import engine_of
from deadlines import PATIENCE
from edge_helpers import asks, load
from lazy_module import lazy_module
from live_server import live

from mie import LLM, AsyncLLM

anthropic, openai = lazy_module("anthropic"), lazy_module("openai")


def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own, in which it must end."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures = {
        name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters
    }
    asks(pyfuncitem.obj(**fixtures))
    return True


class Hurried:
    """The module `asyncio` with shorter sleeps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


@pytest.fixture(scope="session", autouse=True)
def _servers_end_soon() -> Iterator[None]:
    """Let uvicorn sleep 0.01 s instead of 0.1 s. Each server sleeps twice before it ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", Hurried())
        yield


class Server:
    """A client of a server, and the engine behind it."""

    def __init__(self, engine: AsyncLLM, url: str) -> None:
        self.engine = engine
        self.url = url
        self.client = httpx2.Client(base_url=url, timeout=PATIENCE)

    def get(self, path: str) -> httpx2.Response:
        return self.client.get(path)

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.client.post(path, json=body)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """The body of an answer, which must be a 200."""
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, **body: Any) -> dict[str, Any]:
        """The error of an answer, which must be a 400 with all four keys."""
        answer = self.post(path, **body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert {"message", "type", "param", "code"} <= error.keys()
        assert error["type"] == "invalid_request_error"
        return error

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream, which must end with [DONE]."""
        answer = self.post(path, stream=True, **body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(event.startswith("data: {") for event in events[:-2])
        return [json.loads(event[6:]) for event in events[:-2]]

    def close(self) -> None:
        self.client.close()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    engine = AsyncLLM(
        "bundled",
        max_num_seqs=8,
        num_blocks=512,
        generation_config="vllm",
        batch_invariant=True,  # as `mie serve` has it, so that answers can be compared
    )
    try:
        with live(engine) as url:
            server = Server(engine, url)
            yield server
            server.close()
    finally:
        engine.shutdown()
    manager = engine_of(engine).scheduler.manager
    assert manager.num_used == 0, "a request has left blocks behind"


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(server: Server) -> Iterator[Any]:
    """Anthropic's own client."""
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def engine() -> Iterator[AsyncLLM]:
    """An engine for apps of this process, which leave it running."""
    engine = load()
    yield engine
    engine.shutdown()


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model without a server."""
    return LLM("bundled", num_blocks=512, batch_invariant=True)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A certificate of this machine's own address, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "3650", "-subj", "/CN=localhost", "-addext"]
    command += ["subjectAltName=IP:127.0.0.1", "-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
    return [str(file) for file in files]
