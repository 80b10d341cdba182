"""Runs a trace on a config's engine: on the fake backend and its virtual clock, or for real. The engine is the same.

Scheduler, KV manager and every limit are the config's own objects; only the backend, and what a quantizer does to
it, is stood for by a step-time model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from pluglm.arguments import silent
from pluglm.assembly.run_config import RunConfig
from pluglm.backends.fake import FakeBackend
from pluglm.engine import Engine
from pluglm.kernel.config import Slot
from pluglm.kernel.errors import IncompatibleError
from pluglm.kernel.interfaces.services import Progress
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.lab.clocks import Clock, VirtualClock, WallClock
from pluglm.lab.metrics import Summary, Targets, summarize, summarize_groups
from pluglm.lab.replay import Outcome, Replay
from pluglm.lab.step_time import StepTime
from pluglm.lab.steps import Step, StepLog, recorder_slot
from pluglm.lab.trace import Trace, part_token_ids

SIMULATED_VOCABULARY = 1024  # ids are labels here: logits of the model's real width would only cost time
WARM_UP_TOKENS = 4
FAKE = ("fake", "pluglm:fake")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One replay. decisions: a digest of all plans; kv_tokens: what the KV pool holds; clock_s: its length on the
    backend's clock; wall_s: in real time."""

    outcomes: list[Outcome]
    steps: list[Step]
    num_empty_steps: int
    decisions: str
    kv_tokens: int
    clock_s: float
    wall_s: float

    def summary(self, targets: Targets) -> Summary:
        return summarize(self.outcomes, targets)

    def to_json(self, targets: Targets, by: str | None = None) -> dict[str, Any]:
        """A record of the run. Everything but wall_s is the same in every run of one config and trace."""
        groups = {} if by is None else summarize_groups(self.outcomes, targets, by)
        return {
            **self.summary(targets).to_json(),
            "groups": {name: one.to_json() for name, one in groups.items()},
            "num_steps": len(self.steps),
            "num_empty_steps": self.num_empty_steps,
            "kv_tokens": self.kv_tokens,
            "num_step_tokens": sum(step.num_tokens for step in self.steps),
            "clock_s": self.clock_s,
            "decisions": self.decisions,
            "wall_s": self.wall_s,
        }


def simulated_config(config: RunConfig, step_time: StepTime | None = None) -> RunConfig:
    """The config with the fake backend in the place of its own, and no quantizer.

    A config that names the fake backend keeps its keys, but for those of step_time. Raises IncompatibleError for a
    drafter: how many drafts are accepted depends on the text, and a simulation has none.
    """
    if config.drafter is not None:
        raise IncompatibleError(
            f"{config.source}: drafter '{config.drafter.use}' cannot be simulated: how many drafts are accepted "
            "depends on the text, and a simulation has none; set drafter=null"
        )
    own = config.backend.options if config.backend.use in FAKE else {}
    keys = {"logits": "cheap", "vocab_size": SIMULATED_VOCABULARY, **own}
    if step_time is not None:
        keys |= step_time.model_dump()
    return config.model_copy(update={"backend": Slot(use="pluglm:fake", **keys), "quantizer": None})


def simulate(config: RunConfig, trace: Trace, step_time: StepTime | None = None, *, progress: Progress = silent) -> Run:
    """The trace on a virtual clock, as fast as the scheduler and the KV manager can plan it."""
    return _run(simulated_config(config, step_time), trace, progress)


def measure(config: RunConfig, trace: Trace, *, progress: Progress = silent) -> Run:
    """The trace on the config's own backend in real time, at its own pace.

    The engine is warmed up by one request first. To run as fast as the engine can, let all requests arrive at once.
    """
    return _run(config, trace, progress)


def _run(config: RunConfig, trace: Trace, progress: Progress) -> Run:
    log = StepLog()
    config = config.model_copy(update={"hooks": (*config.hooks, recorder_slot(log))})
    with Engine(config, progress=progress) as engine:
        core, clock = engine.core, _clock(engine)
        if isinstance(clock, WallClock):
            _warm_up(engine)
            log.clear()
        started_s, wall_started_s = clock.now(), time.perf_counter()
        outcomes = Replay(engine, clock, trace, log, progress).run()
        return Run(
            outcomes=outcomes,
            steps=log.steps,
            num_empty_steps=log.num_empty,
            decisions=log.decisions,
            kv_tokens=core.kv.capacity().total_blocks * core.kv.layout.block_size,
            clock_s=clock.now() - started_s,
            wall_s=time.perf_counter() - wall_started_s,
        )


def _clock(engine: Engine) -> Clock:
    backend = engine.core.parts.runner.backend
    if isinstance(backend, FakeBackend):
        return VirtualClock(backend, idle_s=engine.run.slots["backend"].config.step_base_s)
    return WallClock(backend.now)


def _warm_up(engine: Engine) -> None:
    """The first steps of a process are slow: a whole step of prompt, then a few tokens."""
    core = engine.core
    room = min(core.kv.max_request_tokens(), core.parts.limits.max_model_len) - WARM_UP_TOKENS
    length = max(1, min(core.parts.budget.num_tokens, room))
    params = SamplingParams(temperature=0.0, max_tokens=WARM_UP_TOKENS, ignore_eos=True, seed=0)
    engine.generate({"prompt_token_ids": part_token_ids("warm-up", length, core.parts.num_ids)}, params)
