"""The models of a folder, loaded or not."""

import asyncio
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path

from mie.base.threads import call_in_thread
from mie.load.directory import ModelFiles, ModelsDirectory
from mie.serve.app import EngineEdge
from mie.serve.errors import ApiError, invalid, no_model
from mie.serve.serving import LATEST

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Model:
    """A model of the server, loaded or not."""

    name: str
    path: Path
    edge: EngineEdge | None = None
    """The model's engine with the engine's routes, while the model is loaded."""
    num_bytes: int = 0
    """The memory that it takes, while it is loaded."""
    num_users: int = 0
    """Requests that are being served by it."""
    waiters: list[asyncio.Future[EngineEdge]] = field(default_factory=list)
    """Requests that wait until it is loaded."""
    last_used: int = 0
    """The time of the model's last use: a count of the beginnings and ends of all requests."""
    is_coming: bool = False
    """Whether it will be loaded."""
    is_leaving: bool = False
    """Whether it will be unloaded as soon as no request uses it."""
    has_failed: bool = False
    """Whether the last try to load it failed."""
    keep_alive: float = math.inf
    """Seconds without a request after which it is unloaded."""
    expires_at: float | None = None
    """When that is, in the time of the event loop."""
    timer: asyncio.TimerHandle | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a request may use it."""
        return self.edge is not None and not self.is_leaving and self.edge.dead_error is None

    @property
    def status(self) -> str:
        """The model's state in llama.cpp's words."""
        if self.is_coming:
            return "loading"
        return "unloaded" if self.edge is None or self.edge.dead_error else "loaded"


class Catalogue:
    """The models of a folder by name. A loaded model stays, even if its files disappear."""

    def __init__(self, directory: ModelsDirectory) -> None:
        self.directory = directory
        self._models: dict[str, Model] = {}
        self._files: dict[Path, tuple[tuple[float, ...], ModelFiles | None]] = {}

    def keep(self, model: Model) -> None:
        """List a model that is about to be loaded, although its files may be gone."""
        self._models.setdefault(model.name, model)

    @property
    def loaded(self) -> list[Model]:
        """The models that are loaded."""
        return [model for model in self._models.values() if model.edge is not None]

    @property
    def waited_for(self) -> list[Model]:
        """The models that requests wait for."""
        return [model for model in self._models.values() if model.waiters]

    async def all(self) -> list[Model]:
        """Return the models that the folder has now, by name.

        Raises:
            ApiError: the folder cannot be read.
        """
        try:
            found = await call_in_thread(self.directory.find)
        except OSError as error:
            logger.error("the models cannot be listed: %s", error)
            raise ApiError(500, f"the models cannot be listed: {error.strerror}") from error
        kept = {m.name: m for m in self._models.values() if m.edge or m.is_coming or m.waiters}
        for name, path in found.items():
            known = self._models.get(name)
            if name not in kept:
                kept[name] = known if known and known.path == path else Model(name, path)
        self._models = {name: kept[name] for name in sorted(kept)}
        return list(self._models.values())

    async def find(self, name: str) -> Model:
        """Return a model by its name, or raise the 404 of an unknown model."""
        for each in (name, name.removesuffix(LATEST)):
            known = self._models.get(each)
            if known is not None and known.is_ready:
                return known
        await self.all()
        for each in (name, name.removesuffix(LATEST)):
            if each in self._models:
                return self._models[each]
        raise no_model(name, self._models)

    async def only(self) -> Model:
        """Return the only model, or else the only loaded model, or raise a 400."""
        models = await self.all()
        for each in (models, self.loaded):
            if len(each) == 1:
                return each[0]
        raise invalid(f"model is missing; this server has {', '.join(self._models)}", "model")

    async def describe(self, model: Model) -> ModelFiles | None:
        """Return the facts in the files of a model, or None if it cannot be used."""

        def read() -> ModelFiles | None:
            changed = tuple(map(_changed, (model.path, model.path / "config.json")))
            known = self._files.get(model.path)
            if known is None or known[0] != changed:
                files = None
                try:
                    files = self.directory.describe(model.path)
                except Exception as error:  # one model that is broken must not hide the others
                    logger.warning("%s cannot be described: %s", model.name, error)
                known = self._files[model.path] = (changed, files)
            return known[1]

        return await call_in_thread(read)


def _changed(path: Path) -> float:
    """Return when a file changed last, or 0 if it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
