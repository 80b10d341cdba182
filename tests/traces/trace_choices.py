"""Which schedulers and KV managers traces run through: all that are installed, and the two of trace_policies.

A new plugin joins by its entry point. Options that a class has by a name known here are drawn, others keep defaults.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from trace_policies import ChaosPolicy, ForcedScheduler

from pluglm.assembly.registry import find, list_entries, load

Draw = Callable[[random.Random], Any]

OWN = {"test:chaos": ("scheduling_policy", ChaosPolicy), "test:forced": ("scheduler", ForcedScheduler)}
POLICY_OPTIONS: dict[str, Draw] = {
    "ageing": lambda dice: dice.choice((None, 0.003, 0.02, 0.2)),
    "boost": lambda dice: dice.choice((None, 0.05, 0.3)),
    "hold_back": lambda dice: dice.choice((0, 2, 4, 32)),
    "input_weight": lambda dice: dice.choice((1.0, 0.5)),
    "long_prefill_share": lambda dice: dice.choice((0.25, 0.5, 1.0)),
    "max_overtakes": lambda dice: dice.choice((0, 1, 3, 64)),
    "max_skips": lambda dice: dice.choice((1, 2, 16)),
    "output_share": lambda dice: dice.choice((0.0, 0.5, 1.0)),
    "preemption": lambda dice: dice.choice(("recompute", "offload", "pause")),
    "quanta": lambda dice: dice.choice(([2, 4], [3], [8, 16, 32])),
    "seed": lambda dice: dice.randrange(1 << 16),
    "skip_blocked": lambda dice: dice.choice((0, 0, 1, 3)),
    "window": lambda dice: dice.choice((1, 3, 128)),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A class that fills a slot."""

    name: str
    kind: str
    cls: type[Any]

    @property
    def options(self) -> Mapping[str, Any]:
        """The keys of its config."""
        return self.cls.Config.model_fields  # type: ignore[no-any-return]


@cache
def schedulers() -> dict[str, Choice]:
    """Whole schedulers and policies by name."""
    entries = [*list_entries("scheduling_policy"), *list_entries("scheduler")]
    installed = {entry.name: Choice(entry.name, entry.kind, load(entry)) for entry in entries}
    return installed | {name: Choice(name, *one) for name, one in OWN.items()}


@cache
def managers() -> dict[str, Choice]:
    return {entry.name: Choice(entry.name, entry.kind, load(entry)) for entry in list_entries("kv")}


@cache
def evictions() -> tuple[str, ...]:
    return tuple(entry.name for entry in list_entries("eviction"))


@cache
def searches() -> tuple[str, ...]:
    return tuple(entry.name for entry in list_entries("search"))


@cache
def pairs() -> tuple[tuple[str, str], ...]:
    """Every scheduler with every manager."""
    return tuple(itertools.product(sorted(schedulers()), sorted(managers())))


@cache
def component(kind: str, name: str) -> type[Any]:
    """A small component of another one, by its entry point."""
    return load(find((kind,), name))


def draw_policy_config(name: str, dice: random.Random) -> dict[str, Any]:
    """Half of the known options, the rest at their defaults."""
    drawn = {key: POLICY_OPTIONS[key](dice) for key in sorted(schedulers()[name].options) if key in POLICY_OPTIONS}
    config = {key: value for key, value in drawn.items() if key == "seed" or dice.random() < 0.5}
    if "step_s" in schedulers()[name].options and dice.random() < 0.5:
        config |= {"step_s": 0.01, "token_s": 0.001}
    return config


def draw_kv_config(
    name: str, dice: random.Random, num_blocks: int, block_size: int, max_model_len: int
) -> dict[str, Any]:
    """num_blocks pieces of memory; those that the class calls regions are long enough for a good part of a request."""
    options = managers()[name].options
    config: dict[str, Any] = {}
    if "num_regions" in options:
        config |= {"num_regions": num_blocks, "region_tokens": dice.randint(max(2, max_model_len // 2), max_model_len)}
    if "num_blocks" in options:
        config |= {"num_blocks": num_blocks, "block_size": block_size}
    if "num_windows" in options:
        config["num_windows"] = dice.choice((None, 1, 2, 4))
    if "eviction" in options:
        config["eviction"] = {"use": dice.choice(evictions())}
    return config


def pool_tokens(config: Mapping[str, Any]) -> int | None:
    """The longest sequence that the pool can hold, by its config alone; None for a config of another kind."""
    if "region_tokens" in config:
        return int(config["region_tokens"])
    return int(config["num_blocks"]) * int(config["block_size"]) if "num_blocks" in config else None
