"""A trace as plain data: the config of a small engine, and what happens to it at which step. Runs nothing.

Every trace is one line of JSON and back, so that a failing one can be kept, sent and replayed.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Literal

from pluglm.kernel.sampling_params import SamplingParams

WhenFull = Literal["shrink", "preempt", "refuse", "exit"]
FaultKind = Literal["raise", "poison"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request. step: of the engine, before which it is added. deadline_s: after its arrival, on the trace's clock.

    temperature 0 is greedy; anything else is drawn with `seed`, so every request is repeatable. search: options of the
    trace's search, whose n best results are wanted instead.
    """

    name: str
    step: int
    prompt: tuple[int, ...]
    max_tokens: int | None
    n: int = 1
    salt: str = ""
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None
    temperature: float = 0.0
    seed: int = 0
    clip: bool = False
    ignore_eos: bool = False
    search: dict[str, Any] | None = None

    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            max_tokens=self.max_tokens,
            clip_max_tokens=self.clip,
            n=self.n,
            ignore_eos=self.ignore_eos,
            search=self.search,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The caller gives a request up before `step`; it may be over or not have come by then."""

    step: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The backend fails at the first batch from `step` on. raise: as a whole, after it has written nonsense.

    poison: one sequence's first new slot is spoilt, and every row that reads it has NaN logits.
    """

    step: int
    kind: FaultKind
    nth: int = 0  # which sequence of the batch is poisoned, modulo how many there are


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """From `step` on, for that many steps, an abandoned call keeps the KV of those that end out of use."""

    step: int
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """policy: an installed scheduler or policy, or one of trace_policies. kv_config, policy_config: their own keys.

    drafts: tokens that the scripted drafter proposes at most, 0 is no drafter. search: an installed one. tier: options
    of a TraceTier behind the prefix cache. closes: the step at which the engine is closed, None when everybody is done.
    resets: steps before which cache and tier are told to forget everything.
    """

    policy: str
    kv: str
    policy_config: dict[str, Any]
    kv_config: dict[str, Any]
    num_tokens: int
    num_seats: int
    max_model_len: int
    when_kv_full: WhenFull = "shrink"
    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    offload_bytes: int = 1 << 20
    drafts: int = 0
    search: str | None = None
    tier: dict[str, Any] | None = None
    closes: int | None = None
    arrivals: tuple[Arrival, ...] = ()
    cancels: tuple[Cancel, ...] = ()
    resets: tuple[int, ...] = ()
    faults: tuple[Fault, ...] = ()
    holds: tuple[Hold, ...] = ()

    @property
    def last_step(self) -> int:
        """The last one before which something happens."""
        timed = [one.step for one in (*self.arrivals, *self.cancels)]
        return max((*timed, *self.resets, *(one.step + one.num_steps for one in self.holds)), default=0)


PARTS: dict[str, type[Any]] = {"arrivals": Arrival, "cancels": Cancel, "faults": Fault, "holds": Hold}


def to_json(trace: Trace) -> str:
    """One line; what has its default value is left out."""
    data = _sparse(trace) | {key: [_sparse(one) for one in getattr(trace, key)] for key in PARTS if getattr(trace, key)}
    return json.dumps(data, separators=(",", ":"))


def from_json(line: str) -> Trace:
    """Raises ValueError or TypeError for anything that `to_json` did not write."""
    data = dict(json.loads(line))
    for key, cls in PARTS.items():
        data[key] = tuple(cls(**_tuples(one)) for one in data.get(key, ()))
    return Trace(**_tuples(data))


def _sparse(one: Any) -> dict[str, Any]:
    values = ((field, getattr(one, field.name)) for field in fields(one))
    return {field.name: value for field, value in values if field.name not in PARTS and value != _default(field)}


def _default(field: Field[Any]) -> Any:
    return field.default if field.default is not MISSING else MISSING


def _tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
