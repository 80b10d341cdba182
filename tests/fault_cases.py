"""Faulty components for the tests of rule 8, and what must hold after each: see tests/faults.

Each faulty component misbehaves for requests whose prompt starts with BAD and is sound for all others. The expected
tokens of the others are the documented hash of the fake backend.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from engine_cases import GREEDY, fake_tokens, require_idle, vocab_size, write_plugin

from pluglm import Engine, SamplingParams

BAD = 13
HEADER = """
import threading, time, numpy as np, torch
from pluglm.kernel.core import PlanItem, StepPlan
from pluglm.kernel.errors import ComponentFailure, KVExhausted, RequestError
from pluglm.kernel.hooks import Hook, hookimpl
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.drafter import Drafter, Proposal
from pluglm.kernel.interfaces.grammar import Grammar
from pluglm.kernel.interfaces.scheduler import Reject, Scheduler, Skip, Stop
from pluglm_attention.naive import NaiveAttention
from pluglm_samplers.chain import ChainSampler
from pluglm_schedulers.fcfs import FcfsPolicy
from pluglm.backends.fake import FakeBackend
from pluglm.kernel.planner import PolicyScheduler
from pluglm.kv.paged import PagedKV
BAD = 13
"""
BASES = {
    "drafter": """
class Faulty(Drafter):
    Config = ComponentConfig
    interface_version = 2
    def __init__(self, config, context): self.bad = set()
    def propose(self, requests):
        self.bad |= {one.sequence_id for one in requests if one.token_ids[0] == BAD}
        return [self.proposal(one) if one.sequence_id in self.bad else Proposal([1]) for one in requests]
    def proposal(self, request): return Proposal(self.one(request))
    def one(self, request): return [1]
    def observe(self, sequence_id, num_accepted, token_ids): pass
    def release(self, sequence_id): pass
""",
    "sampler": """
class Faulty(ChainSampler):
    def sample(self, logits_RV, rows):
        drawn = super().sample(logits_RV, rows)
        bad = [i for i, row in enumerate(rows) if row.prompt_token_ids[0] == BAD]
        return self.spoil(drawn, bad[0]) if bad else drawn
    def spoil(self, drawn, at): return drawn
""",
    "scheduler": """
class Faulty(Scheduler):
    Config = ComponentConfig
    interface_version = 1
    def __init__(self, config, context): self.inner = PolicyScheduler(FcfsPolicy(FcfsPolicy.Config(), context))
    def plan(self, view, budget, kv):
        bad = [one for one in (*view.running, *view.waiting) if one.request_id.startswith("bad")]
        plan = self.inner.plan(view, budget, kv)
        return self.spoil(view, plan, kv, bad[0].sequence_id) if bad else plan
    def spoil(self, view, plan, kv, bad): return plan
""",
    "policy": """
class Faulty(FcfsPolicy):
    pass
""",
    "backend": """
class Faulty(FakeBackend):
    def execute(self, model, inputs, attention, kv):
        bad = [i for i, row in enumerate(inputs.logit_rows_R.tolist()) if self.first(inputs, row, kv) == BAD]
        logits = super().execute(model, inputs, attention, kv)
        return self.spoil(logits, bad) if bad else logits
    def first(self, inputs, row, kv):
        segment = next(s for s in inputs.segments if s.query_start <= row < s.query_start + s.num_query)
        if segment.num_context == 0: return int(inputs.token_ids_T[segment.query_start])
        return int(kv.keys(0)[segment.block_table[0] * inputs.block_size, 0, 0])
    def spoil(self, logits, bad): return logits
""",
    "kv": """
class Faulty(PagedKV):
    armed = False
    def transaction(self):
        inner = super().transaction()
        return Spoilt(inner, self) if self.armed else inner
class Spoilt:
    def __init__(self, inner, manager): self.inner, self.manager = inner, manager
    def __getattr__(self, name): return getattr(self.inner, name)
""",
    "grammar": """
class Faulty(Grammar):
    Config = ComponentConfig
    interface_version = 1
    def __init__(self, config, context): pass
    def compile(self, spec): return Matcher(spec.value)
class Matcher:
    terminated = False
    def __init__(self, value): self.bad, self.accepted = value == "bad", 0
    def fill_mask(self, mask_W): mask_W[:] = -1
    def accept(self, token_id): self.accepted += 1; return True
    def rollback(self, num_tokens): self.accepted -= num_tokens
    def forced(self): return []
""",
}


def faulty(folder: Path, slot: str, body: str) -> str:
    """The base class of a slot with `body` appended to its last class; returns the name to use."""
    source = HEADER + BASES[slot] + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    return f"{write_plugin(folder, source)}:Faulty"


NAMED = "'plugin:Faulty'"


class Case:
    """An engine with one faulty component, driven through its core so that requests can be named."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.core = engine, engine._core
        self.size = vocab_size(engine)

    def run(self, *requests: tuple[str, list[int], SamplingParams]) -> dict[str, Any]:
        """name -> (tokens, terminal event), all admitted at once; the books are audited after every step."""
        tokens: dict[str, list[int]] = {name: [] for name, _, _ in requests}
        ends: dict[str, Any] = {}
        for name, prompt, params in requests:
            self.core.add(name, prompt, params)
        for _ in range(400):
            if len(ends) == len(requests):
                break
            for event in self.core.step():
                assert event.request_id not in ends
                tokens[event.request_id] += event.token_ids
                if event.finish_reason:
                    ends[event.request_id] = event
            self.core.kv.audit()
        assert ends.keys() == tokens.keys()
        return {name: (tokens[name], ends[name]) for name in tokens}

    def require_good(self, result: Any, prompt: list[int]) -> None:
        assert result[1].error is None
        assert result[0] == fake_tokens(prompt, 8, self.size)

    def require_bad(self, result: Any, *says: str) -> None:
        error = result[1].error
        assert result[1].finish_reason == "error"
        assert "\n" not in error
        for text in says:
            assert text in error

    def check(self, *says: str, mates_live: bool | None = True, params: Any = (GREEDY, GREEDY)) -> None:
        """Good alone; good beside bad; good alone again; nothing left behind."""
        good, bad = params
        self.require_good(self.run(("good", [1, 2], good))["good"], [1, 2])
        both = self.run(("good", [1, 2], good), ("bad", [BAD, 2], bad))
        self.require_bad(both["bad"], *says)
        if mates_live is not None:
            if mates_live:
                self.require_good(both["good"], [1, 2])
            else:
                self.require_bad(both["good"], *says)
        self.require_good(self.run(("good", [1, 2], good))["good"], [1, 2])
        require_idle(self.engine)
