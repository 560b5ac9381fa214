"""A server of the small golden models, which are loaded on demand."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from deadlines import PATIENCE
from edge_helpers import events_of, server_of, without_steps

from mie import AsyncLLM
from mie.load.directory import ModelsDirectory, PlannedModel
from mie.serve.config import ServeConfig
from mie.serve.router import ModelsEdge

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
NAMES = ("gemma_gelu", "llama32_tied", "olmo2_norms", "qwen3_tied")
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,  # the golden models have no tokenizer
    "backend": "numpy",
    "scheduling_policy": "fair",
    "num_blocks": 32,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
}
PROMPT = [5, 9, 2, 7]


def new_folder(folder: Path) -> Path:
    """Return a folder of four models, a broken one, and a file that is none."""
    for name in NAMES:
        (folder / name).symlink_to(GOLDEN / name)
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{}")
    (folder / "notes.txt").write_text("no model")
    return folder


class Loader:
    """Loads models, notes their names, and waits at a gate that is open unless a test closes it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.engines: list[weakref.ref[AsyncLLM]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, planned: PlannedModel) -> AsyncLLM:
        self.names.append(Path(planned.settings["model"]).name)
        assert self.gate.wait(PATIENCE)
        engine = AsyncLLM(**planned.settings)
        self.engines.append(weakref.ref(engine))
        return engine


@dataclass
class Stream:
    """A stream that the engine has begun to answer."""

    first: dict[str, Any]
    events: AsyncIterator[Any]
    release: Callable[[], None]
    """Lets the engine go on."""


class Served:
    """A server of the folder, and its client."""

    def __init__(self, running: Any, loader: Loader) -> None:
        self.running, self.loader = running, loader
        self.client: httpx2.AsyncClient = running.client
        self.edge: ModelsEdge = running.edge

    async def ask(self, name: str | None, **more: Any) -> httpx2.Response:
        body = {"model": name, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, **more}
        body = {key: value for key, value in body.items() if value is not None}
        return await self.client.post("/v1/completions", json=body | {"return_token_ids": True})

    async def tokens(self, name: str) -> list[int]:
        answer = await self.ask(name)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
        return answer.json()["choices"][0]["token_ids"]

    @asynccontextmanager
    async def streaming(self, name: str) -> AsyncIterator[Stream]:
        """A stream that runs until it is released or closed, after its first token."""
        assert (await self.ask(name)).status_code == 200
        model = await self.edge.models.catalogue.find(name)
        body = {"model": name, "prompt": PROMPT, "max_tokens": 20, "ignore_eos": True}
        body["return_token_ids"] = True  # without a tokenizer, there is nothing else to send
        post = ("POST", "/v1/completions")
        with ExitStack() as stack:
            stack.enter_context(without_steps(model.edge.engine))
            async with self.client.stream(*post, json={**body, "stream": True}) as response:
                assert response.status_code == 200, await response.aread()
                events = events_of(response)
                yield Stream(await anext(events), events, stack.close)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for a model to be loaded."""
        return sum(len(model.waiters) for model in self.edge.models.catalogue.waited_for)

    async def states(self) -> dict[str, str]:
        listed = (await self.client.get("/v1/models")).json()["data"]
        return {each["id"]: each["status"]["value"] for each in listed}

    async def loaded(self) -> set[str]:
        return {name for name, state in (await self.states()).items() if state == "loaded"}

    async def until(self, condition: Any) -> None:
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(folder: Path, budget: int = 1 << 30, **options: Any) -> AsyncIterator[Served]:
    loader, config = Loader(), {"port": 0, "models_dir": str(folder), **options}
    edge = ModelsEdge(ModelsDirectory(folder, SETTINGS, budget), loader, ServeConfig(**config))
    async with server_of(edge, **config) as running:
        try:
            yield Served(running, loader)
        finally:
            loader.gate.set()


def budget_for(folder: Path, count: int) -> int:
    """The memory of the largest models of the folder."""
    directory = ModelsDirectory(folder, SETTINGS, 1 << 30)
    sizes = sorted(directory.plan(folder / name).num_bytes for name in NAMES)
    return sum(sizes[-count:])
