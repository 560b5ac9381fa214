"""Plan an engine: its effective settings, and the memory of weights, a step, and the cache.

Everything is computed before anything is loaded, so a configuration that does not fit costs no
time. The error has a table of the memory that each part needs, and names settings that fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from mie.base.arithmetic import ceil_div
from mie.base.resources import available_bytes
from mie.checkpoint.tensors import expected_tensors
from mie.config.engine import EngineConfig
from mie.errors import ConfigError, TooLittleMemoryError
from mie.load.adapters import slot_shapes
from mie.load.settings import check_states, effective_config
from mie.memory.layers.window import Window
from mie.model.config import ModelConfig
from mie.model.layout import CacheLayout, grouped, whole
from mie.ops.backend import Backend, KVCacheShape, Memory, StepSize
from mie.ops.weights.quantised import Form
from mie.sched.speculation import most_sampled

Forms = Mapping[str, Form]
"""The forms of quantised tensors by name. All others are floats."""

FLOATS: Forms = {}

DEFAULT_KV_CACHE_BYTES = 4 << 30
"""Default maximum of the KV cache in memory that other programs share.

It is also at most a quarter of the memory that is left there. A GPU's own memory may be filled.
"""

DEFAULT_CONTEXTS, DEFAULT_TOKENS = 2, 512
"""The default contents of the KV cache, in memory that other programs share.

These are so many contexts of ``max_model_len``, or so many tokens for each of ``max_num_seqs``.
"""

DEFAULT_SWAP_BYTES = 4 << 30
"""Default maximum of host memory for swapped blocks, and at most a quarter of the rest."""

DEFAULT_ANSWER_BYTES = 256 << 20
"""Default maximum of memory for log-probabilities of answers, and at most an eighth of the rest.

A server's ``max_answer_bytes`` replaces it.
"""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The effective settings of an engine, and the sizes of its parts."""

    config: EngineConfig
    """Settings with which the engine runs (`effective_config`)."""
    backend: str
    memory: Memory
    max_model_len: int
    block_bytes: int
    weight_bytes: int
    adapter_bytes: int
    """Bytes of the slots of adapters."""
    step_bytes: int
    """Estimated bytes of the results of a full step, with attention's partial results."""
    num_states: int
    """Slots of recurrent states: of running sequences, and snapshots. 0 if the model has none."""
    state_bytes: int
    """Bytes of a slot."""
    num_blocks: int
    reason: str
    """Why there are so many blocks, in words."""
    num_host_blocks: int
    num_host_states: int
    """Slots for the states of swapped-out sequences."""
    layout: CacheLayout
    num_ranks: int = 1
    """Number of ranks. All sizes are of each rank, and the memory is its share."""
    window: Window | None
    """The window of layers with blocks to free behind it, if the layout has groups."""

    @property
    def num_positions(self) -> int:
        """The maximum number of tokens of a sequence."""
        return min(self.max_model_len, self.capacity(self.num_blocks))

    def capacity(self, num_blocks: int) -> int:
        """Return how many tokens of one sequence fit in a number of blocks."""
        if self.window:
            return self.window.capacity(num_blocks)
        return num_blocks * self.config.block_size

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory for swapped-out sequences."""
        return self.num_host_blocks * self.block_bytes + self.num_host_states * self.state_bytes

    @property
    def left_bytes(self) -> int:
        """The bytes that all else leaves for the KV cache. Negative if it does not fit."""
        host_bytes = self.host_bytes if self.memory.is_shared else 0
        needed = self.weight_bytes + self.adapter_bytes + self.step_bytes
        needed += self.num_states * self.state_bytes
        return self.memory.available_bytes - needed - host_bytes

    @property
    def total_bytes(self) -> int:
        """The bytes that the model takes in all ranks."""
        left = self.left_bytes - self.num_blocks * self.block_bytes
        return self.num_ranks * (self.memory.available_bytes - left)

    @property
    def answer_bytes(self) -> int:
        """The bytes that are left for the log-probabilities of all answers together."""
        left = available_bytes()
        if self.memory.is_shared:
            left = self.left_bytes - self.num_blocks * self.block_bytes
        return max(0, min(DEFAULT_ANSWER_BYTES, left // 8))

    @property
    def fits(self) -> bool:
        """Whether all of it fits at once."""
        return self.num_blocks * self.block_bytes <= self.left_bytes

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Raise `TooLittleMemoryError` if an allocation fails while loading."""
        try:
            yield
        except MemoryError as error:
            message = f"the {self.backend} backend could not get the memory it needs:\n"
            remedy = "lower num_blocks, kv_cache_memory_bytes or max_model_len"
            raise TooLittleMemoryError(f"{message}{self.table()}\n({remedy})") from error

    def refusal(self, remedies: Sequence[str]) -> TooLittleMemoryError:
        """Return the error for a plan that does not fit. The ``remedies`` are settings that do."""
        remedy = "; or ".join(remedies) + " fits" if remedies else ""
        return TooLittleMemoryError(
            f"not enough memory for the {self.backend} backend:\n{self.table()}\n"
            f"({remedy or 'end other programs, or use a smaller model'})"
        )

    def cache_line(self) -> str:
        """Return the size of the KV cache and the reason of it, in a line."""
        size = self.num_blocks * self.block_bytes / 2**20
        return (
            f"the KV cache has {self.num_blocks} blocks: {size:,.1f} MiB if all are used, and "
            f"{self.capacity(self.num_blocks):,} tokens ({self.reason})"
        )

    def table(self) -> str:
        """Return a table of the memory that each part needs."""
        cache = f"KV cache, {self.num_blocks} blocks of {self.config.block_size} tokens"
        cache += f" in {self.layout.num_layers} layers" if self.window else ""
        rows = [
            ("weights", self.weight_bytes),
            (f"step of {self.config.max_num_batched_tokens} tokens (estimate)", self.step_bytes),
            (cache, self.num_blocks * self.block_bytes),
        ]
        if self.adapter_bytes:
            rows.append((f"slots of adapters, {self.config.max_loras}", self.adapter_bytes))
        if self.num_states:
            rows.append((f"{self.num_states} slots of states", self.num_states * self.state_bytes))
        if self.host_bytes and self.memory.is_shared:
            rows.append((f"host memory for {self.num_host_blocks} swapped blocks", self.host_bytes))
        of_each = f" of each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        rows.append((f"total{of_each}", sum(num_bytes for _, num_bytes in rows)))
        rows.append((f"available{of_each and ' to each'}", self.memory.available_bytes))
        if self.fits:
            rows.append(("log-probabilities of answers, at most", self.answer_bytes))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:<{width}} {size / 2**20:>14,.1f} MiB" for name, size in rows)


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    backend: Backend,
    forms: Forms = FLOATS,
    memory: Memory | None = None,
) -> MemoryPlan:
    """Choose the number of blocks: the requested one, or enough for every sequence if it fits.

    The plan may need more memory than there is (`MemoryPlan.fits`). It divides ``memory``, by
    default all memory of the backend.

    Raises:
        ConfigError: a setting is beyond the model, or less than one block.
    """
    check_states(config, has_states=model.recurrent is not None)
    max_model_len, memory = _max_model_len(config, model), memory or backend.memory()
    layout, window = layout_of(config, model, max_model_len)
    block_bytes = backend.kv_cache_bytes(cache_shape(model, 1, config.block_size, layout))
    weight_bytes = sum(
        backend.weight_bytes(shape, forms.get(name))
        for name, shape in expected_tensors(model).items()
    )
    size = step_size(config, model, max_model_len, layout.num_groups)
    step_bytes = backend.step_bytes(replace(size, is_quantised=bool(forms)))
    adapter_bytes = 0
    if config.enable_lora:
        slots = slot_shapes(config, model)
        adapter_bytes = sum(map(backend.adapters.slot_bytes, slots))
        step_bytes += backend.adapters.step_bytes(slots, size.num_tokens)
    left = max(0, memory.available_bytes - weight_bytes - adapter_bytes - step_bytes)
    # One budget covers blocks and states.
    budget = min(DEFAULT_KV_CACHE_BYTES, left // 4) if memory.is_shared else left
    state_bytes = _state_bytes(model, backend)
    num_states = num_states_of(config, state_bytes, budget)
    taken = num_states * state_bytes
    lengths = max_model_len, min(max_model_len, DEFAULT_TOKENS), 1
    needed = [blocks_needed(config, model, [length]) for length in lengths]
    affordable = max(0, budget - taken) // block_bytes
    num_blocks, reason = _num_blocks(config, needed, block_bytes, affordable, memory.is_shared)
    taken += num_blocks * block_bytes
    host_left = left - taken if memory.is_shared else available_bytes()
    num_host_blocks, num_host_states = sizes_on_host(config, block_bytes, state_bytes, host_left)
    if config.preemption_mode != "swap":  # no more is read from a disk than the device can hold
        num_host_blocks = min(num_host_blocks, num_blocks)
    return MemoryPlan(
        config=effective_config(config, num_states, is_asynchronous=backend.is_asynchronous),
        backend=backend.name,
        memory=memory,
        max_model_len=max_model_len,
        block_bytes=block_bytes,
        weight_bytes=weight_bytes,
        adapter_bytes=adapter_bytes,
        step_bytes=step_bytes,
        num_states=num_states,
        state_bytes=state_bytes,
        num_blocks=num_blocks,
        reason=reason,
        num_host_blocks=num_host_blocks,
        num_host_states=num_host_states,
        layout=layout,
        window=window,
        num_ranks=getattr(backend, "num_ranks", 1),
    )


def layout_of(
    config: EngineConfig, model: ModelConfig, max_model_len: int
) -> tuple[CacheLayout, Window | None]:
    """Return the layout in which a sequence of ``max_model_len`` tokens takes the least memory."""
    layout = grouped(model)
    if layout.window is None:
        return layout, None
    budget, chunk = config.max_num_batched_tokens, None
    if config.enable_chunked_prefill:
        chunk = config.max_prefill_chunk
    forced = min(budget, config.max_forced_run + 1)
    window = Window(
        size=layout.window,
        num_groups=layout.num_groups - 1,
        block_size=config.block_size,
        max_chunk=max(2, forced, chunk or budget),
    )
    num_whole = ceil_div(max_model_len, config.block_size) * model.num_attention_layers
    if window.blocks_needed(max_model_len) * layout.num_layers < num_whole:
        return layout, window
    return whole(model), None


def blocks_needed(config: EngineConfig, model: ModelConfig, lengths: Iterable[int]) -> int:
    """Return the number of blocks that sequences of these numbers of tokens take at once.

    Raises:
        ConfigError: ``max_model_len`` is beyond the model.
    """
    _, window = layout_of(config, model, _max_model_len(config, model))
    if window is not None:
        return sum(map(window.blocks_needed, lengths))
    return sum(ceil_div(length, config.block_size) for length in lengths)


def cache_shape(
    model: ModelConfig, num_blocks: int, block_size: int, layout: CacheLayout | None = None
) -> KVCacheShape:
    """Return the shape of a cache of the model's keys and values. By default a block has all."""
    return KVCacheShape(
        num_layers=layout.num_layers if layout else model.num_attention_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )


def _state_bytes(model: ModelConfig, backend: Backend) -> int:
    """Return the bytes of a sequence's recurrent states, or 0 if the model has none."""
    if model.recurrent is None:
        return 0
    layer_bytes: int = backend.recurrent.state_bytes(model.recurrent.shape)
    return layer_bytes * model.layers_recurrent.count(True)


def num_states_of(config: EngineConfig, state_bytes: int, budget: int) -> int:
    """Return the number of slots: for each sequence its own, and three snapshots.

    They take at most half of the budget, unless ``state_memory`` gives their bytes.
    """
    if not state_bytes:
        return 0
    if config.state_memory is not None:
        if config.state_memory < state_bytes:
            raise ConfigError(
                f"state_memory is {config.state_memory}; the recurrent states of one sequence "
                f"take {state_bytes} (raise it to at least that)"
            )
        return config.state_memory // state_bytes
    wanted = config.max_num_seqs * (4 if config.enable_prefix_caching else 1)
    return max(1, min(wanted, budget // 2 // state_bytes))


def step_size(
    config: EngineConfig, model: ModelConfig, max_model_len: int, num_groups: int = 1
) -> StepSize:
    """Return the size of the largest step."""
    layers, num_seqs = range(model.num_layers), config.max_num_seqs
    if config.speculative_config is not None:
        num_seqs = most_sampled(num_seqs)
    return StepSize(
        num_tokens=config.max_num_batched_tokens,
        num_seqs=min(config.max_num_batched_tokens, num_seqs),
        max_len=max_model_len,
        hidden_size=model.hidden_size,
        intermediate_size=max(map(model.mlp_size, filter(model.has_mlp, layers)), default=0),
        vocab_size=model.vocab_size,
        num_heads=model.num_heads,
        num_chosen=model.experts.num_chosen if model.experts else 0,
        expert_size=model.experts.size if model.experts else 0,
        cache=cache_shape(model, 1, config.block_size),
        gates_attention=model.gates_attention,
        num_recurrent_results=model.recurrent.shape.num_results if model.recurrent else 0,
        num_groups=num_groups,
        num_layers=model.num_layers,
    )


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.default_context_length
    if config.max_model_len > model.context_length:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the model's context is "
            f"{model.context_length} (lower max_model_len)"
        )
    return config.max_model_len


def _num_blocks(
    config: EngineConfig, needed: Sequence[int], block_bytes: int, affordable: int, is_shared: bool
) -> tuple[int, str]:
    """Return the number of blocks, and the reason.

    A sequence needs so many at the maximum length, with `DEFAULT_TOKENS`, and with one token.
    """
    of_a_sequence, of_some, of_a_token = needed
    given, seats = config.num_blocks, config.max_num_seqs
    if config.kv_cache_memory_bytes is not None:
        given = _blocks_of(config.kv_cache_memory_bytes, config, block_bytes)
    if given is not None:
        if given < of_a_token:
            raise ConfigError(
                f"the KV cache has {given} blocks; the model's layers are in {of_a_token} groups, "
                f"and a token takes a block of each (raise num_blocks to at least {of_a_token})"
            )
        return given, "as the settings say"
    contexts = seats
    if is_shared:  # what is not needed is left to other programs
        contexts = min(seats, DEFAULT_CONTEXTS)
    wanted, reason = contexts * of_a_sequence, f"room for {contexts} × max_model_len"
    if seats * of_some > wanted:
        wanted = seats * of_some
        reason = f"room for {seats} sequences of at most {DEFAULT_TOKENS} tokens"
    # Keep a length that was asked for. The model's own is only a maximum.
    at_least = of_a_token if config.max_model_len is None else of_a_sequence
    most = max(at_least, affordable)
    if wanted <= most:
        return wanted, reason
    if most > affordable:
        return most, "room for the max_model_len of the settings"
    share = "4 GiB, and a quarter of the memory that is left" if is_shared else "the memory left"
    return most, f"at most {share}"


def sizes_on_host(
    config: EngineConfig, block_bytes: int, state_bytes: int, left: int
) -> tuple[int, int]:
    """Return the number of blocks and of states that fit the swap pool.

    States take at most a quarter of it, but at least one fits.
    """
    if config.preemption_mode != "swap" and config.prefix_cache_dir is None:
        return 0, 0  # nothing is swapped out, and nothing is read from a disk
    size = config.swap_space
    if size is None:
        size = max(0, min(DEFAULT_SWAP_BYTES, left // 4))
    elif size < block_bytes + state_bytes:
        raise ConfigError(
            f"swap_space is {size}; one block of {config.block_size} tokens"
            f"{' and a state take' if state_bytes else ' takes'} {block_bytes + state_bytes} "
            "(raise it to at least that, or lower block_size)"
        )
    num_states = 0
    if state_bytes:
        num_states = min(config.max_num_seqs, max(1, size // 4 // state_bytes))
    return max(0, size - num_states * state_bytes) // block_bytes, num_states


def _blocks_of(num_bytes: int, config: EngineConfig, block_bytes: int) -> int:
    """Return the number of blocks that fit in ``kv_cache_memory_bytes``."""
    if num_bytes < block_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes is {num_bytes}; one block of {config.block_size} tokens takes "
            f"{block_bytes} (raise it to at least that, or lower block_size)"
        )
    return num_bytes // block_bytes
