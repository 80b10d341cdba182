"""The contract of a backend: a device, its memory and clock, and the execution of one flat batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pluglm.kernel.interfaces.component import Component

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pluglm.kernel.core import ModelInput
    from pluglm.kernel.interfaces.attention import Attention
    from pluglm.kernel.interfaces.checkpoint import Checkpoint
    from pluglm.kernel.interfaces.kv import KVLayout, KVStore
    from pluglm.kernel.interfaces.model import LinearFactory, Model, ModelSpec
    from pluglm.kernel.interfaces.services import Progress

BACKEND_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What a backend may know of the run. dtype: a torch name; num_threads: None leaves the library's choice."""

    dtype: str
    deterministic: bool
    num_threads: int | None


class Backend(Component, Protocol):
    """Built as cls(config, context: BackendContext), first of all components.

    device: a torch device name. Everything except `now` is called from one thread at a time.
    """

    device: str

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this machine cannot run it, or None. Cheap, called before building and by `auto`."""
        ...

    def now(self) -> float:
        """Seconds on this backend's monotonic clock (virtual for the fake one)."""
        ...

    def free_memory(self) -> int:
        """Bytes that could still be allocated on the device."""
        ...

    def load_model(
        self, family: type[Model], checkpoint: Checkpoint, make_linear: LinearFactory | None, progress: Progress
    ) -> Model:
        """The model on this device. make_linear is the quantizer's; None means the backend's own plain layers."""
        ...

    def allocate_kv(self, layout: KVLayout, spec: ModelSpec) -> KVStore:
        """Storage for every slot of every layer, contents undefined. MemoryError when it does not fit."""
        ...

    def execute(self, model: Model, inputs: ModelInput, attention: Attention, kv: KVStore) -> torch.Tensor:
        """Copies blocks, runs the model, stores KV for every row; returns logits_RV float32 of inputs.logit_rows_R."""
        ...


@runtime_checkable
class LaunchingBackend(Protocol):
    """Optional ability of a Backend: a batch is computed elsewhere, as on a device, and the host does other things."""

    def launch(self, model: Model, inputs: ModelInput, attention: Attention, kv: KVStore) -> Callable[[], torch.Tensor]:
        """Begin what `execute` does, on the same terms; what is returned is called once, and gives its result or error.

        The logits may still be on their way then, as long as whoever reads them waits. Until that call, nothing but
        `now` is asked of the backend, and neither the inputs nor the store are touched.
        """
        ...
