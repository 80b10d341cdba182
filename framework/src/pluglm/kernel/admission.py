"""What happens to a request at the door: checked against every limit, compiled, shown to the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pluglm.kernel.core import Request, RequestView, Sequence
from pluglm.kernel.errors import RequestError
from pluglm.kernel.guard import Watched
from pluglm.kernel.interfaces.grammar import Matcher
from pluglm.kernel.interfaces.sampler import ParamsChecker
from pluglm.kernel.interfaces.scheduler import Reject

if TYPE_CHECKING:
    from pluglm.kernel.parts import Parts


def admit(request: Request, sequence_id: int, parts: Parts, live: Mapping[str, Sequence], num_waiting: int) -> Sequence:
    """A sequence ready to queue. Raises RequestError naming the request, the limit and the numbers."""
    name = f"request '{request.request_id}'"
    if request.request_id in live:
        raise RequestError(f"{name}: this id is already running; choose another")
    _check_ids(request, parts, name)
    request = replace(request, max_new_tokens=_new_tokens(request, parts, name))
    if isinstance(sampler := parts.sampler, ParamsChecker):
        problem = parts.guard.call(parts.names["sampler"], lambda: sampler.check(request.params))
        if problem:
            raise RequestError(f"{name}: {problem}")
    matcher = _matcher(request, parts, name)
    sequence = Sequence(
        sequence_id=sequence_id, request=request, token_ids=list(request.prompt_token_ids), matcher=matcher
    )
    _ask_policy(sequence, parts, name, num_waiting)
    return sequence


def _check_ids(request: Request, parts: Parts, name: str) -> None:
    if not request.prompt_token_ids:
        raise RequestError(f"{name}: the prompt is empty; give it at least one token")
    vocab_size = parts.num_ids
    for what, ids in (("prompt", request.prompt_token_ids), ("stop_token_ids", request.params.stop_token_ids)):
        if wrong := [one for one in ids if isinstance(one, bool) or not isinstance(one, int)]:
            raise RequestError(f"{name}: {what} holds {wrong[0]!r}, which is not an integer token id")
        if outside := [one for one in ids if not 0 <= one < vocab_size]:
            raise RequestError(f"{name}: {what} holds token id {outside[0]}, outside 0..{vocab_size - 1}")


def _new_tokens(request: Request, parts: Parts, name: str) -> int:
    """max_tokens, or all that the context still holds when none was given; refused when it can never fit."""
    num_prompt, limit = len(request.prompt_token_ids), parts.max_model_len
    pool = parts.runner.kv.max_request_tokens()
    if pool < limit:
        limit, where = pool, f"the KV pool holds {pool} tokens (raise engine.kv_memory, or the sizes set in kv)"
    else:
        where = f"the context holds {limit} tokens (model.max_model_len)"
    if num_prompt >= limit:
        raise RequestError(f"{name}: the prompt has {num_prompt} tokens and {where}; shorten it")
    asked = request.params.max_tokens
    if asked is not None and num_prompt + asked > limit:
        fix = f"ask for at most {limit - num_prompt}, or null for all that fits"
        raise RequestError(f"{name}: prompt {num_prompt} + max_tokens {asked} = {num_prompt + asked}, {where}; {fix}")
    return limit - num_prompt if asked is None else asked


def _matcher(request: Request, parts: Parts, name: str) -> Matcher | None:
    spec, grammar = request.params.grammar, parts.grammar
    if spec is None:
        return None
    if grammar is None:
        raise RequestError(f"{name}: asks for a grammar and none is configured; add `grammar: {{use: llguidance}}`")
    matcher = parts.guard.call(parts.names["grammar"], lambda: grammar.compile(spec))
    watched: Matcher = Watched(matcher, parts.guard, parts.names["grammar"])
    return watched


def _ask_policy(sequence: Sequence, parts: Parts, name: str, num_waiting: int) -> None:
    policy = parts.policy
    if policy is None:
        return
    answer = parts.guard.call(parts.names["scheduler"], lambda: policy.admit(view_of(sequence), num_waiting))
    if isinstance(answer, Reject):
        raise RequestError(f"{name}: {parts.names['scheduler']} refuses it: {answer.reason}")


def view_of(sequence: Sequence) -> RequestView:
    """What schedulers see of it in this step."""
    request = sequence.request
    return RequestView(
        sequence_id=sequence.sequence_id,
        request_id=request.request_id,
        tenant=request.tenant,
        priority=request.priority,
        arrival_s=request.arrival_s,
        num_prompt=sequence.num_prompt,
        num_known=len(sequence.token_ids),
        num_computed=sequence.num_computed,
        num_drafts=len(sequence.drafts),
        num_output=sequence.num_output,
        max_new_tokens=request.max_new_tokens,
        num_preemptions=sequence.num_preemptions,
    )
