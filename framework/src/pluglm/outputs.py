"""What a caller gets back: a whole RequestOutput, or StreamChunks as the tokens come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

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
class RequestOutput:
    """One request, filled by `add` until finish_reason is set.

    error says why when finish_reason is `error` or `refused`; metrics is None when refused.
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

    def add(self, event: Event) -> None:
        """Take over what one event of this request says."""
        self.token_ids.extend(event.token_ids)
        self.text += event.text
        self.logprobs.extend(event.logprobs)
        self.finish_reason, self.stop, self.error = event.finish_reason, event.stop, event.error
        self.metrics = event.metrics or self.metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """New text and tokens of one request; the last chunk has finish_reason and metrics.

    logprobs: one entry a token when the params ask for them. stop: the stop string or token id that ended the request.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
