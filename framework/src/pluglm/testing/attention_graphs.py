"""What the kit of attention asks of plans for graphs: filled anew they compute the new batch, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch

from pluglm.kernel.interfaces.attention import Attention, AttentionBatch
from pluglm.kernel.interfaces.model import LayerSpec
from pluglm.testing.attention_cases import Case, batch_of, fresh_store, make_case, new_rows, reference
from pluglm.testing.check import Check, expect, make_check
from pluglm.testing.context import small_spec
from pluglm.testing.graphs import NoWaits, WaitError

LAYER = LayerSpec(index=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
LENGTHS, OTHER_LENGTHS, MAX_BLOCKS = (21, 4, 9), (2, 27, 8), 8  # cached tokens of sequences that decode one more


class GraphSubject:
    """build: the class under test, for a layer shape; the plan of one batch, and its slots as a graph keeps them."""

    def __init__(self, build: Callable[[LayerSpec], Attention], device: str, tolerance: float) -> None:
        self.attention = cast(Any, build(LAYER))
        self.device, self.tolerance = device, tolerance
        batch = self.batch(_case(LENGTHS), None)
        self._slots_T = batch.slots_T
        self.plan = self.attention.static_plan(batch, MAX_BLOCKS)

    def batch(self, case: Case, slots_T: torch.Tensor | None) -> AttentionBatch:
        """In the tensor slots_T where there is one."""
        batch = batch_of(case, self.device)
        return batch if slots_T is None else replace(batch, slots_T=slots_T.copy_(batch.slots_T))

    def refill(self, case: Case) -> None:
        self.attention.refill(self.plan, self.batch(case, self._slots_T))

    def run(self, case: Case) -> torch.Tensor:
        """out_TNH of the plan as it is filled."""
        return self.start(case)()

    def start(self, case: Case) -> Callable[[], torch.Tensor]:
        """The run alone, with all that it is given in place."""
        store = fresh_store(case, replace(small_spec(), layers=(LAYER,)), self.device)
        rows = new_rows(case, self.device)

        @torch.inference_mode()
        def run() -> torch.Tensor:
            found: torch.Tensor = self.attention.run(LAYER, *rows, self.plan, store)
            return found

        return run

    def compare(self, case: Case) -> None:
        error = float((self.run(case).cpu().double() - reference(case)).abs().nan_to_num(nan=torch.inf).max())
        expect(error <= self.tolerance, f"the float64 reference within {self.tolerance:g}", f"an error of {error:.3g}")


def attention_graph_checks(build: Callable[[LayerSpec], Attention], device: str, tolerance: float) -> Iterator[Check]:
    """For attention whose objects have the methods of GraphAttention."""
    for function in GRAPHS:
        yield make_check(function, lambda: GraphSubject(build, device, tolerance))


def a_graph_plan_computes_the_batch_it_was_made_for(make: Callable[[], GraphSubject]) -> None:
    make().compare(_case(LENGTHS))


def a_refilled_graph_plan_computes_the_new_batch(make: Callable[[], GraphSubject]) -> None:
    """Sequences are longer and shorter than before, and lie in other blocks."""
    subject = make()
    subject.run(_case(LENGTHS))
    subject.refill(_case(OTHER_LENGTHS))
    subject.compare(_case(OTHER_LENGTHS))


def a_refilled_graph_plan_keeps_its_tensors(make: Callable[[], GraphSubject]) -> None:
    subject = make()
    before = _addresses(subject.plan)
    subject.refill(_case(OTHER_LENGTHS))
    expect(_addresses(subject.plan) == before, "a plan with the addresses it was made with", "others after refill")


def a_graph_plan_is_run_without_waiting(make: Callable[[], GraphSubject]) -> None:
    """What the host reads while a graph is captured, it never reads again when that is replayed."""
    run, waited = make().start(_case(LENGTHS)), ""
    try:
        with NoWaits():  # type: ignore[no-untyped-call, unused-ignore]
            run()
    except WaitError as error:
        waited = str(error)
    expect(not waited, "a run whose host reads no tensor", waited)


def _case(lengths: tuple[int, ...]) -> Case:
    return make_case(LAYER, [(cached, 1) for cached in lengths], shuffled=lengths is LENGTHS)


def _addresses(plan: Any) -> list[int]:
    """Of the tensors in it, through dataclasses and sequences."""
    if isinstance(plan, torch.Tensor):
        return [plan.data_ptr()]
    if is_dataclass(plan):
        plan = [getattr(plan, field.name) for field in fields(plan)]
    return [address for one in plan for address in _addresses(one)] if isinstance(plan, list | tuple) else []


GRAPHS: tuple[Callable[[Callable[[], GraphSubject]], None], ...] = (
    a_graph_plan_computes_the_batch_it_was_made_for,
    a_refilled_graph_plan_computes_the_new_batch,
    a_refilled_graph_plan_keeps_its_tensors,
    a_graph_plan_is_run_without_waiting,
)
