"""The contract kits on what comes with the framework: KV managers, backends, model families, hooks, the planner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pluglm.assembly.registry import list_entries, load
from pluglm.backends.cpu import CpuBackend
from pluglm.backends.cuda import CudaBackend
from pluglm.backends.fake import FakeBackend
from pluglm.hooks.events import EventsConfig, EventsHook
from pluglm.kernel.core import Budget, Event, RequestView, StepPlan, StepView
from pluglm.kernel.interfaces.component import Capabilities, ComponentConfig
from pluglm.kernel.interfaces.kv import KVTransaction
from pluglm.kernel.interfaces.scheduler import Accept, SchedulingPolicy, Stop, Victims
from pluglm.kernel.planner import PolicyScheduler
from pluglm.kv.contiguous import ContiguousKV, ContiguousKVConfig
from pluglm.kv.paged import PagedKV, PagedKVConfig
from pluglm.testing.backend import backend_checks
from pluglm.testing.check import Check, cases, run_checks
from pluglm.testing.hooks import hooks_checks
from pluglm.testing.kv import kv_checks
from pluglm.testing.model import REQUIRED, model_checks
from pluglm.testing.scheduler import scheduler_checks


@pytest.mark.parametrize("check", **cases(kv_checks(PagedKV)))
def test_paged_kv(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_paged_kv_of_other_block_sizes(block_size: int) -> None:
    report = run_checks(kv_checks(PagedKV, PagedKVConfig(block_size=block_size)))
    assert report.ok, str(report)


@pytest.mark.parametrize("check", **cases(kv_checks(ContiguousKV)))
def test_contiguous_kv(check: Check) -> None:
    check.run()


def test_contiguous_kv_of_shorter_regions() -> None:
    report = run_checks(kv_checks(ContiguousKV, ContiguousKVConfig(region_tokens=24)))
    assert report.ok, str(report)


@pytest.mark.parametrize("check", **cases(backend_checks(CpuBackend)))
def test_cpu_backend(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(backend_checks(FakeBackend)))
def test_fake_backend(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(backend_checks(CudaBackend)))
def test_cuda_backend(check: Check) -> None:
    """On a machine without CUDA, only that it says so."""
    check.run()


def test_events_hook(tmp_path: Path) -> None:
    report = run_checks(hooks_checks(EventsHook, EventsConfig(path=tmp_path / "events.jsonl")))
    assert report.ok, str(report)


class _LastInFirstOut(SchedulingPolicy):
    """As good as any for the planner: blocked sequences take the place of those admitted last."""

    interface_version = 1

    def admit(self, request: RequestView, num_waiting: int) -> Accept:
        return Accept()

    def order_running(self, view: StepView) -> list[int]:
        return [request.sequence_id for request in view.running]

    def order_waiting(self, view: StepView) -> list[int]:
        return [request.sequence_id for request in view.waiting]

    def share(self, view: StepView, request: RequestView, tokens_left: int) -> int:
        return tokens_left

    def on_blocked(self, view: StepView, request: RequestView, need: str) -> Stop | Victims:
        ids = [one.sequence_id for one in view.running]
        if request.sequence_id not in ids:
            return Stop()
        return Victims(tuple(reversed(ids[ids.index(request.sequence_id) + 1 :])))

    def on_event(self, event: Event) -> None:
        """Nothing is counted."""


class PlannerByPolicy:
    """The kernel's planner in the shape of a scheduler component."""

    interface_version = 1
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        self._planner = PolicyScheduler(_LastInFirstOut())

    @classmethod
    def capabilities(cls, config: Any) -> Capabilities:
        return Capabilities()

    def plan(self, view: StepView, budget: Budget, kv: KVTransaction) -> StepPlan:
        return self._planner.plan(view, budget, kv)


@pytest.mark.parametrize("check", **cases(scheduler_checks(PlannerByPolicy)))
def test_planner(check: Check) -> None:
    check.run()


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


def transformers_config(family: str) -> Any:
    """A small model of the family as transformers configures it."""
    transformers = pytest.importorskip("transformers")
    model_type = "gemma3_text" if family == "gemma3" else family
    return transformers.AutoConfig.for_model(model_type, **SIZES)


def transformers_shapes(config: Any) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of its tensors, from transformers itself; nothing is allocated."""
    import torch
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_model_family(family: str) -> None:
    config = transformers_config(family)
    cls = load(next(entry for entry in list_entries("model") if entry.name == family))
    # transformers has a default for every size of Gemma 3, and the published multimodal configs rely on them
    required = () if family == "gemma3" else REQUIRED
    report = run_checks(model_checks(cls, config.to_dict(), transformers_shapes(config), required))
    assert report.ok, str(report)


def test_no_family_was_missed() -> None:
    targets = {entry.target for entry in list_entries("model") if entry.distribution == "pluglm"}
    checked = {entry.target for entry in list_entries("model") if entry.name in FAMILIES}
    assert targets == checked
