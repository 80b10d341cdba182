"""What the kernel does not know of: a prompt's text or log-probabilities, the best of many, useless drafts."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import cast

from pluglm.acceptance_alarm import AcceptanceAlarm
from pluglm.arguments import Options
from pluglm.best_of import keep_best
from pluglm.kernel import sampling_params as kernel
from pluglm.kernel.core import Event, Request, TokenLogprobs
from pluglm.kernel.errors import RequestError
from pluglm.kernel.parts import Parts
from pluglm.kernel.roster import Roster
from pluglm.outputs import Prompt, RequestOutput, StreamChunk
from pluglm.params import SamplingParams, as_given
from pluglm.prompt_scores import ScoringRunner
from pluglm.target.access import LendingDrafter
from pluglm.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Wish:
    """Of one live request. echo: the prompt's text, for each lane once. sequence_id: whose prompt is scored.

    num_best: outputs to keep of all that were drawn.
    """

    echo: str = ""
    echoed: set[int] = field(default_factory=set)
    sequence_id: int | None = None
    is_told: bool = False  # a stream says it once
    num_best: int | None = None
    keeps_logprobs: bool = False


class Extras:
    """Kept from when a request is taken until nobody reads it any more; calls take turns, as those of the engine."""

    def __init__(self, parts: Parts) -> None:
        """parts: of the engine; its runner is to be replaced by `runner`."""
        self.runner = ScoringRunner(parts.runner, parts.tokenizer.vocab_size)
        self._tokenizer = cast(Tokenizer, parts.tokenizer)
        self._wishes: dict[str, _Wish] = {}
        self._alarm = AcceptanceAlarm(parts.names.get("drafter", ""))
        self._drafter = parts.drafter

    def close(self) -> None:
        """Lets go of weights and KV memory, of the drafter's part in them too. Nothing runs any more."""
        self.runner.let_go()
        if isinstance(self._drafter, LendingDrafter):
            self._drafter.let_go()

    def options(self, params: kernel.SamplingParams, options: Options) -> Options:
        """A prompt that is scored has a salt of its own: KV that came from a cache would leave rows out."""
        if as_given(params).prompt_logprobs is None:
            return options
        return options._replace(salt=f"{options.salt} prompt_logprobs {secrets.token_hex(8)}")

    def enter(self, request: Request, roster: Roster, prompt: Prompt, params: kernel.SamplingParams) -> None:
        """A request that the kernel took, before its first step."""
        wanted = as_given(params)
        is_ranked = wanted.best_of is not None
        wish = _Wish(num_best=wanted.n if is_ranked else None, keeps_logprobs=wanted.logprobs is not None)
        if wanted.echo:
            skip = wanted.skip_special_tokens
            ids = request.prompt_token_ids
            wish.echo = prompt if isinstance(prompt, str) else self._tokenizer.decode(ids, skip_special_tokens=skip)
        if wanted.prompt_logprobs is not None:
            wish.sequence_id = roster.requests[request.request_id].live[0].sequence_id
            self.runner.score(wish.sequence_id, request.prompt_token_ids, wanted.prompt_logprobs)
        if wish.echo or wish.sequence_id is not None or is_ranked:
            self._wishes[request.request_id] = wish

    def leave(self, request_id: str) -> None:
        wish = self._wishes.pop(request_id, None)
        if wish is not None and wish.sequence_id is not None:
            self.runner.forget(wish.sequence_id)

    def dressed(self, event: Event) -> Event:
        """The event, with the prompt's text before a lane's first. Of a request's last one the drafts are noted."""
        if event.metrics is not None:
            self._alarm.note(event.metrics.speculation)
        wish = self._wishes.get(event.request_id)
        if wish is None or not wish.echo or event.lane in wish.echoed:
            return event
        wish.echoed.add(event.lane)
        return replace(event, text=wish.echo + event.text)

    def chunk(self, event: Event) -> StreamChunk:
        """The first of a request carries its prompt's log-probabilities: they are there before any token is."""
        wish, chunk = self._wishes.get(event.request_id), StreamChunk.of(event)
        if wish is None or wish.is_told or not (scores := self._scores(wish)):
            return chunk
        wish.is_told = True
        return replace(chunk, prompt_logprobs=tuple(scores))

    def _scores(self, wish: _Wish) -> list[TokenLogprobs | None]:
        return [] if wish.sequence_id is None else self.runner.scores(wish.sequence_id)

    def complete(self, outputs: Iterable[RequestOutput]) -> None:
        """Outputs that have ended, as their params want them; those that were refused at the door stay as they are."""
        for output in outputs:
            wish = self._wishes.get(output.request_id)
            if wish is None or output.seed is None:
                continue
            output.prompt_logprobs = self._scores(wish)
            if wish.num_best is not None:
                keep_best(output, wish.num_best, keeps_logprobs=wish.keeps_logprobs)


def require_streamable(params: kernel.SamplingParams, is_stream: bool) -> None:
    """Raises RequestError for what only whole outputs have, and for what bare events do not carry."""
    if isinstance(params, SamplingParams):  # the kernel's own have neither, and what else it may be is refused later
        if params.best_of is not None:
            raise RequestError("best_of ranks whole outputs, so it cannot stream; use generate, or n")
        if params.prompt_logprobs is not None and not is_stream:
            raise RequestError("prompt_logprobs are not in events; use generate or stream")
