"""One flat batch through model and attention on any torch device. Knows the order of things, no arithmetic."""

from __future__ import annotations

from dataclasses import replace

import torch

from pluglm.backends.transfers import sent
from pluglm.kernel.core import GroupInput, ModelInput
from pluglm.kernel.interfaces.attention import Attention, AttentionBatch
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import LayerSpec, Model

# T: tokens of the flat batch, R: rows with logits, D: hidden size, V: vocabulary
# N: query heads, K: kv heads, H: head dim


@torch.inference_mode()
def execute_batch(model: Model, inputs: ModelInput, attention: Attention, kv: KVStore) -> torch.Tensor:
    """Copies blocks, plans the attention once for each group of layers, runs the layers.

    Returns logits_RV float32, on the device of the inputs.
    """
    kv.copy_blocks(inputs.copies)
    plans = [attention.plan(_batch(part, inputs.block_size)) for part in inputs.groups or (inputs,)]
    plan_of = {layer: plan for group, plan in zip(inputs.groups, plans, strict=False) for layer in group.layers}

    def attend(layer: LayerSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        plan = plan_of[layer.index] if plan_of else plans[0]
        return attention.run(layer, q_TNH, k_TKH, v_TKH, plan, kv)

    hidden_TD = model.forward(inputs, attend)
    if inputs.logit_rows_R.numel() == 0:
        return torch.empty((0, model.spec.vocab_size), dtype=torch.float32, device=hidden_TD.device)
    return model.logits(hidden_TD.index_select(0, inputs.logit_rows_R))


def _batch(part: ModelInput | GroupInput, block_size: int) -> AttentionBatch:
    return AttentionBatch(segments=part.segments, slots_T=part.slots_T, block_size=block_size)


def inputs_on(inputs: ModelInput, device: str) -> ModelInput:
    """The same batch with its index tensors on `device`; the host waits for no copy."""
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
