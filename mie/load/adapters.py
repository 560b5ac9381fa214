"""Load and unload the adapters of an engine, and find them by name."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from mie.checkpoint.adapters import AdapterFile, read_adapter
from mie.checkpoint.tensors import expected_tensors
from mie.config.adapters import LoRARequest
from mie.config.engine import EngineConfig
from mie.engine.engine import Engine
from mie.errors import RequestError, shown_text
from mie.model.config import ModelConfig
from mie.model.layers.adapters import AdapterSlots, adapted_matrices
from mie.ops.adapters.low_rank import SlotShape


@dataclass(eq=False)
class Adapter:
    """A loaded adapter."""

    request: LoRARequest
    slot: int
    digest: str
    is_loaded: bool = True
    """Whether it may get new requests. The engine's thread changes this."""

    def salt(self, cache_salt: str | None) -> str:
        """Return the salt of requests with this adapter. Equal adapters have equal salts."""
        return hashlib.sha256(f"lora\0{self.digest}\0{cache_salt or ''}".encode()).hexdigest()


class Adapters:
    """The loaded adapters of an engine.

    `read` may be called in any thread. The thread that runs the engine's steps calls `add` and
    `remove` between two steps.
    """

    def __init__(
        self, slots: AdapterSlots, model: ModelConfig, config: EngineConfig, engine: Engine
    ) -> None:
        names = {name for matrix in adapted_matrices(model) for name in matrix}
        shapes = expected_tensors(model)
        self._slots, self._engine = slots, weakref.proxy(engine)
        self._num_slots = config.max_loras
        self._read = partial(
            read_adapter,
            shapes={name: shapes[name] for name in shapes if name in names},
            model=model,
            max_rank=config.max_lora_rank,
        )
        self._by_name: dict[str, Adapter] = {}

    def __iter__(self) -> Iterator[Adapter]:
        """Iterate over the loaded adapters."""
        return iter([*self._by_name.values()])

    def read(self, request: LoRARequest) -> AdapterFile:
        """Read and check the files of an adapter.

        Raises:
            ModelError: they cannot be used with this model.
        """
        return self._read(request.lora_path)

    def get(self, name: str) -> Adapter | None:
        """Return a loaded adapter, or None."""
        return self._by_name.get(name)

    def find(self, request: LoRARequest) -> Adapter | None:
        """Return the loaded adapter of a request, or None if it must be loaded first.

        Raises:
            RequestError: another adapter has its name or its number.
        """
        for adapter in [*self._by_name.values()]:
            loaded = adapter.request
            if loaded == request:
                return adapter
            if loaded.lora_name == request.lora_name or loaded.lora_int_id == request.lora_int_id:
                raise RequestError(
                    f"lora_request is {_described(request)}, and {_described(loaded)} is loaded "
                    "(choose another name and another number, or remove the loaded adapter)"
                )
        return None

    @property
    def next_id(self) -> int:
        """The number of an adapter that is loaded by name alone."""
        return 1 + max((each.request.lora_int_id for each in self._by_name.values()), default=0)

    def add(self, request: LoRARequest, file: AdapterFile) -> Adapter:
        """Put an adapter that was read into a free slot, and return it.

        Raises:
            RequestError: no slot is free, or another adapter has its name or its number.
        """
        if (adapter := self.find(request)) is not None:
            return adapter
        taken = {each.slot for each in self._by_name.values()} | {
            request.adapter for request in self._engine.requests
        }
        free = [slot for slot in range(1, self._num_slots + 1) if slot not in taken]
        if not free:
            names = ", ".join(map(shown_text, self._by_name)) or "none"
            raise RequestError(
                f"adapter {shown_text(request.lora_name)} finds no slot: max_loras is "
                f"{self._num_slots}; loaded: {names}, and requests of a removed adapter keep its "
                "slot until they end (raise max_loras, or remove an adapter)"
            )
        self._slots.put(free[0], file.changes)
        adapter = Adapter(request=request, slot=free[0], digest=file.digest)
        self._by_name[request.lora_name] = adapter
        return adapter

    def remove(self, name: str) -> bool:
        """Refuse new requests of an adapter. Return False if it is not loaded.

        Its running requests end as usual, and then its slot is free.
        """
        adapter = self._by_name.pop(name, None)
        if adapter is not None:
            adapter.is_loaded = False
        return adapter is not None


def _described(request: LoRARequest) -> str:
    path = shown_text(request.lora_path)
    return f"{shown_text(request.lora_name)} with number {request.lora_int_id} of {path}"


def slot_shapes(config: EngineConfig, model: ModelConfig) -> list[SlotShape]:
    """Return the shapes of the slots of each matrix that adapters change, for the memory plan."""
    shapes = expected_tensors(model)
    return [
        SlotShape(
            num_inputs=shapes[names[0]][1],
            counts=tuple(shapes[name][0] for name in names),
            num_slots=config.max_loras,
            max_rank=config.max_lora_rank,
        )
        for names in adapted_matrices(model)
    ]
