"""Draws a trace from a workload. The same workload gives the same trace in every process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pluglm.kernel.errors import ConfigError
from pluglm.lab.amounts import MOST, MOST_REQUESTS
from pluglm.lab.trace import Part, Trace, TraceRequest
from pluglm.lab.workload import Cancellations, Deadlines, Prefixes, Stream, Workload

KeyT = TypeVar("KeyT")
ASPECTS = ("arrivals", "turns", "prompt", "output", "think", "tenant", "priority", "prefix", "deadline", "cancel")


def generate(workload: Workload) -> Trace:
    """Sessions in the order of their arrival, the turns of each one after the other.

    Raises ConfigError for a stream that comes to more than a trace can hold.
    """
    sessions = [
        session for index, stream in enumerate(workload.streams) for session in _sessions(workload.seed, index, stream)
    ]
    sessions.sort(key=lambda turns: turns[0].arrival_s)
    return tuple(turn for turns in sessions for turn in turns)


@dataclass(frozen=True, slots=True)
class _Draws:
    """Everything drawn for one stream: arrays over its S sessions, or over its R requests."""

    arrival_S: np.ndarray
    turns_S: np.ndarray
    tenant_S: list[str]
    priority_S: list[int]
    prefix_S: list[Part | None]
    prompt_R: np.ndarray
    output_R: np.ndarray
    think_R: np.ndarray
    deadline_R: list[float | None]
    cancel_R: list[float | None]


def _sessions(seed: int, index: int, stream: Stream) -> Iterator[list[TraceRequest]]:
    draws = _draw(seed, index, stream)
    start = 0
    for session, num_turns in enumerate(draws.turns_S.tolist()):
        yield [_request(seed, stream, draws, session, turn, start + turn) for turn in range(num_turns)]
        start += num_turns


def _request(seed: int, stream: Stream, draws: _Draws, session: int, turn: int, request: int) -> TraceRequest:
    def name(turn: int) -> str:
        return f"{stream.name}-{session}" + (f".{turn}" if stream.sessions is not None else "")

    own: Part = (f"{seed}/{name(turn)}", int(draws.prompt_R[request]))
    prefix = draws.prefix_S[session] if turn == 0 else None
    tenant = draws.tenant_S[session]
    return TraceRequest(
        request_id=name(turn),
        arrival_s=float(draws.think_R[request] if turn else draws.arrival_S[session]),
        prompt=(own,) if prefix is None else (prefix, own),
        output_tokens=int(draws.output_R[request]),
        after=name(turn - 1) if turn else None,
        tenant=tenant,
        priority=draws.priority_S[session],
        deadline_s=draws.deadline_R[request],
        cancel_s=draws.cancel_R[request],
        salt=tenant if stream.salt_by_tenant else "",
    )


def _draw(seed: int, index: int, stream: Stream) -> _Draws:
    """Every aspect has a generator of its own, so that a change of one leaves what the others draw as it is."""
    random = {
        aspect: np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, index, number))))
        for number, aspect in enumerate(ASPECTS)
    }
    arrivals = stream.arrivals.draw(random["arrivals"], stream.num_arrivals or 0)
    if not arrivals[-1] <= MOST:
        raise ConfigError(f"stream '{stream.name}': its arrivals take more than {MOST:g} seconds; let them come faster")
    count, sessions = len(arrivals), stream.sessions
    turns = np.ones(count, dtype=np.int64) if sessions is None else sessions.turns.draw(random["turns"], count)
    if (total := int(turns.sum())) > MOST_REQUESTS:
        raise ConfigError(f"stream '{stream.name}': its sessions have {total:,} turns; {MOST_REQUESTS:,} is the most")
    return _Draws(
        arrival_S=arrivals,
        turns_S=turns,
        tenant_S=_weighted(random["tenant"], stream.tenants, count),
        priority_S=_weighted(random["priority"], stream.priorities, count),
        prefix_S=_prefixes(random["prefix"], stream.prefixes, f"{seed}/{stream.name}", count),
        prompt_R=stream.prompt.draw(random["prompt"], total),
        output_R=stream.output.draw(random["output"], total),
        think_R=np.zeros(total) if sessions is None else sessions.think_s.draw(random["think"], total),
        deadline_R=_some(random["deadline"], stream.deadlines, total),
        cancel_R=_some(random["cancel"], stream.cancellations, total),
    )


def _weighted(generator: np.random.Generator, weights: Mapping[KeyT, float], count: int) -> list[KeyT]:
    """Keys with probabilities proportional to their weights."""
    keys, shares = list(weights), np.array(list(weights.values()))
    return [keys[index] for index in generator.choice(len(keys), count, p=shares / shares.sum()).tolist()]


def _prefixes(generator: np.random.Generator, prefixes: Prefixes | None, key: str, count: int) -> list[Part | None]:
    if prefixes is None:
        return [None] * count
    lengths = prefixes.length.draw(generator, prefixes.num_groups).tolist()
    weights = {group: (group + 1.0) ** -prefixes.zipf for group in range(prefixes.num_groups)}
    groups = _weighted(generator, weights, count)
    has_one = (generator.random(count) < prefixes.share).tolist()
    return [(f"{key}/prefix-{g}", lengths[g]) if has else None for g, has in zip(groups, has_one, strict=True)]


def _some(generator: np.random.Generator, times: Deadlines | Cancellations | None, count: int) -> list[float | None]:
    """A drawn time with the probability `share`, else None."""
    if times is None:
        return [None] * count
    has_one = (generator.random(count) < times.share).tolist()
    drawn = times.after_s.draw(generator, count).tolist()
    return [time if has else None for time, has in zip(drawn, has_one, strict=True)]
