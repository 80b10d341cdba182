"""What components may say of memory before anything is loaded. All are optional abilities; a plan is made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pluglm.kernel.interfaces.checkpoint import Checkpoint

WeightKind = Literal["tensor", "embedding", "linear"]


class Footprint(NamedTuple):
    """Bytes of a weight. kept: what stays of it; extra: what is held beside that while it is made, at most."""

    kept: int
    extra: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWeight:
    """A weight as a model holds it. parts: name in the checkpoint and shape of each tensor that is joined to it.

    kind: `linear` goes through a LinearFactory, `embedding` to where the backend reads best, `tensor` stays as it is.
    """

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    kind: WeightKind

    @property
    def shape(self) -> tuple[int, ...]:
        """Parts are joined along their rows."""
        first = self.parts[0][1]
        return (sum(shape[0] for _, shape in self.parts), *first[1:])

    @property
    def num_values(self) -> int:
        return prod(self.shape)


@runtime_checkable
class SizedModel(Protocol):
    """Optional ability of a model family: it knows from a checkpoint's header what it will hold."""

    @classmethod
    def planned_weights(cls, checkpoint: Checkpoint) -> Sequence[PlannedWeight]:
        """In the order of loading. CheckpointError for what `load` would refuse; reads no tensor."""
        ...

    @classmethod
    def step_bytes(cls, config: Mapping[str, Any], *, value_bytes: int, num_tokens: int, num_rows: int) -> int:
        """The most that activations take at once in a step of so many tokens, logits of num_rows included."""
        ...


@runtime_checkable
class SizedBackend(Protocol):
    """Optional ability of a backend."""

    def weight_footprint(self, num_bytes: int, kind: WeightKind, num_parts: int) -> Footprint:
        """Of a weight of num_bytes in the run's dtype, made by the backend's own layers out of num_parts tensors."""
        ...


@runtime_checkable
class SizedQuantizer(Protocol):
    """Optional ability of a quantizer."""

    def linear_footprint(self, num_outputs: int, num_inputs: int, weight_bytes: int) -> Footprint:
        """Of the layer that make_linear makes; extra includes the full-precision weight of weight_bytes."""
        ...


@runtime_checkable
class SizedCheckpoint(Protocol):
    """Optional ability of a checkpoint."""

    def read_bytes(self, name: str) -> int:
        """What is held beside the result of `tensor(name)` while it is read."""
        ...
