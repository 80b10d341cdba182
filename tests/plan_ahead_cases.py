"""Backends that compute late, schedulers with faults, and how tests of planning ahead drive an engine on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_cases import GREEDY, fake_config, write_plugin

from pluglm import Engine, SamplingParams
from pluglm.kernel.core import Event

SOURCE = """
import threading
from pluglm.backends.cpu import CpuBackend
from pluglm.backends.fake import FakeBackend
from pluglm_schedulers.fcfs import FcfsPolicy


class Late:
    '''Computes when its result is asked for.'''
    def launch(self, model, inputs, attention, kv):
        return lambda: self.execute(model, inputs, attention, kv)


class LateFake(Late, FakeBackend):
    pass


class LateCpu(Late, CpuBackend):
    pass


class Waiting(FakeBackend):
    '''Computes on a thread of its own, and not before the next step was planned.'''
    planned = None
    def launch(self, *arguments):
        self.planned, found = threading.Event(), []
        def compute():
            if self.planned.wait(20):
                found.append(self.execute(*arguments))
        thread = threading.Thread(target=compute)
        thread.start()
        def wait():
            thread.join()
            return found[0]
        return wait


class Policy(FcfsPolicy):
    '''told: called with every view that is ordered.'''
    def __init__(self, config, context):
        super().__init__(config, context)
        self.told = lambda view: None
    def order_running(self, view):
        self.told(view)
        return super().order_running(view)
    def checkpoint(self):
        return super().checkpoint()


class BadStart(LateFake):
    fails = False
    def launch(self, *arguments):
        if self.fails: raise RuntimeError('no launch')
        return super().launch(*arguments)


class BadEnd(LateFake):
    fails = False
    def launch(self, *arguments):
        wait = super().launch(*arguments)
        def end():
            logits = wait()
            if self.fails: raise RuntimeError('lost on the way')
            return logits
        return end


class Heir(Policy):
    '''Has not promised anything.'''


class NoWayBack(Policy):
    '''What takes things back raises.'''
    def checkpoint(self):
        def restore(): raise ValueError('no way back')
        return restore


class NoCheckpoint(Policy):
    fails = False
    def checkpoint(self):
        if self.fails: raise ValueError('no checkpoint')
        return super().checkpoint()
"""
MakeEngine = Callable[..., Engine]


def engines(tiny_model: Path, tmp_path: Path) -> Any:
    """As a fixture, make(backend=, scheduler=, ahead=, ...) -> an engine on a backend of SOURCE; closed at the end."""
    write_plugin(tmp_path, SOURCE)
    made: list[Engine] = []

    def build(backend: str = "LateFake", scheduler: str = "Policy", ahead: Any = True, **slots: Any) -> Engine:
        names = {"backend": f"plugin:{backend}", "scheduler": f"plugin:{scheduler}"}
        engine = {"plan_ahead": ahead, **slots.pop("engine", {})}
        made.append(Engine.from_config(fake_config(tiny_model, tmp_path, **{**names, **slots, "engine": engine})))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def run(engine: Engine, *prompts: list[int], params: SamplingParams = GREEDY) -> list[list[Event]]:
    """The events of every step, until nobody is left."""
    core = engine.core
    for number, prompt in enumerate(prompts):
        core.add(f"r{number}", prompt, params)
    steps = []
    while core.roster.requests:
        steps.append(core.step())
        core.kv.audit()
        assert len(steps) < 500
    steps.append(core.step())
    return steps


def tokens(steps: list[list[Event]], name: str = "r0") -> list[int]:
    return [token for events in steps for one in events if one.request_id == name for token in one.token_ids]


def told(steps: list[list[Event]]) -> list[list[tuple[Any, ...]]]:
    """What a caller sees of each step, without times."""
    return [[(e.request_id, e.lane, e.token_ids, e.text, e.finish_reason, e.error) for e in one] for one in steps]
