"""Load the weights of a model into a backend, layer by layer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mie.errors import WeightsError
from mie.model.config import ModelConfig, Names, RecurrentConfig
from mie.model.layout import CacheLayout, Place
from mie.model.mixers import Attention, Mixer, Recurrence
from mie.model.rope import rope_channels
from mie.ops.backend import Array, Backend, HeadWeights
from mie.ops.weights.quantised import Form, QuantisedRows, Rows

Order = NDArray[np.intp]
"""Rows of a matrix, in an order."""

BLOCK_BYTES = 4 << 20
"""Bytes of the checkpoint that are converted at a time: little for any model."""


class Weights(Protocol):
    """The tensors of a model by their Hugging Face names, as `mie.checkpoint` reads them."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all tensors. A matrix is [output features, input features]."""

    @property
    def forms(self) -> Mapping[str, Form]:
        """The forms of the quantised matrices. All other tensors are floats."""

    @property
    def norms_hold_one(self) -> bool:
        """Whether the weights of norms already have the offset of their family."""

    def blocks(self, name: str, max_bytes: int) -> Iterator[Rows]:
        """Yield a tensor in blocks along its first axis, of at most so many bytes in the file."""

    def check_values(self, name: str, block: Rows) -> None:
        """Raise `WeightsError` if a block of a tensor has a value that is not usable."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """The weights of one layer, as the backend keeps them."""

    mixer: Mixer
    mixer_post_norm: Array | None
    mlp_norm: Array | None
    gate_up: Array | None  # of the MLP, which sparse layers may not have
    down: Array | None
    experts: Any  # of the backend's `ExpertOperators.load`, or None
    shared_gate: Array | None  # [1, D], of the MLP beside experts
    mlp_post_norm: Array | None


@dataclass(frozen=True, eq=False)
class Loader:
    """Reads a checkpoint tensor by tensor into the backend, and releases the file's pages."""

    config: ModelConfig
    backend: Backend
    checkpoint: Weights
    eps: float
    progress: Callable[[int], object]
    rounded_to: np.dtype[Any] | None
    layout: CacheLayout

    @cached_property
    def channels(self) -> NDArray[np.intp] | None:
        """The order of a head's channels that backends rotate, or None if it is the file's."""
        head_dim, ropes = self.config.head_dim, self.config.layer_ropes
        [*counts] = {rope.num_pairs(head_dim) for rope in ropes if rope is not None}
        if not counts:
            return None
        order = rope_channels(head_dim, counts[0], self.config.rope_is_interleaved)
        return None if (np.diff(order) == 1).all() else order

    def layer(self, index: int, rope: Array) -> Layer:
        """Load a layer with these rotations."""
        prefix = f"model.layers.{index}."
        config, names = self.config, self.config.names_of(index)
        recurrent = config.recurrent if config.layers_recurrent[index] else None
        number = config.layers_recurrent[:index].count(recurrent is not None)
        return Layer(
            mixer=self._attention(
                prefix, self.layout.places[number], rope, config.layer_windows[index]
            )
            if recurrent is None
            else self._recurrence(prefix, number, recurrent, names),
            mixer_post_norm=self.norm(prefix, names.attention_post_norm),
            mlp_norm=self.norm(prefix, names.mlp_norm),
            gate_up=self.linear(prefix, *names.gate_up) if config.has_mlp(index) else None,
            down=self.linear(prefix, names.down) if config.has_mlp(index) else None,
            experts=self.experts(prefix) if config.has_experts(index) else None,
            shared_gate=self.linear(prefix, names.shared_gate) if names.shared_gate else None,
            mlp_post_norm=self.norm(prefix, names.mlp_post_norm),
        )

    def _attention(self, prefix: str, place: Place, rope: Array, window: int | None) -> Attention:
        """Load attention. Gates are in the matrix of queries: [query, gate] for each head."""
        config, names = self.config, self.config.names
        q_norm, k_norm, rotated_norm = self._head_norms(prefix)
        norm, gate, queries = self.norm(prefix, names.attention_norm), None, None
        if config.gates_attention:
            rows = np.arange(2 * config.num_heads * config.head_dim)
            queries, gates = rows.reshape(config.num_heads, 2, -1).swapaxes(0, 1).reshape(2, -1)
            gate = self.selected(prefix, [(names.qkv[0], gates)])
        heads = HeadWeights(
            norm=None if config.gates_attention else norm,
            qkv=self.selected(prefix, self._head_rows(prefix, queries)),
            q_norm=q_norm,
            k_norm=k_norm,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=self.eps,
        )
        return Attention(
            group=place.group,
            index=place.number,
            heads=heads,
            gate=gate,
            gated_norm=norm if config.gates_attention else None,
            rope=rope,
            rotated_norm=rotated_norm,
            rotated_eps=config.rms_norm_eps,
            window=window,
            soft_cap=config.attention_soft_cap,
            sinks=self._sinks(prefix),
            out=self.linear(prefix, names.attention_out),
        )

    def _sinks(self, prefix: str) -> Array | None:
        """Load the sinks of heads. They are in the dtype of other vectors."""
        name = self.config.names.sinks
        return None if name is None else self.backend.load_vector(self._read(prefix + name))

    def _head_rows(self, prefix: str, queries: Order | None) -> list[tuple[str, Order | None]]:
        """Return the matrices of queries, keys and values, each with its rows in order.

        ``queries`` are the rows of the first matrix, if they are not all. The channels of queries
        and keys come in the order that backends rotate.
        """
        left = (self.config.num_heads + self.config.num_kv_heads) * self.config.head_dim
        channels, parts = self.channels, []
        for name in self.config.names.qkv:
            order = queries
            if channels is not None:
                if order is None:
                    order = np.arange(self.checkpoint.shapes[f"{prefix}{name}.weight"][0])
                order[:left] = order[:left].reshape(-1, len(channels))[:, channels].ravel()
                left = max(0, left - len(order))
            parts.append((name, order))
            queries = None
        return parts

    def _recurrence(
        self, prefix: str, number: int, recurrent: RecurrentConfig, names: Names
    ) -> Recurrence:
        """Load a recurrent layer. ``A_log`` becomes a rate of decay."""
        family, kind, load = recurrent.family, recurrent.shape.kind, self.backend.load_vector
        vectors: dict[str, Any] = {
            name: self._read(prefix + family.vectors + name).astype(np.float64)
            for name in recurrent.vectors
        }
        if kind != "conv":
            vectors["A_log"] = np.exp(vectors["A_log"])
        arrays = {name: load(vector) for name, vector in vectors.items()}
        kernels = [self._read(f"{prefix}{name}.weight")[:, 0] for name in family.conv]
        biases = [f"{prefix}{name}.bias" for name in family.conv if recurrent.conv_bias]
        norm = family.norm and load(self._read(f"{prefix}{family.norm}.weight"))
        parts = {
            part: [(name, np.array([*chain(*ranges)])) for name, ranges in selections]
            for part, selections in recurrent.projections().items()
        }
        return Recurrence(
            index=number,
            norm=self.norm(prefix, names.attention_norm),
            eps=self.eps,
            mixed=self.selected(prefix, parts["mixed"]),
            gate=self.selected(prefix, parts["gate"]) if "gate" in parts else None,
            small=self.selected(prefix, parts["small"]) if "small" in parts else None,
            weights=self.backend.recurrent.load(
                shape=recurrent.shape,
                conv=load(np.concatenate(kernels).T.ravel()),
                conv_bias=load(np.concatenate([self._read(each) for each in biases]))
                if biases
                else None,
                rates=arrays.get("A_log"),
                dt_bias=arrays.get("dt_bias"),
                skip=arrays.get("D"),
                most=recurrent.largest_beta,
                norm=norm,
                norm_size=recurrent.norm_size,
                gates_first=kind == "mamba",
                eps=recurrent.norm_eps,
            ),
            out=self.linear(prefix, family.out),
        )

    def experts(self, prefix: str) -> Any:
        """Load the experts of a layer and their router."""
        config, names = self.config, self.config.names
        assert config.experts is not None
        # A matrix may have the rows of gate and up in turns.
        rows = np.arange(2 * config.experts.size)
        order = rows.reshape(-1, 2).T.ravel() if names.experts_take_turns else None
        gate_up, down, bias = [], [], None
        if names.router_bias is not None:
            bias = np.zeros(config.experts.number)
            if config.experts.has_router_bias:
                bias = self._read(prefix + names.router_bias)
        for expert in range(config.experts.number):
            own = [(name.format(expert), order) for name in names.expert_gate_up]
            gate_up.append(self.selected(prefix, own))
            down.append(self.linear(prefix, names.expert_down.format(expert)))
        return self.backend.experts.load(
            router=self.linear(prefix, names.router),
            gate_up=gate_up,
            down=down,
            number=config.experts.number,
            num_chosen=config.experts.num_chosen,
            is_normalised=config.experts.is_normalised,
            activation=config.experts.activation,
            bias=None if bias is None else self.backend.load_vector(bias),
        )

    def norm(self, prefix: str, name: str | None, scale: float = 1.0) -> Array | None:
        """Load the weights of a norm, with the offset and a factor in them."""
        if name is None:
            return None
        return self.backend.load_vector(self._norm_weights(prefix + name) * scale)

    def _head_norms(self, prefix: str) -> tuple[Array | None, Array | None, Array | None]:
        """Load the norms of queries and keys before RoPE, and of queries after it.

        A rotation keeps lengths, so only the weights distinguish a norm after it from a norm before
        it. The weights of keys are a factor of the products with queries, and go there.
        """
        if self.config.qk_norm is None:
            return None, None, None
        names = self.config.names
        q, k = (self._norm_weights(prefix + name) for name in (names.q_norm, names.k_norm))
        load = self.backend.load_vector
        if self.config.qk_norm == "rotated head":
            return None, load(np.ones_like(k)), load(q * k)
        if self.channels is not None:
            q, k = q[self.channels], k[self.channels]
        return load(q), load(k), None

    def _norm_weights(self, name: str) -> NDArray[Any]:
        weights = self._read(name + ".weight").astype(np.float64)
        return weights + (0 if self.checkpoint.norms_hold_one else self.config.norm_offset)

    def embedding(self, name: str) -> Array:
        """Load the embedding table."""
        rows, columns = self.checkpoint.shapes[name]
        form = self.checkpoint.forms.get(name)
        return self.backend.load_embedding((rows, columns), self._rows([name]), form)

    def linear(self, prefix: str, *names: str) -> Array:
        """Load the named matrices as one fused matrix."""
        return self.selected(prefix, [(name, None) for name in names])

    def selected(self, prefix: str, parts: Sequence[tuple[str, Order | None]]) -> Array:
        """Load rows of matrices as one matrix: the rows of an order, or all as they are."""
        weights = [(f"{prefix}{name}.weight", order) for name, order in parts]
        biases = [(f"{prefix}{name}.bias", order) for name, order in parts]
        biases = [(name, order) for name, order in biases if name in self.checkpoint.shapes]
        counts = [
            self.checkpoint.shapes[name][0] if order is None else len(order)
            for name, order in weights
        ]
        bias = np.concatenate(list(self._ordered(biases))) if biases else None
        forms = [self.checkpoint.forms.get(name) for name, _ in weights]
        return self.backend.load_linear(
            (sum(counts), self.checkpoint.shapes[weights[0][0]][1]),
            self._ordered(weights),
            bias,
            list(zip(counts, forms, strict=True)),
        )

    def _ordered(self, parts: Iterable[tuple[str, Order | None]]) -> Iterator[Rows]:
        """Yield rows of tensors in blocks. Rows in an order come as one block."""
        for name, order in parts:
            if order is None:
                yield from self._rows([name])
            else:
                share = len(order) / self.checkpoint.shapes[name][0]
                yield ordered(list(self._rows([name], share)), order)

    def _read(self, name: str) -> NDArray[Any]:
        return np.concatenate(list(self._rows([name])))

    def _rows(self, names: Iterable[str], share: float = 1) -> Iterator[Rows]:
        """Yield tensors in blocks. ``share`` is the part of them that is used."""
        for name in names:
            for block in self.checkpoint.blocks(name, BLOCK_BYTES):
                self.checkpoint.check_values(name, block)
                yield self._rounded(name, block)
                self.progress(int(block.nbytes * share))

    def _rounded(self, name: str, block: Rows) -> Rows:
        """Return the block in the dtype that weights are rounded to, unless it is quantised."""
        rounded_to = self.rounded_to
        if isinstance(block, QuantisedRows) or rounded_to is None or block.dtype == rounded_to:
            return block
        with np.errstate(over="ignore"):
            rounded = block.astype(rounded_to)
        if not np.isfinite(rounded).all():
            raise WeightsError(
                f"tensor {name!r} holds values that {rounded_to.name} does not have (use "
                "dtype='bfloat16' or 'float32')"
            )
        return rounded


def ordered(blocks: Sequence[Rows], order: NDArray[np.intp]) -> Rows:
    """Return the rows of some blocks as one block, in another order."""
    if isinstance(blocks[0], QuantisedRows):
        quantised = [block for block in blocks if isinstance(block, QuantisedRows)]
        return QuantisedRows.joined(quantised).take(order)
    floats = [block for block in blocks if not isinstance(block, QuantisedRows)]
    joined: NDArray[Any] = np.concatenate(floats)[order]
    return joined
