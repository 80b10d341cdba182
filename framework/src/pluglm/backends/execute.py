"""One flat batch through model and attention on any torch device. Knows the order of things, no arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch

from pluglm.backends.transfers import sent
from pluglm.kernel.core import GroupInput, ModelInput
from pluglm.kernel.interfaces.attention import Attention, AttentionBatch, HeadRows, NativeCallAttention, NativeCalls
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import LayerSpec, LogitsModel, Model, RowPicker, RowsModel

# T: tokens of the flat batch, R: rows with logits, D: hidden size, V: vocabulary
# N: query heads, K: kv heads, H: head dim


def picked_rows(x_TD: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
    """The RowPicker of torch."""
    return x_TD.index_select(0, rows_R)


@torch.inference_mode()
def execute_batch(
    model: Model, inputs: ModelInput, attention: Attention, kv: KVStore, pick_rows: RowPicker = picked_rows
) -> torch.Tensor:
    """logits_RV float32 of a batch, on the device of the inputs."""
    if inputs.logit_rows_R.shape[0] == inputs.token_ids_T.shape[0] or not isinstance(model, RowsModel):
        return _open_batch(model, inputs, attention, kv, pick_rows)[0]
    return _logits(model, model.forward_rows(inputs, _begin_step(inputs, attention, kv), pick_rows))


@torch.inference_mode()
def execute_open_batch(
    model: Model, inputs: ModelInput, attention: Attention, kv: KVStore, pick_rows: RowPicker = picked_rows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies blocks, plans the attention once for each group of layers, runs the layers, picks the rows with logits.

    Returns logits_RV float32 and hidden_TD of all rows, on the device of the inputs.
    """
    return _open_batch(model, inputs, attention, kv, pick_rows)


def _open_batch(
    model: Model, inputs: ModelInput, attention: Attention, kv: KVStore, pick_rows: RowPicker
) -> tuple[torch.Tensor, torch.Tensor]:
    attend, is_whole = _begin_step(inputs, attention, kv), _asks_for_all(inputs)
    if is_whole and _computes_logits(model) and (whole := model.forward_logits(inputs, attend)) is not None:
        hidden_TD, logits_TV = whole
        return logits_TV, hidden_TD
    hidden_TD = model.forward(inputs, attend)
    return _logits(model, hidden_TD if is_whole else pick_rows(hidden_TD, inputs.logit_rows_R)), hidden_TD


def _computes_logits(model: Model) -> TypeGuard[LogitsModel]:
    """issubclass first: Python keeps its answer."""
    return issubclass(type(model), LogitsModel) or isinstance(model, LogitsModel)


def _asks_for_all(inputs: ModelInput) -> bool:
    """Every row has logits, in order, as when all sequences decode. Only known of rows on the host."""
    rows_R, num_rows = inputs.logit_rows_R, inputs.token_ids_T.shape[0]
    return rows_R.is_cpu and 0 < num_rows == rows_R.shape[0] and rows_R.tolist() == list(range(num_rows))


def _begin_step(inputs: ModelInput, attention: Attention, kv: KVStore) -> StepAttention:
    kv.copy_blocks(inputs.copies)
    plans = [attention.plan(_batch(part, inputs.block_size)) for part in inputs.groups or (inputs,)]
    return StepAttention(attention, plans, inputs.groups, kv)


def _logits(model: Model, hidden_RD: torch.Tensor) -> torch.Tensor:
    if hidden_RD.shape[0]:
        return model.logits(hidden_RD)
    return torch.empty((0, model.spec.vocab_size), dtype=torch.float32, device=hidden_RD.device)


def _offers_calls(attention: Attention) -> TypeGuard[NativeCallAttention]:
    """What `isinstance` asks of an object whose class does not tell, in a tenth of the time."""
    return getattr(attention, "native_calls", None) is not None


class StepAttention:
    """The attention of one step: an AttentionCall. groups: as in ModelInput, with a plan for each, or one plan."""

    def __init__(self, attention: Attention, plans: list[Any], groups: tuple[GroupInput, ...], kv: KVStore) -> None:
        self._attention, self._plans, self._kv = attention, plans, kv
        self._plan_of = {layer: plan for group, plan in zip(groups, plans, strict=False) for layer in group.layers}

    def __call__(self, layer: LayerSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        return self._attention.run(layer, q_TNH, k_TKH, v_TKH, self._plan(layer), self._kv)

    def native_calls(self, layers: Sequence[LayerSpec], heads: HeadRows) -> NativeCalls | None:
        """One call for each layer, all of one function; None where the attention has none to offer."""
        attention = self._attention
        if not _offers_calls(attention):
            return None
        if not self._plan_of:
            return attention.native_calls(layers, heads, self._plans[0], self._kv)
        found = [attention.native_calls([layer], heads, self._plan(layer), self._kv) for layer in layers]
        some = [one for one in found if one is not None]
        if len(some) < len(layers) or len({one.function for one in some}) != 1:
            return None
        return NativeCalls(some[0].function, [call for one in some for call in one.calls], [one.keep for one in some])

    def _plan(self, layer: LayerSpec) -> Any:
        return self._plan_of[layer.index] if self._plan_of else self._plans[0]


def _batch(part: ModelInput | GroupInput, block_size: int) -> AttentionBatch:
    return AttentionBatch(segments=part.segments, slots_T=part.slots_T, block_size=block_size)


def inputs_on(inputs: ModelInput, device: str) -> ModelInput:
    """The same batch with its index tensors on `device`; the host waits for no copy."""
    if device == "cpu" and inputs.token_ids_T.is_cpu:  # as the runner makes them
        return inputs
    return ModelInput(
        token_ids_T=sent(inputs.token_ids_T, device),
        positions_T=sent(inputs.positions_T, device),
        slots_T=sent(inputs.slots_T, device),
        logit_rows_R=sent(inputs.logit_rows_R, device),
        segments=inputs.segments,
        block_size=inputs.block_size,
        copies=inputs.copies,
        groups=tuple(replace(group, slots_T=sent(group.slots_T, device)) for group in inputs.groups),
    )
