"""What happens to a request at the door: checked against every limit, compiled, shown to the policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from pluglm.kernel.cache_keys import namespace
from pluglm.kernel.core import Request, Sequence
from pluglm.kernel.errors import RequestError
from pluglm.kernel.guard import Watched
from pluglm.kernel.interfaces.grammar import Matcher
from pluglm.kernel.interfaces.logits_params import NOT_IN_SEARCH
from pluglm.kernel.interfaces.sampler import FinalRows, ParamsChecker
from pluglm.kernel.interfaces.scheduler import Reject
from pluglm.kernel.interfaces.search import Walk
from pluglm.kernel.roster import Roster, view_of

if TYPE_CHECKING:
    from pluglm.kernel.parts import Parts


def admit(request: Request, parts: Parts, roster: Roster) -> Sequence:
    """A sequence ready to queue. Raises RequestError naming the request, the limit and the numbers."""
    name = f"request '{request.request_id}'"
    if request.request_id in roster.requests:
        raise RequestError(f"{name}: this id is already running; choose another")
    _check_ids(request, parts, name)
    _check_queue(request, parts, roster, name)
    request = replace(request, max_new_tokens=_new_tokens(request, parts, name))
    if isinstance(sampler := parts.sampler, ParamsChecker):
        problem = parts.guard.call(parts.names["sampler"], lambda: sampler.check(request.params))
        if problem:
            raise RequestError(f"{name}: {problem}")
    if request.params.logprobs_mode == "processed" and not isinstance(parts.sampler, FinalRows):
        raise RequestError(f"{name}: {parts.names['sampler']} has no final rows; leave logprobs_mode raw")
    walk = _walk(request, parts, name)
    sequence = new_lane(request, 0, parts, roster)
    sequence.walk = walk
    _ask_policy(sequence, parts, name, len(roster.waiting))
    return sequence


def new_lane(request: Request, lane: int, parts: Parts, roster: Roster) -> Sequence:
    """A sequence for one of the request's outputs, with a matcher of its own."""
    return Sequence(
        sequence_id=roster.new_id(),
        request=request,
        lane=lane,
        namespace=cache_namespace(parts, request.salt, len(request.prompt_token_ids)),
        token_ids=list(request.prompt_token_ids),
        matcher=_matcher(request, parts, f"request '{request.request_id}'"),
    )


def cache_namespace(parts: Parts, salt: str, num_prompt: int) -> bytes:
    """Of the cache keys of requests with this salt and that many prompt tokens."""
    if parts.prefix_cache is None:
        return b""
    fields: dict[str, str | int | bytes] = {"run": parts.namespace, "salt": salt}
    if parts.runner.spec.kv_of_prompt_length:
        fields["num_prompt"] = num_prompt
    return namespace(fields)


def _check_queue(request: Request, parts: Parts, roster: Roster, name: str) -> None:
    """The queue is bounded, so that a burst is refused at once instead of waiting for ever."""
    limits = parts.limits
    if limits.waiting_requests is None and limits.waiting_tokens is None:
        return
    queued = list(roster.queued())
    if limits.waiting_requests is not None and len(queued) >= limits.waiting_requests:
        most = f"{limits.waiting_requests} (engine.max_waiting_requests)"
        raise RequestError(f"{name}: {len(queued)} requests wait already, of at most {most}; try again later")
    num_tokens, num_prompt = sum(len(one.prompt_token_ids) for one in queued), len(request.prompt_token_ids)
    if limits.waiting_tokens is not None and num_tokens + num_prompt > limits.waiting_tokens:
        most = f"{limits.waiting_tokens} (engine.max_waiting_tokens)"
        fix = "try again later" if num_prompt <= limits.waiting_tokens else "shorten it, or raise that limit"
        raise RequestError(
            f"{name}: {num_tokens} prompt tokens wait already and this one has {num_prompt}, of at most {most} in all; "
            f"{fix}"
        )


def _check_ids(request: Request, parts: Parts, name: str) -> None:
    if not request.prompt_token_ids:
        raise RequestError(f"{name}: the prompt is empty; give it at least one token")
    check_ids(request.prompt_token_ids, parts, f"{name}: prompt")
    for field, ids in request.params.token_ids().items():
        check_ids(ids, parts, f"{name}: {field}")


def check_ids(ids: tuple[int, ...], parts: Parts, what: str) -> None:
    """Raises RequestError unless the model and the tokenizer know all of them."""
    if wrong := [one for one in ids if isinstance(one, bool) or not isinstance(one, int)]:
        raise RequestError(f"{what} holds {wrong[0]!r}, which is not an integer token id")
    vocab_size = parts.num_ids
    if outside := [one for one in ids if not 0 <= one < vocab_size]:
        raise RequestError(f"{what} holds token id {outside[0]}, outside 0..{vocab_size - 1}")


def _new_tokens(request: Request, parts: Parts, name: str) -> int:
    """max_tokens, or all that the context still holds when none was given; refused when it can never fit."""
    num_prompt, limit = len(request.prompt_token_ids), parts.limits.max_model_len
    pool = parts.runner.kv.max_request_tokens()
    if pool < limit:
        limit, where = pool, f"the KV pool holds {pool} tokens (raise engine.kv_memory, or the sizes set in kv)"
    else:
        where = f"the context holds {limit} tokens (model.max_model_len)"
    if num_prompt >= limit:
        raise RequestError(f"{name}: the prompt has {num_prompt} tokens and {where}; shorten it")
    asked = request.params.max_tokens
    if asked is not None and num_prompt + asked > limit and not request.params.clip_max_tokens:
        fix = f"ask for at most {limit - num_prompt}, or null for all that fits, or set clip_max_tokens"
        raise RequestError(f"{name}: prompt {num_prompt} + max_tokens {asked} = {num_prompt + asked}, {where}; {fix}")
    return limit - num_prompt if asked is None else min(asked, limit - num_prompt)


def _walk(request: Request, parts: Parts, name: str) -> Walk | None:
    params, search = request.params, parts.search
    if (options := params.search) is None:
        return None
    if search is None:
        raise RequestError(f"{name}: asks for a search and none is configured; add `search: {{use: beam}}`")
    if not params.greedy:
        raise RequestError(f"{name}: a search draws nothing; set temperature to 0")
    if wrong := [key for key in NOT_IN_SEARCH if getattr(params, key) != type(params).model_fields[key].default]:
        raise RequestError(f"{name}: a search takes no {wrong[0]}; leave it out")
    guard, slot, num_new = parts.guard, parts.names["search"], request.max_new_tokens
    if problem := guard.call(slot, lambda: search.check(options, params.n)):
        raise RequestError(f"{name}: {problem}")
    walk = guard.call(slot, lambda: search.start(options, params.n, num_new, params.ignore_eos))
    return cast("Walk", Watched(walk, guard, slot))


def _matcher(request: Request, parts: Parts, name: str) -> Matcher | None:
    spec, grammar = request.params.grammar, parts.grammar
    if spec is None:
        return None
    if grammar is None:
        raise RequestError(f"{name}: asks for a grammar and none is configured; add `grammar: {{use: llguidance}}`")
    matcher = parts.guard.call(parts.names["grammar"], lambda: grammar.compile(spec))
    return cast("Matcher", Watched(matcher, parts.guard, parts.names["grammar"]))


def _ask_policy(sequence: Sequence, parts: Parts, name: str, num_waiting: int) -> None:
    policy = parts.policy
    if policy is None:
        return
    answer = parts.guard.call(parts.names["scheduler"], lambda: policy.admit(view_of(sequence, None), num_waiting))
    if isinstance(answer, Reject):
        raise RequestError(f"{name}: {parts.names['scheduler']} refuses it: {answer.reason}")
