"""The checks of plans for graphs are tested: tables that are tensors pass, and each check has a plan that fails it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pluglm.kernel.interfaces.attention import AttentionBatch
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.testing.attention import attention_checks
from pluglm.testing.attention_graphs import GRAPHS
from pluglm.testing.check import run_checks
from pluglm.testing.graph_attention import TableAttention, TablePlan

NAMES = {function.__name__ for function in GRAPHS}


class Tables(TableAttention):
    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        pass

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities()


class StartsEmpty(Tables):
    def static_plan(self, batch: AttentionBatch, max_blocks: int) -> TablePlan:
        plan = super().static_plan(batch, max_blocks)
        plan.num_keys_B.fill_(1)
        return plan


class KeepsLengths(Tables):
    def refill(self, plan: TablePlan, batch: AttentionBatch) -> None:
        before = plan.num_keys_B.clone()
        super().refill(plan, batch)
        if bool((before > 0).all()):
            plan.num_keys_B.copy_(before)


class MakesTensors(Tables):
    def refill(self, plan: TablePlan, batch: AttentionBatch) -> None:
        object.__setattr__(plan, "num_keys_B", plan.num_keys_B.clone())
        super().refill(plan, batch)


class AsksTheDevice(Tables):
    def run(self, layer: Any, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, plan: Any, kv: Any) -> Any:
        if isinstance(plan, TablePlan):
            longest = int(plan.num_keys_B.max())
            num_blocks = -(-longest // kv.layout.block_size)
            plan = replace(plan, tables_BM=plan.tables_BM[:, :num_blocks])
        return super().run(layer, q_TNH, k_TKH, v_TKH, plan, kv)


BROKEN: dict[str, type[Tables]] = {
    "a_graph_plan_computes_the_batch_it_was_made_for": StartsEmpty,
    "a_refilled_graph_plan_computes_the_new_batch": KeepsLengths,
    "a_refilled_graph_plan_keeps_its_tensors": MakesTensors,
    "a_graph_plan_is_run_without_waiting": AsksTheDevice,
}


def test_tables_as_tensors_pass() -> None:
    report = run_checks(attention_checks(Tables))
    assert report.ok, str(report)
    assert {one.name for one in attention_checks(Tables)} >= NAMES == set(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plans_fail_exactly_their_check(name: str) -> None:
    report = run_checks(attention_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)


def test_attention_without_such_plans_is_not_asked() -> None:
    class Plain(Tables):
        static_plan: Any = None

    assert not NAMES & {one.name for one in attention_checks(Plain)}
