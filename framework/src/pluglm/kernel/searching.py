"""Requests under a search: their lanes wait for one another, then fork, go on and end as the search says."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from operator import index
from typing import TYPE_CHECKING

import torch

from pluglm.kernel.core import Event, FinishReason, Sequence
from pluglm.kernel.drawing import NEG_INF
from pluglm.kernel.ending import metrics_of
from pluglm.kernel.errors import ComponentFailure
from pluglm.kernel.interfaces.search import Branch, Hypothesis, Walk
from pluglm.kernel.memory import Memory
from pluglm.kernel.parts import Parts
from pluglm.kernel.roster import Roster

if TYPE_CHECKING:
    from pluglm.kernel.engine import EngineCore

# L: lanes, V: vocabulary

MAX_LANES = 1024  # of one request; each is a sequence with KV of its own


class Searching:
    """A lane that has its logits gives up its seat and keeps its KV, so that the others find seats."""

    def __init__(self, parts: Parts, roster: Roster, memory: Memory, engine: EngineCore) -> None:
        self._parts, self._roster, self._memory, self._engine = parts, roster, memory, engine

    def park(self, sequence: Sequence, logits_V: torch.Tensor) -> None:
        """One lane's next-token logits, of which it is waiting for the others' now."""
        sequence.parked = logits_V
        self._roster.wait(sequence)

    def advance(self, request_ids: SequenceOf[str]) -> None:
        """Go on with those requests whose lanes have all come in."""
        for request_id in dict.fromkeys(request_ids):
            lanes = self._roster.requests.get(request_id)
            if lanes is None or (walk := lanes.live[0].walk) is None:
                continue
            if all(one.parked is not None for one in lanes.live):
                self._advance(walk, list(lanes.live))

    def _advance(self, walk: Walk, lanes: list[Sequence]) -> None:
        branches = self._engine.attempt("search", lanes[:1], partial(self._ask, walk, lanes))
        if branches is None:
            return
        if not branches:
            self._end(walk, lanes)
            return
        record, grown = self._roster.requests[lanes[0].request.request_id], list[list[Sequence]]()
        for number, lane in enumerate(lanes):
            children = self._branch(lane, [one.token_id for one in branches if one.lane == number])
            if children is None:
                return
            grown.append(children)
        record.live[:] = [grown[one.lane].pop(0) for one in branches]  # the rows of the next call

    def _ask(self, walk: Walk, lanes: list[Sequence]) -> list[Branch]:
        logits_LV = torch.stack([one.parked for one in lanes if one.parked is not None]).float()
        logits_LV[:, self._parts.tokenizer.vocab_size :] = NEG_INF
        answer = walk.advance(torch.log_softmax(logits_LV, dim=-1))
        branches = [Branch(index(one.lane), index(one.token_id)) for one in answer]
        for one in branches:
            if not 0 <= one.lane < len(lanes) or not 0 <= one.token_id < self._parts.num_ids:
                raise self._failure(f"returned {one}, of {len(lanes)} lanes and {self._parts.num_ids} token ids")
        if len(branches) > MAX_LANES:
            raise self._failure(f"returned {len(branches)} lanes, a request may have {MAX_LANES}")
        most = lanes[0].request.max_new_tokens
        if branches and lanes[0].num_output + 1 >= most:
            raise self._failure(f"goes on after {most} tokens, of which the request may have no more")
        return branches

    def _failure(self, what: str) -> ComponentFailure:
        return ComponentFailure(self._parts.names["search"], what)

    def _branch(self, lane: Sequence, token_ids: list[int]) -> list[Sequence] | None:
        """The lane goes on with the first token and is copied for the others; None when that failed the request.

        A lane that lost its KV while it was parked is computed again, as are its copies.
        """
        if not token_ids:
            self._engine.close_lane(lane)
            lane.parked, lane.token_ids, lane.output_token_ids = None, [], []  # its counts alone are needed any more
            return []
        copies = [
            replace(
                lane,
                sequence_id=self._roster.new_id(),
                token_ids=[*lane.token_ids, token],
                output_token_ids=[*lane.output_token_ids, token],
                parked=None,
                num_preemptions=0,
                num_loaded=0,
                num_cached=0,
                num_recomputed=0,
            )
            for token in token_ids[1:]
        ]
        if copies and lane.holds_kv and not self._memory.fork(lane, copies, lane.num_computed):
            return None
        for copy in copies:
            self._roster.add(copy)
        lane.parked = None
        lane.token_ids.append(token_ids[0])
        lane.output_token_ids.append(token_ids[0])
        self._roster.refresh(lane)
        return [lane, *copies]

    def _end(self, walk: Walk, lanes: list[Sequence]) -> None:
        """The results are the request's outputs."""
        first, now = lanes[0], self._parts.runner.backend.now()
        results = self._engine.attempt("search", lanes[:1], lambda: self._checked(walk, first))
        if results is None:
            return
        record = self._roster.requests[first.request.request_id]
        for lane in lanes:
            self._engine.close_lane(lane)
        num_tokens = sum(len(one.token_ids) for one in results)
        metrics = replace(metrics_of(record.ended, now), num_output_tokens=num_tokens, first_token_s=now)
        for number, one in enumerate(results):
            is_last = number == len(results) - 1
            stream = self._parts.text_stream(first.request.params)
            text = "".join(stream.push(token).text for token in one.token_ids) + stream.finish()
            reason: FinishReason = "stop" if one.stopped else "length"
            event = Event(
                request_id=first.request.request_id,
                lane=number,
                token_ids=one.token_ids,
                text=text,
                lane_finish_reason=reason,
                stop=one.token_ids[-1] if one.stopped else None,
                finish_reason=reason if is_last else None,
                metrics=metrics if is_last else None,
            )
            self._engine.emit(event)

    def _checked(self, walk: Walk, first: Sequence) -> list[Hypothesis]:
        """The results, or ComponentFailure when they are not what the request may get."""
        results = [replace(one, token_ids=tuple(map(index, one.token_ids))) for one in walk.results()]
        params, most = first.request.params, first.request.max_new_tokens
        if len(results) != params.n:
            raise self._failure(f"returned {len(results)} results where {params.n} were asked")
        for one in results:
            if not 0 < len(one.token_ids) <= most:
                raise self._failure(f"returned a result of {len(one.token_ids)} tokens, 1 to {most} are allowed")
            if wrong := [token for token in one.token_ids if not 0 <= token < self._parts.num_ids]:
                raise self._failure(f"returned token id {wrong[0]}, outside 0..{self._parts.num_ids - 1}")
        return results
