"""Asks the components of a run what they will take, and makes the memory plans of its models from that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pluglm.assembly.memory_plan import MemoryPlan, WeightSizer, attention_bytes, kv_bytes
from pluglm.assembly.resolving import Resolved
from pluglm.kernel.errors import PluginError, describe
from pluglm.kernel.interfaces.backend import Backend
from pluglm.kernel.interfaces.checkpoint import Checkpoint
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.drafter import BoundedDrafter
from pluglm.kernel.interfaces.footprint import SizedBackend, SizedModel, SizedQuantizer
from pluglm.kernel.interfaces.kv import KVLayout
from pluglm.kernel.interfaces.model import Model
from pluglm.process_memory import give_back_free_memory, resident_memory

# Code of torch and oneDNN that the first steps bring in, and what these allocate once (torch 2.13 on a CPU).
FIRST_CALLS = 24 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model before it is loaded. quantizer: None where the backend makes the linear layers."""

    family: type[Model]
    checkpoint: Checkpoint
    context: BuildContext
    layout: KVLayout
    quantizer: Any = None

    @property
    def value_bytes(self) -> int:
        return int(getattr(torch, self.context.dtype).itemsize)

    @property
    def pool_bytes(self) -> int:
        return kv_bytes(self.layout, self.context.spec, self.value_bytes, self.context.kv_format)

    @property
    def pool_tokens(self) -> int:
        return self.layout.num_blocks * self.layout.block_size


class MemoryPlanner:
    """Plans models in the order in which they are loaded: pools of earlier ones, still untouched, count for later ones.

    most_drafts: drafts that are verified for a sequence in one step, at most; None when nobody knows.
    """

    def __init__(self, backend: Backend, most_drafts: int | None) -> None:
        self._backend, self._most_drafts, self._reserved = backend, most_drafts, 0

    def plan(self, model: PlannedModel) -> MemoryPlan | None:
        """None when one of the components does not say what it takes. CheckpointError as `load` raises it."""
        backend, family, quantizer = self._backend, model.family, model.quantizer
        self._reserved += model.pool_bytes
        if not isinstance(backend, SizedBackend) or not isinstance(family, SizedModel):
            return None
        if quantizer is not None and not isinstance(quantizer, SizedQuantizer):
            return None
        sizer = WeightSizer(model.checkpoint, backend, quantizer, model.value_bytes)
        weights, loading = sizer.sizes(family.planned_weights(model.checkpoint))
        num_tokens = min(model.context.max_step_tokens, model.pool_tokens)
        most = num_tokens if self._most_drafts is None else self._most_drafts
        num_rows = min(num_tokens, model.context.max_num_seqs * (1 + most))
        activations = family.step_bytes(
            model.checkpoint.config, value_bytes=model.value_bytes, num_tokens=num_tokens, num_rows=num_rows
        )
        num_keys = min(model.context.max_model_len, model.pool_tokens)
        return MemoryPlan(
            device=self._backend.device,
            process=self._process(),
            weights=weights,
            loading=loading,
            kv=self._reserved,
            workspace=activations + attention_bytes(model.context.spec, num_tokens, num_keys),
            free=self._backend.free_memory(),
            step_tokens=num_tokens,
            logit_rows=num_rows,
            num_blocks=model.layout.num_blocks,
            block_size=model.layout.block_size,
        )

    def _process(self) -> int:
        if self._backend.device != "cpu":
            return 0
        give_back_free_memory()
        return resident_memory() + FIRST_CALLS


def most_drafts(drafter: Resolved | None) -> int | None:
    """Tokens of one proposal at most; None for a drafter that does not say. PluginError when it says nonsense."""
    if drafter is None:
        return 0
    cls: Any = drafter.cls
    if not isinstance(cls, BoundedDrafter):
        return None
    try:
        most: object = cls.most_tokens(drafter.config)
    except Exception as error:  # the plugin's own code
        raise PluginError(f"{drafter.entry}: most_tokens() raised {describe(error)}") from error
    if not isinstance(most, int) or isinstance(most, bool) or most < 0:
        raise PluginError(f"{drafter.entry}: most_tokens() must return an int from 0, not {most!r}")
    return most
