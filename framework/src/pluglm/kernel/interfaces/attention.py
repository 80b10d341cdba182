"""The contract of an attention implementation: one plan a step, one run a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from pluglm.kernel.interfaces.component import Component

if TYPE_CHECKING:
    import torch

    from pluglm.kernel.core import Segment
    from pluglm.kernel.interfaces.kv import KVStore
    from pluglm.kernel.interfaces.model import LayerSpec

ATTENTION_VERSION = 1

# T: tokens of the flat batch, N: query heads, K: kv heads (N is a multiple of K), H: head dim


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """The segments of a flat batch. slots_T: int64 [T], where each new token's key and value go in the KV store."""

    segments: tuple[Segment, ...]
    slots_T: torch.Tensor
    block_size: int


class HeadRows(NamedTuple):
    """One layer's q_TNH, k_TKH and v_TKH, whose tokens may be any distance apart, and the contiguous out_TNH."""

    q_TNH: torch.Tensor
    k_TKH: torch.Tensor
    v_TKH: torch.Tensor
    out_TNH: torch.Tensor


class Attention(Component, Protocol):
    """Causal self-attention over stored keys and values. Query head n reads kv head n // (N // K).

    Provides `numerics:batch_invariant` only if a row's bits do not depend on the other rows of the batch or on how
    a sequence is cut into chunks; then it must hold when context.deterministic is true.
    """

    def plan(self, batch: AttentionBatch) -> Any:
        """Whatever the layers of this step share (index tensors, masks). Opaque to the kernel, dropped afterwards."""
        ...

    def run(
        self, layer: LayerSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, plan: Any, kv: KVStore
    ) -> torch.Tensor:
        """Stores k and v at the plan's slots, then returns out_TNH in q's dtype.

        Row t of a segment sees the keys at positions max(0, p - window + 1) .. p, p its own position. Scores are
        (q . k) * layer.scale, soft-capped when layer.soft_cap is set, with the softmax in float32 or better.
        """
        ...


class NativeCalls(NamedTuple):
    """The attention of some layers as calls of a C function, for a backend that runs layers without Python in between.

    function: the address of `int32_t f(void *tools, int32_t type, const void *call)`, which returns 0, or 1 when it
    found no memory; tools is the handle of the run's NativeTools and type is 0 for float32, 1 for bfloat16. calls: one
    a layer, in its own layout. keep: what they point to.
    """

    function: int
    calls: list[bytes]
    keep: Any = None


@runtime_checkable
class NativeCallAttention(Protocol):
    """Optional ability of an Attention: to say what `run` would do as calls that a backend makes by itself."""

    def native_calls(self, layers: Sequence[LayerSpec], heads: HeadRows, plan: Any, kv: KVStore) -> NativeCalls | None:
        """What `run` does for each of the layers; None where it cannot be said so, and `run` is called instead.

        The tensors of `heads` are filled when a layer's call is made; its out_TNH takes the result.
        """
        ...


@runtime_checkable
class GraphAttention(Protocol):
    """Optional ability of an Attention: plans with which a captured decode step (a CUDA graph) can run again.

    `run` with such a plan starts the same work on the same addresses whatever the plan is filled with: it reads no
    tensor on the host and takes nothing from it but shapes. It is then given a KV store with one block more than the
    layout of the run has, the scratch block of rows that only fill the batch up.
    """

    def static_plan(self, batch: AttentionBatch, max_blocks: int) -> Any:
        """A plan for batches of len(batch.segments) segments of one new token, with tables of at most max_blocks.

        Filled with `batch`. Its tensors keep their addresses; batch.slots_T is one of them, and later batches bring
        the same tensor with other contents.
        """
        ...

    def refill(self, plan: Any, batch: AttentionBatch) -> None:
        """Makes `plan` that of `batch`, in place and in stream order, without waiting for the device.

        Host memory that is copied from must not be written again before the copy is done: stage it in fresh tensors.
        """
        ...
