"""Planning with trees of drafts: branches get the KV and the tokens that a step leaves over, and draws choose the way.

A branch is a fork of its sequence that computes its whole way in the step. Where the run of one way ends with the token
that another has there, the run goes on in that one. So every token is drawn from the target's row with the coin of its
position, as without branches.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pluglm.branching.branch import Branch
from pluglm.kernel.core import BlockCopies, Sequence, Status
from pluglm.kernel.drawing import Drawer, Drawn, Window
from pluglm.kernel.errors import KVExhausted
from pluglm.kernel.guard import Guarded
from pluglm.kernel.interfaces.target import BranchFollower
from pluglm.kernel.planning import Planning, Step

if TYPE_CHECKING:
    from pluglm.kernel.engine import EngineCore
    from pluglm.kernel.memory import Memory
    from pluglm.kernel.parts import Parts
    from pluglm.kernel.roster import Roster

# R: rows with logits, V: vocabulary

Results = list[tuple[Window, Drawn]]
Ways = SequenceOf[tuple[Sequence, list[list[int]]]]


class _Begun(NamedTuple):
    """A branch that a run may come to, and its rows."""

    branch: Branch
    window: Window
    logits_RV: torch.Tensor


class BranchPlanning(Planning):
    """The kernel's Planning, which leaves branches alone, and what it takes to verify them.

    num_forked, num_taken: how many branches steps had room for, and how many of them a text went on in.
    """

    def __init__(self, parts: Parts, roster: Roster, memory: Memory, engine: EngineCore) -> None:
        super().__init__(parts, roster, memory, engine)
        self._held: list[int] = []  # ids of this step's branches, which may have KV
        self.num_forked = self.num_taken = 0

    def plan(self, step_index: int) -> Guarded[Step]:
        self._give_back()  # an interrupt may have cut the last step short
        step = yield from super().plan(step_index)
        ways = [(sequence, paths) for sequence, count in step.items if (paths := _paths(sequence, count))]
        if ways:
            num_left = self._parts.budget.num_tokens - sum(count for _, count in step.items)
            fork = partial(self._fork_all, ways, num_left)
            forked = yield from self._memory.changing("kv", [trunk for trunk, _ in ways], fork)
            if forked is None:
                step.items = [item for item in step.items if item[0].status is Status.RUNNING]
            else:
                branches, copies = forked
                step.items += [(one, one.num_tokens) for one in branches]
                step.copies += _through(step.copies, copies)
                self.num_forked += len(branches)
        return step

    def draw(self, drawer: Drawer, logits_RV: Any, windows: list[Window]) -> Guarded[Results]:
        """Branches come behind all others in the batch; no result is theirs."""
        trunks = [one for one in windows if not isinstance(one.sequence, Branch)]
        if logits_RV is None or len(trunks) == len(windows):
            drawn = yield from super().draw(drawer, logits_RV, trunks)
        else:
            counts = [len(one.drafts) + 1 for one in windows]
            first_RV, *rest = torch.split(logits_RV, [sum(counts[: len(trunks)]), *counts[len(trunks) :]])
            drawn = yield from super().draw(drawer, first_RV, trunks)
            drawn = yield from self._walk(drawer, drawn, _begun(windows[len(trunks) :], rest))
        self._give_back()
        return drawn

    def _fork_all(self, ways: Ways, num_left: int, kv: Any) -> tuple[list[Branch], BlockCopies]:
        """Runs under the guard. In the order of the step, as far as num_left tokens and idle KV go."""
        found = list[Branch]()
        for trunk, paths in ways:
            known = [trunk.drafts]
            for path in paths:
                num_shared = max(_num_equal(path, one) for one in known)
                if num_shared == len(path) or len(path) >= num_left:
                    continue
                branch = Branch(self._roster.new_id(), trunk, path, num_shared)
                self._held.append(branch.sequence_id)
                if not _fork(kv, branch):
                    break
                known.append(path)
                found.append(branch)
                num_left -= branch.num_tokens
        return found, kv.commit()

    def _walk(self, drawer: Drawer, drawn: Results, begun: list[_Begun]) -> Guarded[Results]:
        """Goes on in branches until no run comes to one. The others are not drawn from, so they leave no trace."""
        starts = {(one.branch.trunk, *one.branch.prefix): one for one in begun}
        runs, taken = {window.sequence: result for window, result in drawn}, dict[Sequence, Branch]()
        moving = list(runs)
        while reached := [found for one in moving if (found := starts.pop((one, *runs[one].token_ids), None))]:
            moving = [one.branch.trunk for one in reached]
            logits_RV = torch.cat([one.logits_RV for one in reached])
            more = yield from super().draw(drawer, logits_RV, [one.window for one in reached])
            for trunk, one, (_, result) in zip(moving, reached, more, strict=True):
                taken[trunk], runs[trunk] = one.branch, _joined(runs[trunk], result)
        yield from self._take_over(taken)
        return [(_way(window, taken.get(window.sequence)), runs[window.sequence]) for window, _ in drawn]

    def _take_over(self, taken: dict[Sequence, Branch]) -> Guarded[None]:
        """The KV of the way that was right becomes its sequence's; that of all branches goes back."""
        live = {trunk: branch for trunk, branch in taken.items() if trunk.status is Status.RUNNING}
        self.num_taken += len(live)

        def take_over(kv: Any) -> bool:
            for trunk, branch in live.items():
                kv.release(trunk.sequence_id)
                kv.fork(branch.sequence_id, trunk.sequence_id)
            for sequence_id in self._held:
                with suppress(ValueError):  # it found no KV
                    kv.release(sequence_id)
            kv.commit()
            return True

        if isinstance(runner := self._parts.runner, BranchFollower):
            for trunk, branch in live.items():
                runner.take_over(trunk.sequence_id, branch.sequence_id)
        if (yield from self._memory.changing("kv", live, take_over)):
            self._held = []

    def _give_back(self) -> None:
        """The KV of branches whose step failed, once no abandoned call can write to it."""
        if self._held:
            self._memory.held_back += self._held
            self._held = []
            self._memory.return_held_back()


def _paths(sequence: Sequence, count: int) -> list[list[int]]:
    """The branches proposed for it, if all of its drafts are in the step."""
    if sequence.proposal is None or sequence.drafts_within(count) < len(sequence.drafts):
        return []
    return sequence.proposal.branches


def _num_equal(path: list[int], other: list[int]) -> int:
    """Tokens that both begin with."""
    places = range(min(len(path), len(other)))
    return next((place for place in places if path[place] != other[place]), len(places))


def _fork(kv: Any, branch: Branch) -> bool:
    """KV for all that a branch computes; False, and none, when it is not idle. Nothing cached is given up for it."""
    kv.fork(branch.trunk.sequence_id, branch.sequence_id)
    kv.trim(branch.sequence_id, branch.num_computed)
    try:
        kv.extend(branch.sequence_id, branch.num_computed + branch.num_tokens, False)
    except KVExhausted:
        kv.release(branch.sequence_id)
        return False
    return True


def _through(first: BlockCopies, second: BlockCopies) -> BlockCopies:
    """The second copies as if made behind the first, in one go with them."""
    sources = {target: source for source, target in first}
    return tuple((sources.get(source, source), target) for source, target in second)


def _begun(windows: list[Window], parts: list[torch.Tensor]) -> list[_Begun]:
    pairs = zip(windows, parts, strict=True)
    return [_Begun(one.sequence, one, part) for one, part in pairs if isinstance(one.sequence, Branch)]


def _joined(run: Drawn, more: Drawn) -> Drawn:
    """A run and what comes behind it: all of the run was drafted."""
    num_accepted = len(run.token_ids) + more.num_accepted
    return Drawn(run.token_ids + more.token_ids, num_accepted, run.logprobs + more.logprobs, more.error)


def _way(window: Window, branch: Branch | None) -> Window:
    """The window with the drafts of the way that was taken."""
    return window if branch is None else Window(window.sequence, tuple(branch.path))
