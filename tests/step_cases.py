"""Helpers of the tests that look between the steps of a run: what was emitted so far, who holds what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_cases import write_plugin

from pluglm import Engine
from pluglm.kernel.core import Event


class Steps:
    """Drives an engine's core step by step, keeps every event, and audits the KV books after every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.core = engine, engine._core
        self.events: list[Event] = []
        self.count = 0

    def add(self, name: str, prompt: list[int], params: Any, **options: Any) -> str:
        self.core.add(name, prompt, params, **options)
        return name

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.events += self.core.step()
            self.count += 1
            self.core.kv.audit()

    def until(self, condition: Callable[[], bool], limit: int = 2000) -> None:
        for _ in range(limit):
            if condition():
                return
            self.step()
        raise AssertionError(f"it has not come to that within {limit} steps")

    def finish(self) -> None:
        """Until nothing is live, and the events of the last endings are delivered."""
        self.until(lambda: not self.core.roster.requests)
        self.step()

    def tokens(self, name: str, lane: int = 0) -> list[int]:
        return [t for one in self.events if (one.request_id, one.lane) == (name, lane) for t in one.token_ids]

    def ends(self, name: str) -> list[Event]:
        return [one for one in self.events if one.request_id == name and one.finish_reason is not None]

    def end(self, name: str) -> Event:
        """The one terminal event of a request, which must be its last."""
        ends = self.ends(name)
        if len(ends) != 1 or [one for one in self.events if one.request_id == name][-1] is not ends[0]:
            raise AssertionError(f"{name} has {len(ends)} terminal events, or others after it")
        return ends[0]

    def lane_ends(self, name: str) -> dict[int, Any]:
        """lane -> its reason; a lane that ended twice is an error."""
        found = [one for one in self.events if one.request_id == name and one.lane_finish_reason is not None]
        if len({one.lane for one in found}) != len(found):
            raise AssertionError(f"a lane of {name} ended twice")
        return {one.lane: one.lane_finish_reason for one in found}

    def metrics(self, name: str) -> Any:
        return self.end(name).metrics

    @property
    def running(self) -> list[str]:
        return [one.request.request_id for one in self.core.roster.running.values()]

    @property
    def waiting(self) -> list[str]:
        return [one.request.request_id for one in self.core.roster.waiting.values()]

    @property
    def held(self) -> int:
        """Blocks in somebody's table."""
        return self.core.kv.capacity().held_blocks

    def sequence(self, name: str, lane: int = 0) -> Any:
        return next(one for one in self.core.roster.requests[name].live if one.lane == lane)

    def table(self, name: str, lane: int = 0) -> tuple[int, ...]:
        return self.core.kv.block_table(self.sequence(name, lane).sequence_id)


TAKES = '''
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.scheduler import Accept, SchedulingPolicy, Stop, Victims


class TakesConfig(ComponentConfig):
    mode: str = "pause"


class Takes(SchedulingPolicy):
    """Lower numbers of priority first; they take seats and KV from higher ones in the configured mode.

    Who runs leaves a token of the step for somebody more urgent that waits.
    """

    Config = TakesConfig
    interface_version = 1

    def __init__(self, config, context):
        self.mode = config.mode

    def admit(self, request, num_waiting):
        return Accept()

    def order_running(self, view):
        return [one.sequence_id for one in sorted(view.running, key=self.rank)]

    def order_waiting(self, view):
        return [one.sequence_id for one in sorted(view.waiting, key=self.rank)]

    def rank(self, request):
        return request.priority, request.arrival_s, request.sequence_id

    def share(self, view, request, tokens_left):
        is_urgent = any(one.priority < request.priority for one in view.waiting)
        return max(1, tokens_left - is_urgent)

    def on_blocked(self, view, request, need):
        victims = sorted((one for one in view.running if one.priority > request.priority), key=self.rank, reverse=True)
        return Victims(tuple(one.sequence_id for one in victims), self.mode) if victims else Stop()

    def on_event(self, event):
        pass
'''


def takes(folder: Path, mode: str) -> dict[str, str]:
    """The slot `scheduler` for a policy whose urgent requests preempt others in this mode."""
    return {"use": f"{write_plugin(folder, TAKES, 'takes')}:Takes", "mode": mode}
