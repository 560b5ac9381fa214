"""Divide the matrices of a model among ranks, always by outputs.

An output of a product is computed whole by one rank, so no sum is ever divided. Results are
gathered where an operator needs all of them. The bits then do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mie.checkpoint.changed import sliced
from mie.checkpoint.weights import Checkpoint
from mie.errors import ConfigError
from mie.model.config import ModelConfig, Names
from mie.ops.adapters.low_rank import LowRank

Rows = Sequence[range]
"""Rows of a tensor, in rising order."""


@dataclass(frozen=True)
class Share:
    """The part of a model that a rank has."""

    rank: int
    num_ranks: int

    def part(self, number: int, begin: int = 0) -> range:
        """Return the rank's part of so many outputs, from ``begin`` on."""
        first, end = (number * rank // self.num_ranks for rank in (self.rank, self.rank + 1))
        return range(begin + first, begin + end)

    def heads(self, number: int, size: int, begin: int = 0) -> range:
        """Return the rows of the rank's heads. Ranks share a head if there are fewer heads."""
        first, count = number * self.rank // self.num_ranks, max(1, number // self.num_ranks)
        return range(begin + first * size, begin + (first + count) * size)

    def config(self, model: ModelConfig) -> ModelConfig:
        """Return the sizes of the rank's part of a model."""
        experts = model.experts
        if experts is not None:
            size, dense = (len(self.part(each)) for each in (experts.size, experts.dense_size))
            experts = replace(experts, size=size, dense_size=dense)
        return replace(
            model,
            num_heads=max(1, model.num_heads // self.num_ranks),
            num_kv_heads=max(1, model.num_kv_heads // self.num_ranks),
            intermediate_size=len(self.part(model.intermediate_size)),
            experts=experts,
        )

    def checkpoint(self, weights: Checkpoint, model: ModelConfig) -> Checkpoint:
        """Return the rank's rows of the weights of a model."""
        return sliced(weights, dict(self._rows(model)))

    def changes(self, changes: Mapping[str, LowRank], model: ModelConfig) -> dict[str, LowRank]:
        """Return the rank's rows of the changes of tensors by an adapter."""
        rows = dict(self._rows(model))
        return {
            name: replace(
                change, b=np.concatenate([change.b[own.start : own.stop] for own in rows[name]])
            )
            for name, change in changes.items()
        }

    def _rows(self, model: ModelConfig) -> Iterator[tuple[str, Rows]]:
        """Yield the rows of each tensor that is divided. All others are whole in every rank.

        These are norms, routers, and the inputs of a recurrence.
        """
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            yield name, [self.part(model.vocab_size)]
        for layer in range(model.num_layers):
            prefix, names = f"model.layers.{layer}.", model.names_of(layer)
            for name, rows in self._of_layer(model, layer, names).items():
                yield f"{prefix}{name}.weight", rows
                yield f"{prefix}{name}.bias", rows
            if names.sinks is not None:
                yield prefix + names.sinks, [self.part(model.num_heads)]

    def _of_layer(self, model: ModelConfig, layer: int, names: Names) -> Mapping[str, Rows]:
        """Return the rows of each matrix of a layer that is divided, by its name."""
        hidden = [self.part(model.hidden_size)]
        if model.recurrent is not None and model.layers_recurrent[layer]:
            rows: dict[str, Rows] = {model.recurrent.family.out: hidden}
        else:
            rows = {**self._qkv(model, names), names.attention_out: hidden}
        if model.has_mlp(layer):
            rows |= self._pair(names.gate_up, model.mlp_size(layer))
            rows[names.down] = hidden
        if model.experts is not None and model.has_experts(layer):
            for expert in range(model.experts.number):
                gate_up = [name.format(expert) for name in names.expert_gate_up]
                if names.experts_take_turns:
                    own = self.part(model.experts.size)
                    rows[gate_up[0]] = [range(2 * own.start, 2 * own.stop)]
                else:
                    rows |= self._pair(gate_up, model.experts.size)
                rows[names.expert_down.format(expert)] = hidden
        return rows

    def _qkv(self, model: ModelConfig, names: Names) -> Mapping[str, Rows]:
        """Return the rows of the rank's heads. Gates are in the rows of their query head."""
        size, rows, begin = model.head_dim, [], 0
        size_of_query = 2 * size if model.gates_attention else size
        counts = (model.num_heads, size_of_query), *[(model.num_kv_heads, size)] * 2
        is_joined = len(names.qkv) == 1
        for number, width in counts:
            rows.append(self.heads(number, width, begin))
            begin += number * width if is_joined else 0
        if is_joined:
            return {names.qkv[0]: rows}
        return {name: [own] for name, own in zip(names.qkv, rows, strict=True)}

    def _pair(self, names: Sequence[str], size: int) -> Mapping[str, Rows]:
        """Return the rows of gate and up, in two matrices or one after the other in one."""
        if len(names) > 1:
            return {name: [self.part(size)] for name in names}
        return {names[0]: [self.part(size), self.part(size, size)]}


def check_divides(model: ModelConfig, num_ranks: int) -> None:
    """Raise `ConfigError` unless so many ranks can divide the model."""
    possible = [number for number in range(1, 65) if why_not(model, number) is None]
    reason = why_not(model, num_ranks)
    if reason is not None:
        choices = ", ".join(map(str, possible))
        raise ConfigError(f"tensor_parallel_size is {num_ranks}; {reason} (choose from: {choices})")


def why_not(model: ModelConfig, num_ranks: int) -> str | None:
    """Return why so many ranks cannot divide a model, or None."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if model.num_attention_layers:
        if heads % num_ranks:
            return f"the model has {heads} attention heads, which {num_ranks} does not divide"
        if kv_heads % num_ranks and num_ranks % kv_heads:
            return (
                f"the model has {kv_heads} KV heads, and of the numbers {kv_heads} and {num_ranks} "
                "neither divides the other"
            )
    sizes = [model.mlp_size(each) for each in range(model.num_layers) if model.has_mlp(each)]
    sizes += [model.experts.size] if model.experts else []
    if min([model.hidden_size, *sizes]) < num_ranks:
        return f"a matrix of the model has only {min([model.hidden_size, *sizes])} outputs"
    return None
