"""The fake backend: a run without weights, on a clock of its own. Knows what was stored where, no arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field

from pluglm.backends.dtypes import torch_dtype
from pluglm.backends.fake_model import FakeKVStore, FakeModel, cheap_logits, hashed_logits, prefix_digest
from pluglm.backends.threads import thread_count
from pluglm.kernel.core import GroupInput, ModelInput
from pluglm.kernel.interfaces.attention import Attention
from pluglm.kernel.interfaces.backend import Backend, BackendContext
from pluglm.kernel.interfaces.checkpoint import Checkpoint
from pluglm.kernel.interfaces.component import (
    ATTENTION_UNUSED,
    BATCH_INVARIANT,
    LAYER_GROUPS,
    Capabilities,
    ComponentConfig,
)
from pluglm.kernel.interfaces.kv import KVLayout, KVStore
from pluglm.kernel.interfaces.kv_format import KVFormat
from pluglm.kernel.interfaces.model import LinearFactory, Model, ModelSpec
from pluglm.kernel.interfaces.services import Progress

Seconds = Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)]  # bounded, so that their sums are finite

# T: tokens of the flat batch, R: rows with logits, P: tokens of a prefix


class FakeConfig(ComponentConfig):
    """What a step costs on the virtual clock, in seconds, and what the machine and the model pretend to be.

    A step takes step_base_s, and token_s for each token, row_s for each row with logits, chunk_s for each sequence that
    computes several tokens, context_s for each key that a token sees, itself included. memory_bytes: what it claims to
    have free. logits: `full` rows are a hash of the whole prefix, `cheap` ones of its last token alone, for long
    simulations. vocab_size: the ids that the model has at most, None is all of its own.
    """

    step_base_s: Seconds = 0.01
    token_s: Seconds = 0.0001
    row_s: Seconds = 0.0
    chunk_s: Seconds = 0.0
    context_s: Seconds = 0.0
    memory_bytes: int = Field(default=1 << 30, ge=0)
    logits: Literal["full", "cheap"] = "full"
    vocab_size: int | None = Field(default=None, ge=1)


class FakeBackend(Backend):
    """A run without weights, on a virtual clock, to test and simulate schedulers and KV managers.

    It writes (token id, position) into the KV slots and reads each sequence back through its block table.

    A row's logits are a hash of all it reads, so a stale, shifted or foreign block changes the output. It reads what
    the model's layers see, once for each window, in the order of the layers: without windows, all tokens up to its own.

    The attention is built but never called, which the tag `attention:unused` declares; the dtype and a KV format only
    size the KV budget.
    """

    interface_version = 1
    Config = FakeConfig
    device = "cpu"

    def __init__(self, config: FakeConfig, context: BackendContext) -> None:
        torch_dtype(context.dtype, "fake")
        self._config = config
        self._num_threads = context.num_threads
        self._now_s = 0.0

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities(
            provides=frozenset({BATCH_INVARIANT, ATTENTION_UNUSED, LAYER_GROUPS}),
            refuses={"slot:quantizer": "it computes no weights, so there is nothing to quantise"},
        )

    @classmethod
    def unavailable(cls) -> str | None:
        return None

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock on while nothing is computed. ValueError for a negative number: it never goes back."""
        if seconds < 0:
            raise ValueError(f"the clock cannot go back by {-seconds} s")
        self._now_s += seconds

    def advance_to(self, time_s: float) -> None:
        """Move the clock on to that time; no change when it is later already."""
        self._now_s = max(self._now_s, time_s)

    def free_memory(self) -> int:
        return self._config.memory_bytes

    def load_model(
        self, family: type[Model], checkpoint: Checkpoint, make_linear: LinearFactory | None, progress: Progress
    ) -> Model:
        """The family's shape alone; no tensor of the checkpoint is read, so there is no progress to report."""
        # The class methods of the contract, load and read_spec, stay with the family.
        spec = family.read_spec(checkpoint.config)
        if self._config.vocab_size is not None:
            spec = replace(spec, vocab_size=min(spec.vocab_size, self._config.vocab_size))
        return cast("Model", FakeModel(spec))

    def allocate_kv(self, layout: KVLayout, spec: ModelSpec) -> KVStore:
        return FakeKVStore(layout)

    def allocate_encoded_kv(self, layout: KVLayout, spec: ModelSpec, kv_format: KVFormat) -> KVStore:
        return FakeKVStore(layout)

    def execute(self, model: Model, inputs: ModelInput, attention: Attention, kv: KVStore) -> torch.Tensor:
        with thread_count(self._num_threads), torch.inference_mode():
            kv.copy_blocks(inputs.copies)
            for part in inputs.groups or (inputs,):
                kv.keys(_first_layer(part))[part.slots_T, 0, 0] = inputs.token_ids_T
                kv.values(_first_layer(part))[part.slots_T, 0, 0] = inputs.positions_T
        with thread_count(self._num_threads):  # outside inference mode: callers may write into what they get
            logits_RV = self._logits(inputs, kv, model.spec)
        self._now_s += self.step_seconds(inputs)
        return logits_RV

    def step_seconds(self, inputs: ModelInput) -> float:
        """What this batch costs on the clock."""
        config = self._config
        several = sum(segment.num_query > 1 for segment in inputs.segments)
        cost = config.step_base_s + config.token_s * inputs.token_ids_T.numel()
        cost += config.row_s * inputs.logit_rows_R.numel() + config.chunk_s * several
        return cost + config.context_s * sum(keys_seen(one.num_context, one.num_query) for one in inputs.segments)

    def _logits(self, inputs: ModelInput, kv: KVStore, spec: ModelSpec) -> torch.Tensor:
        if self._config.logits == "cheap":
            part = inputs.groups[0] if inputs.groups else inputs
            slots_R = part.slots_T[inputs.logit_rows_R]
            return cheap_logits(_pairs(part, slots_R, kv), spec.vocab_size)
        views = _views(inputs, spec)
        rows = [_row_logits(views, row, inputs.block_size, kv, spec.vocab_size) for row in inputs.logit_rows_R.tolist()]
        return torch.stack(rows) if rows else torch.empty((0, spec.vocab_size))


def keys_seen(num_context: int, num_query: int) -> int:
    """Keys that num_query causal tokens behind num_context others see, summed: each sees itself and all before it."""
    return num_query * num_context + num_query * (num_query + 1) // 2


def _views(inputs: ModelInput, spec: ModelSpec) -> list[tuple[ModelInput | GroupInput, int | None]]:
    """Each window of the model, in the order of its layers, with the tables that a layer of it reads through."""
    layer_of = {layer.window: layer.index for layer in reversed(spec.layers)}
    groups = {layer: group for group in inputs.groups for layer in group.layers}
    windows = sorted(layer_of, key=lambda window: layer_of[window])
    return [(groups.get(layer_of[window], inputs), window) for window in windows] or [(inputs, None)]


def _row_logits(
    views: list[tuple[ModelInput | GroupInput, int | None]], row: int, block_size: int, kv: KVStore, vocab_size: int
) -> torch.Tensor:
    seen = [_pairs(part, _visible_slots(part, row, window, block_size), kv) for part, window in views]
    return hashed_logits(prefix_digest(torch.cat(seen)), vocab_size)


def _visible_slots(part: ModelInput | GroupInput, row: int, window: int | None, block_size: int) -> torch.Tensor:
    """slots_P of what the row sees, itself included."""
    segment = next(s for s in part.segments if s.query_start <= row < s.query_start + s.num_query)
    stop = segment.num_context + row - segment.query_start + 1
    slots = (torch.tensor(segment.block_table)[:, None] * block_size + torch.arange(block_size)).flatten()
    return slots[0 if window is None else max(0, stop - window) : stop]


def _pairs(part: ModelInput | GroupInput, slots_P: torch.Tensor, kv: KVStore) -> torch.Tensor:
    """pairs_P2 int64: (token id, position) as stored."""
    layer = _first_layer(part)
    return torch.stack((kv.keys(layer)[slots_P, 0, 0], kv.values(layer)[slots_P, 0, 0]), dim=1)


def _first_layer(part: ModelInput | GroupInput) -> int:
    return part.layers[0] if isinstance(part, GroupInput) else 0
