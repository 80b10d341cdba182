"""What a caller gets back: a whole RequestOutput, or StreamChunks as the tokens come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypedDict

from pluglm.kernel.core import Event, FinishReason, RequestMetrics, TokenLogprobs


class PromptTokens(TypedDict):
    """A prompt that is already token ids."""

    prompt_token_ids: Sequence[int]


class Message(TypedDict):
    """One chat message; the model's own chat template turns a list of them into a prompt."""

    role: str
    content: str


class Chat(TypedDict):
    """A list of messages, as one mapping."""

    messages: Sequence[Message]


Prompt = str | PromptTokens | Chat | Sequence[Message] | Mapping[str, Sequence[int]]


@dataclass(slots=True)
class Completion:
    """One of the outputs of a request; lane is its number, from 0."""

    lane: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | int | None = None

    def add(self, event: Event | StreamChunk) -> None:
        self.token_ids.extend(event.token_ids)
        self.text += event.text
        self.logprobs.extend(event.logprobs)
        self.finish_reason, self.stop = event.lane_finish_reason, event.stop


@dataclass(slots=True)
class RequestOutput:
    """One request, filled by `add` until finish_reason is set.

    token_ids, text, stop, logprobs are those of lane 0; `completions` has all n of them. finish_reason is set when the
    last lane has ended: lane 0's reason when all ended by themselves, else what ended the request. error says why when
    that is `error` or `refused`; metrics, over all lanes, is None when it was refused at the door. prompt_logprobs, if
    asked for, has one entry a prompt token that was computed, None for the first. With best_of, `completions` has the n
    best, best first, and what is said of lane 0 holds for the best.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    metrics: RequestMetrics | None = None
    seed: int | None = None
    completions: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    def add(self, event: Event | StreamChunk) -> None:
        """Take over what one event or chunk of this request says."""
        while len(self.completions) <= event.lane:
            self.completions.append(Completion(len(self.completions)))
        self.completions[event.lane].add(event)
        if event.lane == 0:
            first = self.completions[0]
            self.token_ids, self.text, self.logprobs = first.token_ids, first.text, first.logprobs
            self.stop = first.stop
        self.error = event.error
        self.metrics = event.metrics or self.metrics
        if event.finish_reason is not None:
            by_itself = event.finish_reason in ("stop", "length")
            self.finish_reason = self.completions[0].finish_reason if by_itself else event.finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """New text and tokens of one request; the last chunk has finish_reason and metrics.

    logprobs: one entry a token when the params ask for them. stop: the stop string or token id that ended the lane.
    Of n outputs, lane says which one this is about, and lane_finish_reason is set on the last chunk of each.
    prompt_logprobs: on the first chunk, when asked for; as in RequestOutput.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    lane: int = 0
    lane_finish_reason: FinishReason | None = None
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    @classmethod
    def of(cls, event: Event) -> Self:
        """The caller's view of an event."""
        return cls(
            request_id=event.request_id,
            text=event.text,
            token_ids=event.token_ids,
            logprobs=event.logprobs,
            lane=event.lane,
            lane_finish_reason=event.lane_finish_reason,
            finish_reason=event.finish_reason,
            stop=event.stop,
            error=event.error,
            metrics=event.metrics,
        )


def logprobs_json(entries: Iterable[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """As JSON has them: what is no finite number, which JSON has not, is null."""
    return [None if one is None else _entry_json(one) for one in entries]


def _entry_json(entry: TokenLogprobs) -> dict[str, Any]:
    top = {token: _number(value) for token, value in entry.top.items()}
    return {"token_id": entry.token_id, "logprob": _number(entry.logprob), "rank": entry.rank, "top": top}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
