"""An engine for one trace, built directly from its parts in well under a millisecond: no config file, thread or text.

The kernel's own classes do all the work; what stands in for the outside world is here. `test_trace_stand_ins.py` holds
the stand-ins to the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trace_case import Trace
from trace_choices import component, managers, schedulers
from trace_model import (
    EOS,
    SPEC,
    VOCAB_SIZE,
    TraceBackend,
    TraceModel,
    TraceSampler,
    TraceStore,
    continuation,
    namespace_number,
    search_results,
)
from trace_tier import TIMEOUT_S, TraceTier

from pluglm.ahead.kv import AheadKV
from pluglm.ahead.planning import AheadPlanning
from pluglm.kernel.core import Budget
from pluglm.kernel.core import Sequence as Lane
from pluglm.kernel.engine import EngineCore
from pluglm.kernel.errors import ComponentFailure, RequestError, describe
from pluglm.kernel.guard import Guarded, Watched
from pluglm.kernel.interfaces.component import BuildContext
from pluglm.kernel.interfaces.drafter import DraftRequest, Proposal
from pluglm.kernel.interfaces.kv import KVLayout, PrefixCache
from pluglm.kernel.interfaces.model import ModelSpec
from pluglm.kernel.interfaces.services import TextDelta
from pluglm.kernel.parts import Limits, Parts
from pluglm.kernel.planner import PolicyScheduler
from pluglm.kernel.runner import ModelRunner
from pluglm.kv.no_tiers import NoTiers
from pluglm.kv.tiering import KVTiers

SLOTS = ("backend", "attention", "kv", "scheduler", "sampler", "drafter", "grammar", "search")


class InlineGuard:
    """A Guard without a thread. settled is the driver's to say."""

    def __init__(self) -> None:
        self.active, self.settled = "", True

    def call(self, component: str, function: Callable[[], Any]) -> Any:
        self.active = component
        try:
            return function()
        except (ComponentFailure, RequestError):
            raise
        except Exception as error:
            raise self.explain(error) from error

    def run(self, steps: Guarded[Any]) -> Any:
        """The generator to its end, each call made where it stands."""
        try:
            wanted = next(steps)
            while True:
                try:
                    result = self.call(*wanted)
                except (ComponentFailure, RequestError) as failure:
                    wanted = steps.throw(failure)
                else:
                    wanted = steps.send(result)
        except StopIteration as end:
            return end.value

    def explain(self, error: BaseException) -> BaseException:
        if isinstance(error, ComponentFailure | RequestError):
            return error
        failure = ComponentFailure(self.active, f"raised {describe(error)}")
        failure.__cause__ = error
        return failure

    def wait_settled(self, share: float) -> None:
        """Nothing to wait for: it takes steps, not seconds."""

    def close(self) -> None:
        """No thread."""


class Recorder:
    """The hooks: keeps what they are told until `take`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call(self, hook: str, **arguments: Any) -> None:
        self.calls.append((hook, arguments))

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        taken, self.calls = self.calls, []
        return taken


def letter(token_id: int) -> str:
    return chr(ord("A") + token_id)


class LetterStream:
    """Text of one letter for each token."""

    def push(self, token_id: int) -> TextDelta:
        return TextDelta(letter(token_id))

    def finish(self) -> str:
        return ""


class LetterTokenizer:
    """What the kernel asks of a tokenizer: its size."""

    eos_token_ids = frozenset({EOS})

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size


class ScriptedDrafter:
    """Proposes what a greedy request would draw, every third token wrong. `known` are the sequences not released."""

    def __init__(self, num_tokens: int, namespace_of: Callable[[int], int]) -> None:
        self._num_tokens, self._namespace_of = num_tokens, namespace_of
        self.known: set[int] = set()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [Proposal(self._draft(one)) for one in requests]

    def _draft(self, request: DraftRequest) -> list[int]:
        self.known.add(request.sequence_id)
        tokens, namespace = request.token_ids, self._namespace_of(request.sequence_id)
        count = min(self._num_tokens, request.max_tokens, 1 + len(tokens) % 3)
        right = continuation(tokens, namespace, count)
        return [(token + 1) % VOCAB_SIZE if (len(tokens) + i) % 3 == 0 else token for i, token in enumerate(right)]

    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        """Nothing is learnt."""

    def release(self, sequence_id: int) -> None:
        self.known.discard(sequence_id)


@dataclass(slots=True, kw_only=True)
class Rig:
    """An engine that a trace can be played on, and what an oracle may know of it from outside.

    advance: moves the clock while nothing is computed. closed_form: so many tokens of a lane that runs alone.
    namespace_number: what slots hold above the position. has_letters: whether texts are letters.
    """

    core: EngineCore
    recorder: Recorder
    guard: Any
    backend: Any
    advance: Callable[[float], None]
    closed_form: Callable[[Lane, int], list[int]]
    namespace_number: Callable[[bytes], int] = namespace_number
    has_letters: bool = True
    drafter: ScriptedDrafter | None = None

    @property
    def kv(self) -> Any:
        """The manager itself, without what watches its calls."""
        return getattr(self.core.kv, "_target", self.core.kv)

    def reset_cache(self) -> None:
        """As the public engine does it."""
        self.core.memory.reset_cache()
        self.core.parts.tiers.reset(self.core)

    def search_form(self, lane: Lane) -> list[tuple[int, ...]] | None:
        """The results of a search that runs alone; None when there are too few of them."""
        request, search = lane.request, self.core.parts.search
        if search is None or request.params.search is None:
            return None
        params = request.params
        walk = search.start(params.search, params.n, request.max_new_tokens, params.ignore_eos)
        try:
            return search_results(walk, request.prompt_token_ids, self.namespace_number(lane.namespace))
        except RequestError:
            return None


@dataclass(slots=True, kw_only=True)
class World:
    """What the engine is put on top of, its tokens in closed form, and what its slots hold above the position."""

    backend: Any = field(default_factory=TraceBackend)
    model: Any = field(default_factory=TraceModel)
    make_store: Callable[[KVLayout], Any] = TraceStore
    closed_form: Callable[[Lane, int], list[int]] = lambda lane, count: _closed_form(lane, count)
    namespace_number: Callable[[bytes], int] = namespace_number


def build_rig(trace: Trace, world: World | None = None, is_ahead: bool = False) -> Rig:
    """A fresh engine for this trace. Raises what the components raise for a config that they refuse.

    is_ahead: steps are planned while others are computed; the scheduler must be a PlansAhead.
    """
    world = world or World()
    context, backend = build_context(trace, world.model.spec), world.backend
    choice, guard, recorder = schedulers()[trace.policy], InlineGuard(), Recorder()
    kv_class = managers()[trace.kv].cls
    kv = kv_class(kv_class.Config(**trace.kv_config), context)
    planner = choice.cls(choice.cls.Config(**trace.policy_config), context)
    is_policy = choice.kind == "scheduling_policy"
    watched: Any = Watched(AheadKV(kv) if is_ahead else kv, guard, "kv")  # type: ignore[arg-type]  # InlineGuard
    drafter = ScriptedDrafter(trace.drafts, lambda one: backend.namespace_of(one)) if trace.drafts else None
    tiers: Any = NoTiers()
    if trace.tier is not None:
        tiers = KVTiers({"trace": TraceTier(backend.now, **trace.tier)}, guard, TIMEOUT_S)  # type: ignore[arg-type]
    search = component("search", trace.search) if trace.search else None
    search = None if search is None else search(search.Config(), context)
    stand_ins: Any = {"tokenizer": context.tokenizer, "drafter": drafter, "guard": guard, "sampler": TraceSampler()}
    parts = Parts(
        runner=ModelRunner(backend, world.model, None, watched, world.make_store(kv.layout)),
        prefix_cache=watched if isinstance(kv, PrefixCache) else None,
        namespace=b"trace",
        kv_fields=dict,
        tiers=tiers,
        scheduler=PolicyScheduler(planner, trace.when_kv_full) if is_policy else planner,
        policy=planner if is_policy else None,
        grammar=None,
        search=search,
        text_stream=lambda params: LetterStream(),
        eos_token_ids=frozenset({EOS}),
        hooks=recorder,
        names={slot: slot for slot in SLOTS} | {"step": "model"},
        budget=Budget(num_tokens=trace.num_tokens, num_seats=trace.num_seats),
        limits=limits_of(trace),
        planning=partial(AheadPlanning, scheduler=planner) if is_ahead else None,
        **stand_ins,
    )
    core = EngineCore(parts)
    backend.namespace_of = lambda one: namespace_number(lane_of(core, one).namespace)
    return Rig(
        core=core,
        recorder=recorder,
        guard=guard,
        backend=backend,
        advance=backend.advance,
        closed_form=world.closed_form,
        namespace_number=world.namespace_number,
        drafter=drafter,
    )


def lane_of(core: EngineCore, sequence_id: int) -> Lane:
    """A live sequence."""
    found = core.roster.running.get(sequence_id)
    return core.roster.waiting[sequence_id] if found is None else found


def limits_of(trace: Trace) -> Limits:
    return Limits(
        max_model_len=trace.max_model_len,
        waiting_requests=trace.max_waiting_requests,
        waiting_tokens=trace.max_waiting_tokens,
        offload_bytes=trace.offload_bytes,
        exits_when_full=trace.when_kv_full == "exit",
    )


def build_context(trace: Trace, spec: ModelSpec = SPEC) -> BuildContext:
    """What components may know of the run. KV memory has no limit but the sizes in the trace."""
    stand_ins: Any = {"tokenizer": LetterTokenizer(spec.vocab_size), "build_runner": None}
    return BuildContext(
        spec=spec,
        device="cpu",
        dtype="float32",
        deterministic=False,
        max_num_seqs=trace.num_seats,
        max_step_tokens=trace.num_tokens,
        max_model_len=trace.max_model_len,
        kv_bytes=1 << 40,
        bytes_per_token=spec.kv_values_per_token * 8,
        eos_token_ids=frozenset({EOS}),
        resolve_component=_resolve,
        **stand_ins,
    )


def _resolve(kind: str, name: str, options: Mapping[str, Any]) -> tuple[type[Any], Any]:
    cls = component(kind, name)
    return cls, cls.Config(**options)


def _closed_form(lane: Lane, count: int) -> list[int]:
    request = lane.request
    return continuation(
        request.prompt_token_ids,
        namespace_number(lane.namespace),
        count,
        temperature=request.params.temperature,
        seed=request.seed,
        lane=lane.lane,
    )
