"""What a decoder holds and computes with, in bytes: the arithmetic behind a memory plan. Reads no tensor."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from pluglm.kernel.interfaces.footprint import PlannedWeight, WeightKind
from pluglm.models.settings import DecoderSettings
from pluglm.models.tensor_plan import EMBEDDING, TensorPlan

_JOINED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
_LOGIT_COPIES = 4  # of the model, the sampler's own and two it works with, all float32


def planned_weights(plan: TensorPlan) -> Iterator[PlannedWeight]:
    """The plan's tensors as DecoderLayer joins them. A tied head that is stored all the same counts as another one."""
    matrices = [name for name in plan.shapes if len(plan.shapes[name]) == 2]
    for _, names in groupby(matrices, _layer_of):
        yield _planned(plan, list(names), "linear")
    for name in plan.shapes:
        if len(plan.shapes[name]) != 2:
            yield _planned(plan, [name], "tensor")


def _layer_of(name: str) -> str:
    """The linear layer that the matrix becomes a part of."""
    stem, _, projection = name.removesuffix(".weight").rpartition(".")
    return f"{stem}.{_JOINED.get(projection, projection)}"


def _planned(plan: TensorPlan, names: list[str], kind: WeightKind) -> PlannedWeight:
    parts = tuple((plan.layout.stored(name), plan.shapes[name]) for name in names)
    return PlannedWeight(parts=parts, kind="embedding" if names == [EMBEDDING] else kind)


def step_bytes(settings: DecoderSettings, value_bytes: int, num_tokens: int, num_rows: int) -> int:
    """The largest of three moments: before attention, in the feed-forward part, and at the logits.

    Before attention a row has itself, the heads side by side, and the turned ones with what they are made of. In the
    feed-forward part it has itself twice, its norm, gate and up side by side, their product and the result. Logits are
    a product in the run's dtype and float32 copies.
    """
    width, inner = settings.spec.hidden_size, settings.intermediate_size
    before = max((_heads_width(settings, index) for index in range(len(settings.spec.layers))), default=0)
    rows = num_tokens * value_bytes * max(width + before, 4 * width + 3 * inner)
    logits = num_rows * settings.spec.vocab_size * (4 * _LOGIT_COPIES + (value_bytes if value_bytes < 4 else 0))
    return max(rows, num_tokens * value_bytes * width + logits)


def _heads_width(settings: DecoderSettings, index: int) -> int:
    layer = settings.spec.layers[index]
    rotated = layer.num_heads + layer.num_kv_heads
    return (rotated + layer.num_kv_heads + 2 * rotated) * layer.head_dim
