"""How much memory a run will take, from what its components say before a weight is read. Allocates nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from pluglm.kernel.errors import ConfigError
from pluglm.kernel.interfaces.checkpoint import Checkpoint
from pluglm.kernel.interfaces.footprint import Footprint, PlannedWeight, SizedBackend, SizedCheckpoint, SizedQuantizer
from pluglm.kernel.interfaces.kv import KVGroup, KVLayout
from pluglm.kernel.interfaces.kv_format import KVFormat, token_bytes
from pluglm.kernel.interfaces.model import ModelSpec

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the backend's device. A family, backend or quantizer that does not say what it takes has no plan.

    process: resident before weights are read, and what the first calls of the libraries add; 0 on a device of its own.
    weights: as they are held. loading: what loading takes beyond them at its worst moment. kv: the pool when it is
    full, of second models too; on a CPU pages count from when they are first written to. workspace: activations of the
    largest step. free: what the backend had when this was made.
    """

    device: str
    process: int
    weights: int
    loading: int
    kv: int
    workspace: int
    free: int
    step_tokens: int
    logit_rows: int
    num_blocks: int
    block_size: int

    @property
    def added(self) -> int:
        """What comes on top of the process at the worst moment: loading, or the largest step with a full pool."""
        return self.weights + max(self.loading, self.kv + self.workspace)

    @property
    def peak(self) -> int:
        return self.process + self.added

    def require_fit(self, source: str) -> None:
        """ConfigError with the numbers and the key to change when less than `added` is free. source: the config."""
        if self.added <= self.free:
            return
        parts = f"weights {_mib(self.weights)}, KV pool {_mib(self.kv)}, workspace {_mib(self.workspace)}"
        if self.weights + max(self.loading, self.workspace) < self.free:
            fix = f"lower engine.kv_memory to {self.free - self.weights - self.workspace} or less"
        elif self.weights + self.loading <= self.free:
            fix = "lower engine.max_step_tokens"
        else:
            fix = "take a smaller model, model.dtype: bfloat16 or a quantizer"
        raise ConfigError(
            f"{source}: the run takes {_mib(self.added)} MiB on {self.device} ({parts}, "
            f"loading {_mib(self.loading)}), only {_mib(self.free)} MiB are free; {fix}"
        )


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // MIB):,}"


def kv_bytes(layout: KVLayout, spec: ModelSpec, value_bytes: int, kv_format: KVFormat | None = None) -> int:
    """Of keys and values in every block of every layer, with what a format stores beside them."""
    everything = KVGroup(layers=tuple(range(len(spec.layers))), num_blocks=layout.num_blocks)
    return sum(
        group.num_blocks * layout.block_size * token_bytes(spec.layers[index], value_bytes, kv_format)
        for group in layout.groups or (everything,)
        for index in group.layers
    )


def attention_bytes(spec: ModelSpec, num_tokens: int, num_keys: int) -> int:
    """Queries and results of a step, and the keys and values of its longest sequence in one layer, in float32."""
    return max(
        (
            4 * layer.head_dim * (2 * num_tokens * layer.num_heads + 2 * num_keys * layer.num_kv_heads)
            for layer in spec.layers
        ),
        default=0,
    )


@dataclass(frozen=True, slots=True)
class WeightSizer:
    """Walks through loading. quantizer: None where the backend makes its own linear layers."""

    checkpoint: Checkpoint
    backend: SizedBackend
    quantizer: SizedQuantizer | None
    value_bytes: int

    def sizes(self, weights: Sequence[PlannedWeight]) -> tuple[int, int]:
        """(what all of them keep, how much more than that is held at the worst moment of loading)."""
        kept = worst = 0
        for weight in weights:
            footprint = self._footprint(weight)
            worst = max(worst, kept + footprint.kept + footprint.extra)
            kept += footprint.kept
        return kept, max(0, worst - kept)

    def _footprint(self, weight: PlannedWeight) -> Footprint:
        """Reading, then making. A part is read beside what is joined already, and its reader may hold it once more."""
        num_bytes = weight.num_values * self.value_bytes
        joined = self.backend.weight_footprint(num_bytes, weight.kind, len(weight.parts))
        made = joined
        if weight.kind == "linear" and self.quantizer is not None:
            num_outputs, num_inputs = weight.shape
            made = self.quantizer.linear_footprint(num_outputs, num_inputs, num_bytes)
        part = max(prod(shape) * self.value_bytes + self._read_bytes(name) for name, shape in weight.parts)
        reading = part if len(weight.parts) == 1 else joined.kept + part
        return Footprint(made.kept, max(made.extra, reading - made.kept, 0))

    def _read_bytes(self, name: str) -> int:
        return self.checkpoint.read_bytes(name) if isinstance(self.checkpoint, SizedCheckpoint) else 0


PlanShown = Callable[[MemoryPlan], None]


def unseen(plan: MemoryPlan) -> None:
    """Shows it to nobody."""
