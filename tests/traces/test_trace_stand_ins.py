"""What stands in for the outside world in the traces is held to the real engine: same plans, same blocks, same tokens.

Expected tokens are the fake backend's documented ones, as in the other engine tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_cases import fake_config, fake_tokens
from trace_case import Trace
from trace_choices import OWN, pairs
from trace_generate import make_trace
from trace_model import EOS, TraceBackend
from trace_oracle import run_trace
from trace_parts import InlineGuard, Recorder, Rig, World, build_rig

from pluglm import Engine
from pluglm.backends.fake import FakeBackend, FakeConfig
from pluglm.backends.fake_model import FakeKVStore
from pluglm.kernel.core import ModelInput
from pluglm.kernel.core import Sequence as Lane
from pluglm.kernel.engine import EngineCore
from pluglm.kernel.errors import ComponentFailure, RequestError
from pluglm.kernel.guard import Guard
from pluglm.kernel.interfaces.backend import BackendContext

SEED = 3
CLOCK = {"step_base_s": TraceBackend.STEP_S, "token_s": TraceBackend.TOKEN_S}


class ObservedBackend(FakeBackend):
    """The fake backend, and whoever wants to know of a batch."""

    def about_to_write(self, inputs: ModelInput) -> None:
        """Replaced by the player."""

    def execute(self, model: Any, inputs: ModelInput, attention: Any, kv: Any) -> Any:
        self.about_to_write(inputs)
        return super().execute(model, inputs, attention, kv)


def common_trace(index: int) -> Trace:
    """A trace that the real engine can play too: nothing is drawn, no fault is planted, no call hangs."""
    trace = make_trace(index, SEED)
    arrivals = tuple(replace(one, temperature=0.0, search=None) for one in trace.arrivals)
    return replace(trace, arrivals=arrivals, faults=(), holds=(), drafts=0, search=None, tier=None)


def config_of(trace: Trace, model: Path) -> dict[str, Any]:
    policy = trace.policy
    if policy in OWN:
        policy = f"{OWN[policy][1].__module__}:{OWN[policy][1].__name__}"
    return {
        "model": {"path": str(model), "dtype": "float32", "max_model_len": trace.max_model_len},
        "backend": {"use": f"{__name__}:ObservedBackend", **CLOCK},
        "kv": {"use": trace.kv, **trace.kv_config},
        "scheduler": {"use": policy, **trace.policy_config},
        "engine": {
            "max_num_seqs": trace.num_seats,
            "max_step_tokens": trace.num_tokens,
            "max_waiting_requests": trace.max_waiting_requests,
            "max_waiting_tokens": trace.max_waiting_tokens,
            "when_kv_full": trace.when_kv_full,
            "offload_memory": trace.offload_bytes,
            "num_threads": 1,
        },
    }


def closed_form(vocab_size: int, lane: Lane, count: int) -> list[int]:
    return fake_tokens(list(lane.request.prompt_token_ids), count, vocab_size)


@contextmanager
def real_rig(trace: Trace, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """The engine that `Engine.from_config` makes, with its own guard, tokenizer, text, sampler and wiring."""
    with Engine.from_config(fake_config(model, Path(__file__).parent, **config_of(trace, model))) as engine:
        recorder, parts = Recorder(), engine._core.parts
        monkeypatch.setattr(parts.guard, "close", lambda: None)  # the oracle still calls the KV manager after the end
        backend: Any = parts.runner.backend
        yield Rig(
            core=EngineCore(replace(parts, hooks=recorder)),
            recorder=recorder,
            guard=parts.guard,
            backend=backend,
            advance=backend.advance,
            closed_form=lambda lane, count: closed_form(parts.runner.spec.vocab_size, lane, count),
            namespace_number=lambda namespace: 0,
            has_letters=False,
        )
        monkeypatch.undo()


def stand_in_rig(trace: Trace, real: Rig) -> Rig:
    """The same world below, everything else as in all other traces."""
    model = real.core.parts.runner.model
    context = BackendContext(dtype="float32", deterministic=False, num_threads=1)
    world = World(
        backend=ObservedBackend(FakeConfig(**CLOCK), context),
        model=model,
        make_store=FakeKVStore,
        closed_form=lambda lane, count: closed_form(model.spec.vocab_size, lane, count),
        namespace_number=lambda namespace: 0,
    )
    return build_rig(trace, world)


@pytest.mark.parametrize("index", range(len(pairs())), ids=lambda index: "+".join(pairs()[index]))
def test_a_trace_on_the_real_engine_goes_like_one_on_the_stand_ins(
    index: int, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One trace for every scheduler with every manager; both keep all invariants and decide alike at every step."""
    trace = common_trace(index)
    with real_rig(trace, tiny_model, monkeypatch) as real:
        assert real.core.parts.eos_token_ids == {EOS}
        stand_in = run_trace(trace, stand_in_rig(trace, real))
        outcome = run_trace(trace, real)
    assert outcome.violation is None, outcome.violation
    assert stand_in.violation is None, stand_in.violation
    assert outcome.log == stand_in.log
    assert outcome.tokens == stand_in.tokens
    assert outcome.counts == stand_in.counts


def answer(guard: Any, error: BaseException | None) -> str:
    def call() -> int:
        if error is not None:
            raise error
        return 7

    try:
        return str(guard.call("slot 'name'", call))
    except (ComponentFailure, RequestError) as failure:
        return f"{type(failure).__name__}: {failure}"


@pytest.mark.parametrize(
    "error",
    [None, ValueError("wrong"), RequestError("too long"), ComponentFailure("kv 'x'", "broke"), KeyError("k")],
    ids=lambda error: type(error).__name__,
)
def test_the_guard_without_a_thread_answers_like_the_real_one(error: BaseException | None) -> None:
    guard = Guard(timeout_s=30)
    try:
        assert answer(InlineGuard(), error) == answer(guard, error)
    finally:
        guard.close()
