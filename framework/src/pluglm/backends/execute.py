"""One flat batch through model and attention on any torch device. Knows the order of things, no arithmetic."""

from __future__ import annotations

import torch

from pluglm.kernel.core import ModelInput
from pluglm.kernel.interfaces.attention import Attention, AttentionBatch
from pluglm.kernel.interfaces.kv import KVStore
from pluglm.kernel.interfaces.model import LayerSpec, Model

# T: tokens of the flat batch, R: rows with logits, D: hidden size, V: vocabulary
# N: query heads, K: kv heads, H: head dim


@torch.inference_mode()
def execute_batch(model: Model, inputs: ModelInput, attention: Attention, kv: KVStore) -> torch.Tensor:
    """Copies blocks, plans the attention once, runs the layers; logits_RV float32, on the device of the inputs."""
    kv.copy_blocks(inputs.copies)
    batch = AttentionBatch(segments=inputs.segments, slots_T=inputs.slots_T, block_size=inputs.block_size)
    plan = attention.plan(batch)

    def attend(layer: LayerSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        return attention.run(layer, q_TNH, k_TKH, v_TKH, plan, kv)

    hidden_TD = model.forward(inputs, attend)
    if inputs.logit_rows_R.numel() == 0:
        return torch.empty((0, model.spec.vocab_size), dtype=torch.float32, device=hidden_TD.device)
    return model.logits(hidden_TD.index_select(0, inputs.logit_rows_R))


def inputs_on(inputs: ModelInput, device: str) -> ModelInput:
    """The same batch with its index tensors on `device`."""
    return ModelInput(
        token_ids_T=inputs.token_ids_T.to(device),
        positions_T=inputs.positions_T.to(device),
        slots_T=inputs.slots_T.to(device),
        logit_rows_R=inputs.logit_rows_R.to(device),
        segments=inputs.segments,
        block_size=inputs.block_size,
        copies=inputs.copies,
    )
