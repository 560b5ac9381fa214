"""Hold the settings of an engine that is to be loaded, and make the effective ones."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from mie.config.engine import EngineConfig
from mie.config.engine_args import EngineArgs
from mie.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """The settings with which an engine is loaded, spelled as in `EngineArgs`."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """Settings of the engine as a caller gives them."""
    backend: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    """The source of the weights: "auto" are files, and "dummy" random numbers from the seed."""
    quantization: str | None = None
    head_dtype: str = "auto"
    tensor_parallel_size: int = 1

    @classmethod
    def of(cls, args: EngineArgs) -> LoadSettings:
        """Return the settings among the arguments of `LLM`."""
        own = ("backend", "load_format", "quantization", "head_dtype", "tensor_parallel_size")
        values = {name: getattr(args, name) for name in own}
        return cls(engine=args.engine_config(), dtype=args.dtype_name, **values)

    def with_setting(self, name: str, value: Any) -> LoadSettings:
        """Return the settings with another value of one. It may be a setting of the engine."""
        changes = {name: value}
        if name in {each.name for each in fields(self)}:
            return replace(self, **changes)
        return replace(self, engine=replace(self.engine, **changes))


def check_states(config: EngineConfig, *, has_states: bool) -> None:
    """Refuse settings that recurrent layers do not allow, or that only recurrent layers have.

    Raises:
        ConfigError: such a setting is given.
    """
    if has_states and config.async_scheduling:  # a token that is discarded would stay in the state
        raise ConfigError(
            "async_scheduling=True is not supported with recurrent layers (leave it out)"
        )
    if has_states and config.enable_prefix_caching and not config.enable_chunked_prefill:
        raise ConfigError(
            "enable_prefix_caching=True needs enable_chunked_prefill=True with recurrent layers: "
            "chunks end where a state is kept (set enable_prefix_caching=False, or chunk prompts)"
        )
    for name in () if has_states else ("state_memory", "state_snapshot_distance"):
        value = getattr(config, name)
        if value != getattr(EngineConfig, name):
            raise ConfigError(
                f"{name} is {value}; the model has no recurrent layers (leave it out)"
            )


def effective_config(
    config: EngineConfig, num_states: int, *, is_asynchronous: bool
) -> EngineConfig:
    """Return the settings with which an engine runs.

    With slots for recurrent states, steps do not overlap, and at most as many sequences run as
    there are slots. Elsewhere steps overlap by default if the backend ``is_asynchronous``.
    """
    overlaps = config.async_scheduling
    if overlaps is None:
        overlaps = is_asynchronous and not num_states
    max_num_seqs = min(config.max_num_seqs, num_states or config.max_num_seqs)
    return replace(config, async_scheduling=overlaps, max_num_seqs=max_num_seqs)
