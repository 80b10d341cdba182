"""A scheduler that takes seats away for no reason, in every way there is: `write_plugin` makes a file of it."""

from __future__ import annotations

TAKING_SOURCE = '''
"""Plans as fcfs does, and takes somebody's seat in every fourth step, in each of three ways in turn."""

from dataclasses import replace

from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.scheduler import Scheduler
from pluglm.kernel.planner import PolicyScheduler
from pluglm_schedulers.fcfs import FcfsPolicy

MODES = ("preempted", "offloaded", "paused")  # fields of StepPlan


class Taking(Scheduler):
    Config = ComponentConfig
    interface_version = 1

    def __init__(self, config, context):
        self.inner = PolicyScheduler(FcfsPolicy(FcfsPolicy.Config(), context))

    def plan(self, view, budget, kv):
        turn, rest = divmod(view.step, 4)
        if rest or not view.running:
            return self.inner.plan(view, budget, kv)
        victim, mode = view.running[turn % len(view.running)], MODES[turn % len(MODES)]
        if mode == "paused":
            kv.trim(victim.sequence_id, victim.num_computed)
        else:
            kv.release(victim.sequence_id)
        others = tuple(one for one in view.running if one is not victim)
        plan = self.inner.plan(replace(view, running=others), budget, kv)
        return replace(plan, **{mode: (*getattr(plan, mode), victim.sequence_id)})
'''
