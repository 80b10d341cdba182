"""What the differential test of KV memory varies: prompts with shared starts, and a scheduler that always preempts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_cases import ids, real_config, write_plugin

from pluglm import Engine, RequestOutput, RunConfig, SamplingParams

MAX_MODEL_LEN = 96  # tokens; the longest request has 69 + 5
FORCED = "forced"
FORCED_SOURCE = '''
"""Plans as fcfs does, and takes somebody's seat in every step that has anybody running."""

from dataclasses import replace

from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.scheduler import Scheduler
from pluglm.kernel.planner import PolicyScheduler
from pluglm_schedulers.fcfs import FcfsPolicy

MODES = ("preempted", "offloaded", "paused")  # fields of StepPlan
MOST_RECOMPUTES = 2  # of one sequence: computing everything again each time, it would never get anywhere


class ForcedPreemption(Scheduler):
    Config = ComponentConfig
    interface_version = 1

    def __init__(self, config, context):
        self.inner = PolicyScheduler(FcfsPolicy(FcfsPolicy.Config(), context))
        self.counts = dict.fromkeys(MODES, 0)
        self.recomputes = {}

    def plan(self, view, budget, kv):
        if not view.running:
            return self.inner.plan(view, budget, kv)
        turn = sum(self.counts.values())
        victim = view.running[turn % len(view.running)]
        mode = MODES[turn % len(MODES)]
        if mode == "preempted" and self.recomputes.get(victim.sequence_id, 0) >= MOST_RECOMPUTES:
            mode = MODES[1 + turn % 2]
        if mode == "preempted":
            self.recomputes[victim.sequence_id] = self.recomputes.get(victim.sequence_id, 0) + 1
        if mode == "paused":
            kv.trim(victim.sequence_id, victim.num_computed)
        else:
            kv.release(victim.sequence_id)
        self.counts[mode] += 1
        others = tuple(one for one in view.running if one is not victim)
        plan = self.inner.plan(replace(view, running=others), budget, kv)
        return replace(plan, **{mode: (*getattr(plan, mode), victim.sequence_id)})
'''


@dataclass(frozen=True)
class Case:
    """One request of the mix."""

    prompt: tuple[int, ...]
    params: SamplingParams


def mixed_requests(count: int) -> list[Case]:
    """One in four has a prompt of 65 to 69 tokens, the others of 17 to 21; each kind shares all but its last 1 to 3.

    Half are greedy, half are sampled with seeds, and one in four wants two outputs.
    """
    draw = random.Random(3)
    long, short = ([draw.randrange(1, 320) for _ in range(length)] for length in (66, 18))
    cases = []
    for number in range(count):
        start = (long if number % 4 == 0 else short)[: draw.choice((-2, None))]
        prompt = (*start, *(draw.randrange(1, 320) for _ in range(draw.randint(1, 3))))
        params = SamplingParams(
            temperature=0.0 if number % 2 else 0.9,
            top_k=0 if number % 3 else 40,
            seed=number,
            max_tokens=draw.randint(2, 5),
            n=2 if number % 8 in (2, 7) else 1,
        )
        cases.append(Case(prompt, params))
    return cases


def engine_config(
    model: Path, folder: Path, *, chunk: int, block_size: int, kv: str = "paged", forced: bool = False
) -> RunConfig:
    """chunk: tokens of a step. A forced run has KV for the longest request and little more, so it also runs short."""
    if forced:
        write_plugin(folder, FORCED_SOURCE, FORCED)
    longest = -(-MAX_MODEL_LEN // block_size)
    data: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32", "max_model_len": MAX_MODEL_LEN},
        "kv": {"use": kv, "block_size": block_size, "num_blocks": longest * (4 if forced else 24)},
        "engine": {"max_step_tokens": chunk, "max_num_seqs": 16},
    }
    return real_config(model, folder, **data, **({"scheduler": f"{FORCED}:ForcedPreemption"} if forced else {}))


def run_together(engine: Engine, cases: list[Case]) -> list[RequestOutput]:
    return engine.generate([ids(*case.prompt) for case in cases], [case.params for case in cases])


def tokens_of(output: RequestOutput) -> list[tuple[Any, ...]]:
    """Per lane: its tokens and why it ended."""
    return [(one.lane, tuple(one.token_ids), one.finish_reason, one.stop) for one in output.completions]
