"""The kit of drafters on those that are lent the target: what it refuses as a run does, and wrong drafters it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pluglm.kernel.core import Chunk
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.drafter import DraftRequest, Proposal
from pluglm.kernel.interfaces.target import HiddenRows
from pluglm.testing.check import run_checks
from pluglm.testing.drafter import drafter_checks
from pluglm.testing.drafter_target import target_checks


class Plain:
    """Proposes nothing."""

    interface_version = 2
    Config = ComponentConfig

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        self.target = context.target

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [Proposal([]) for _ in requests]

    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        """Nothing to learn."""

    def release(self, sequence_id: int) -> None:
        """Nothing to forget."""


class Borrows(Plain):
    """The target's first layer says the next two tokens, and a hidden state the one token of others.

    It shows how a drafter uses what it is lent, and has a place for each mistake.
    """

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        super().__init__(config, context)
        self.target.use_first_layers(1)
        self.target.use_hidden_states()
        self.kept: dict[int, tuple[int, int]] = {}  # sequence id -> length of its text, what its last state says

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        asked = [one for one in requests if one.token_ids and one.max_tokens]
        drafts: dict[int, list[int]] = {one.sequence_id: [] for one in requests}
        with self.target.room({one.sequence_id: self.size(one) for one in asked}) as roomy:
            running = self.running(asked, roomy)
            for index in range(2):
                chunks = [
                    Chunk(one.sequence_id, (drafts[one.sequence_id] or one.token_ids)[-1:], self.start(one) + index)
                    for one in running
                    if one.max_tokens > index
                ]
                rows = self.target.run_first(chunks)[:, :262].argmax(-1).tolist() if chunks else []
                for chunk, token_id in zip(chunks, rows, strict=True):
                    drafts[chunk.sequence_id].append(token_id)
        for one in asked:
            if not drafts[one.sequence_id]:
                drafts[one.sequence_id] = self.said(one)
        return [Proposal(drafts[one.sequence_id]) for one in requests]

    def size(self, request: DraftRequest) -> int:
        return len(request.token_ids) + min(2, request.max_tokens) - 1

    def start(self, request: DraftRequest) -> int:
        return len(request.token_ids) - 1

    def stop(self, request: DraftRequest) -> int:
        return len(request.token_ids) - 1

    def running(self, asked: list[DraftRequest], roomy: frozenset[int]) -> list[DraftRequest]:
        return [one for one in asked if one.sequence_id in roomy]

    def said(self, request: DraftRequest) -> list[int]:
        """By the state before the newest token."""
        size = len(request.token_ids)
        found = self.target.take_hidden(request.sequence_id, self.stop(request))
        if found is not None:
            row = self.target.logits(self.rows(found)[-1:])[0, :262]
            self.kept[request.sequence_id] = (size, int(row.argmax()))
        known, token_id = self.kept.get(request.sequence_id, (0, 0))
        return [token_id] if known == size else []

    def rows(self, found: HiddenRows) -> Any:
        return found.rows_nD

    def release(self, sequence_id: int) -> None:
        super().release(sequence_id)
        self.kept.pop(sequence_id, None)


class AllOrNone(Borrows):
    """When one has no room, it gives up on all."""

    def running(self, asked: list[DraftRequest], roomy: frozenset[int]) -> list[DraftRequest]:
        return super().running(asked, roomy) if len(roomy) == len(asked) else []


class NeverAgain(Borrows):
    """Who once had no room is never drafted for by the first layers again."""

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        super().__init__(config, context)
        self.without: set[int] = set()

    def running(self, asked: list[DraftRequest], roomy: frozenset[int]) -> list[DraftRequest]:
        self.without |= {one.sequence_id for one in asked} - roomy
        return [one for one in super().running(asked, roomy) if one.sequence_id not in self.without]

    def release(self, sequence_id: int) -> None:
        super().release(sequence_id)
        self.without.discard(sequence_id)


class FromTheStart(Plain):
    """Draws on states alone, and takes the first rows for those of the first tokens."""

    def __init__(self, config: ComponentConfig, context: Any) -> None:
        super().__init__(config, context)
        self.target.use_hidden_states()
        self.rows: dict[int, list[Any]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [Proposal(self.one(request)) for request in requests]

    def one(self, request: DraftRequest) -> list[int]:
        size, sequence_id = len(request.token_ids), request.sequence_id
        found = self.target.take_hidden(sequence_id, size - 1)
        rows = self.rows.setdefault(sequence_id, [])
        rows += [] if found is None else list(found.rows_nD)
        if not rows or not request.max_tokens:
            return []
        return [int(self.target.logits(rows[self.place(size, len(rows))][None])[0, :262].argmax())]

    def place(self, size: int, num_rows: int) -> int:
        return size - 2

    def release(self, sequence_id: int) -> None:
        super().release(sequence_id)
        self.rows.pop(sequence_id, None)


class FromTheEnd(FromTheStart):
    def place(self, size: int, num_rows: int) -> int:
        return num_rows - 1


class RunsAnyway(Borrows):
    def running(self, asked: list[DraftRequest], roomy: frozenset[int]) -> list[DraftRequest]:
        return asked


class TakesTooMuch(Borrows):
    def size(self, request: DraftRequest) -> int:
        return len(request.token_ids) + request.max_tokens + 1


class RunsTooFar(Borrows):
    def size(self, request: DraftRequest) -> int:
        return len(request.token_ids)


class RunsOverTheText(Borrows):
    def start(self, request: DraftRequest) -> int:
        return len(request.token_ids) - 2


class LeavesAGap(Borrows):
    def start(self, request: DraftRequest) -> int:
        return len(request.token_ids)


class TakesTheNewest(FromTheEnd):
    def one(self, request: DraftRequest) -> list[int]:
        self.target.take_hidden(request.sequence_id, len(request.token_ids))
        return super().one(request)


class NeverAsked(Borrows):
    def __init__(self, config: ComponentConfig, context: Any) -> None:
        super().__init__(config, replace(context, target=Deaf(context.target)))
        self.target = context.target


class Deaf:
    def __init__(self, target: Any) -> None:
        pass

    def use_first_layers(self, num_layers: int) -> None:
        pass

    def use_hidden_states(self) -> None:
        pass


class AsksInside(NeverAsked):
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self.target.use_first_layers(1)
        return super().propose(requests)


class UsesItOutside(Borrows):
    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        with self.target.room({}):
            pass


class ForgetsTheRoom(Borrows):
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for one in requests:
            self.target.run_first([Chunk(one.sequence_id, [1], max(0, len(one.token_ids) - 1))])
        return super().propose(requests)


class RoomInRoom(Borrows):
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        with self.target.room({}):
            return super().propose(requests)


class RoomForOthers(Borrows):
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        with self.target.room({99: 1}):
            return [Proposal([]) for _ in requests]


class TwoChunks(Borrows):
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for one in requests[:1]:
            with self.target.room({one.sequence_id: len(one.token_ids)}):
                self.target.run_first([Chunk(one.sequence_id, [1], len(one.token_ids) - 1)] * 2)
        return super().propose(requests)


class AllLayers(Plain):
    def __init__(self, config: ComponentConfig, context: Any) -> None:
        super().__init__(config, context)
        context.target.use_first_layers(len(context.spec.layers))


BROKEN: dict[str, type[Plain]] = {
    "a_full_pool_costs_others_nothing": AllOrNone,
    "want_of_room_leaves_no_trace": NeverAgain,
    "late_states_leave_no_trace": FromTheStart,
}


@pytest.mark.parametrize("cls", [Plain, Borrows, FromTheEnd])
def test_drafters_that_keep_to_it_pass(cls: type[Plain]) -> None:
    report = run_checks(drafter_checks(cls))
    assert report.ok, str(report)
    assert {check.name for check in target_checks(lambda: None, adapts=False, shares=False)} == set(BROKEN)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_drafter_fails_exactly_its_check(name: str) -> None:
    report = run_checks(drafter_checks(BROKEN[name]))
    assert report.failed == (name,), str(report)


MISUSES: dict[type[Plain], str] = {
    RunsAnyway: "was given no room; run those alone that room gave",
    TakesTooMuch: "more than the 12 that were asked for: its 8 and max_tokens, 4",
    RunsTooFar: "run at least one, and up to the",
    RunsOverTheText: "the first allowed is",
    LeavesAGap: "behind what is stored",
    TakesTheNewest: "its newest token has none yet, so stop is at most",
    NeverAsked: "the target was not asked for this; call use_first_layers while the drafter is built",
    AsksInside: "use_first_layers is called while the drafter is built",
    UsesItOutside: "the target may be used inside propose alone",
    ForgetsTheRoom: "run_first may be used inside room alone",
    RoomInRoom: "room was asked for inside room; ask once, for all sequences",
    RoomForOthers: "sequence 99 is not among those that are proposed for, [0",
    TwoChunks: "run_first takes one chunk of each sequence",
    AllLayers: "num_layers is 2 and the model has 2 layers; give 1 to 1",
}


@pytest.mark.parametrize("cls", MISUSES, ids=lambda cls: cls.__name__)
def test_what_a_run_would_refuse_is_refused(cls: type[Plain]) -> None:
    report = run_checks(drafter_checks(cls))
    assert not report.ok
    assert any(MISUSES[cls] in (one.problem or "") for one in report.outcomes), str(report)
