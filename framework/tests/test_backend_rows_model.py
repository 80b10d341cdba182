"""Which way through the model a step takes: for rows with logits alone, where the model offers that, or for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pluglm.backends.execute import execute_batch, execute_open_batch
from pluglm.kernel.core import ModelInput, Segment
from pluglm.kernel.interfaces.model import LayerSpec, ModelSpec

LAYER = LayerSpec(index=0, num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0)
SPEC = ModelSpec(family="stub", hidden_size=2, vocab_size=2, max_position=99, layers=(LAYER,))
NUM_TOKENS = 5


class WholeModel:
    """Hidden states are the positions. calls: the functions that ran."""

    spec = SPEC

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, inputs: ModelInput, attend: Any) -> torch.Tensor:
        self.calls.append("forward")
        attend(LAYER, None, None, None)
        return inputs.positions_T[:, None].float()

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return hidden_RD.expand(-1, SPEC.vocab_size)


class RowsModel(WholeModel):
    def forward_rows(self, inputs: ModelInput, attend: Any, pick_rows: Any) -> torch.Tensor:
        self.calls.append("forward_rows")
        attend(LAYER, None, None, None)
        return pick_rows(inputs.positions_T[:, None].float(), inputs.logit_rows_R)  # type: ignore[no-any-return]


class Attention:
    def __init__(self) -> None:
        self.num_runs = 0

    def plan(self, batch: Any) -> None: ...

    def run(self, *parts: Any) -> None:
        self.num_runs += 1


class Store:
    def copy_blocks(self, copies: Any) -> None: ...


def make_inputs(rows: list[int]) -> ModelInput:
    positions = torch.arange(NUM_TOKENS)
    segment = Segment(sequence_id=0, query_start=0, num_query=NUM_TOKENS, num_context=0, block_table=(0, 1))
    wanted = torch.tensor(rows, dtype=torch.int64)
    return ModelInput(
        token_ids_T=positions,
        positions_T=positions,
        slots_T=positions,
        logit_rows_R=wanted,
        segments=(segment,),
        block_size=4,
    )


@pytest.mark.parametrize("rows", [[], [4], [3, 1], [4, 3, 2, 1, 0]])
@pytest.mark.parametrize("make_model", [WholeModel, RowsModel])
def test_rows_with_logits(make_model: Any, rows: list[int]) -> None:
    model, attention, store = make_model(), Attention(), Store()
    logits_RV = execute_batch(model, make_inputs(rows), attention, store)  # type: ignore[arg-type]
    assert logits_RV.dtype == torch.float32
    assert logits_RV.tolist() == [[row, row] for row in rows]
    can_skip = make_model is RowsModel and len(rows) < NUM_TOKENS
    assert model.calls == ["forward_rows" if can_skip else "forward"]
    assert attention.num_runs == 1


def test_whoever_reads_hidden_states_gets_those_of_all_rows() -> None:
    model, attention, store = RowsModel(), Attention(), Store()
    logits_RV, hidden_TD = execute_open_batch(model, make_inputs([2]), attention, store)  # type: ignore[arg-type]
    assert logits_RV.tolist() == [[2, 2]]
    assert hidden_TD[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert model.calls == ["forward"]


class LogitsModel(RowsModel):
    """can: whether it finds the way from the ids to the logits this time."""

    can = True

    def forward_logits(self, inputs: ModelInput, attend: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self.can:
            return None
        self.calls.append("forward_logits")
        attend(LAYER, None, None, None)
        hidden_TD = inputs.positions_T[:, None].float()
        return hidden_TD, self.logits(hidden_TD)


@pytest.mark.parametrize("rows", [[], [4], [0, 1, 2, 3], [4, 3, 2, 1, 0], [0, 1, 2, 3, 3], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("can", [True, False])
def test_the_way_to_all_logits_is_for_steps_that_ask_for_all_of_them_in_order(rows: list[int], can: bool) -> None:
    model, attention, store = LogitsModel(), Attention(), Store()
    model.can = can
    logits_RV, hidden_TD = execute_open_batch(model, make_inputs(rows), attention, store)  # type: ignore[arg-type]
    assert logits_RV.tolist() == [[row, row] for row in rows]
    assert hidden_TD[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert model.calls == ["forward_logits" if can and rows == [0, 1, 2, 3, 4] else "forward"]
    assert attention.num_runs == 1
