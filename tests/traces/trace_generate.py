"""Draws traces: small pools, few seats, few token ids and shared beginnings, so that everything meets everything."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from trace_case import Arrival, Cancel, Fault, Hold, Trace, WhenFull
from trace_choices import draw_kv_config, draw_policy_config, managers, pairs, pool_tokens, schedulers, searches
from trace_model import VOCAB_SIZE

MAX_STEPS = 40  # arrivals come within these
SEARCH = "beam"
SALTS = ("", "", "a", "b")
TENANTS = ("", "x", "y")


def make_trace(index: int, seed: int = 0, among: tuple[tuple[str, str], ...] | None = None) -> Trace:
    """Trace number `index` of a seed. The pairs of scheduler and manager take turns, so all occur equally often."""
    chosen = among or pairs()
    dice = random.Random(f"{seed}/{index}")
    return _Maker(dice, *chosen[index % len(chosen)]).trace()


@dataclass(slots=True)
class _Maker:
    dice: random.Random
    policy: str
    kv: str

    def trace(self) -> Trace:
        dice = self.dice
        num_blocks, block_size = round(2 ** dice.uniform(1, 6)), dice.choice((1, 1, 2, 3, 4, 7, 8, 16))
        max_model_len = dice.choice((12, 24, 40, 64))
        has_windows = "num_windows" in managers()[self.kv].options
        if has_windows and dice.random() < 0.6:  # long enough to give tokens back
            max_model_len, block_size, num_blocks = dice.choice((100, 160)), dice.choice((8, 16)), dice.randint(10, 40)
        kv_config = draw_kv_config(self.kv, dice, num_blocks, block_size, max_model_len)
        longest = min(max_model_len, pool_tokens(kv_config) or max_model_len)
        arrivals = self._arrivals(longest)
        is_policy = schedulers()[self.policy].kind == "scheduling_policy"
        return Trace(
            policy=self.policy,
            kv=self.kv,
            policy_config=draw_policy_config(self.policy, dice),
            kv_config=kv_config,
            num_tokens=dice.choice((1, 2, 3, 5, 8, 16, 64) if max_model_len < 100 else (8, 16, 64)),
            num_seats=dice.choice((1, 2, 3, 4, 6, 16)),
            max_model_len=max_model_len,
            when_kv_full=self._when_full() if is_policy else "shrink",
            max_waiting_requests=dice.choice((None, None, None, 2, 5)),
            max_waiting_tokens=dice.choice((None, None, None, None, 30)),
            offload_bytes=dice.choice((0, 1 << 9, 1 << 20)),
            drafts=dice.choice((0, 0, 1, 3)),
            search=SEARCH if any(one.search for one in arrivals) else None,
            tier=self._tier(),
            arrivals=arrivals,
            cancels=self._cancels(arrivals),
            resets=tuple(sorted(self._moment() for _ in range(dice.choice((0, 0, 0, 1, 2))))),
            faults=self._faults(),
            **self._unusual(),
        )

    def _tier(self) -> dict[str, Any] | None:
        """Only behind a prefix cache that says what it evicts."""
        if not hasattr(managers()[self.kv].cls, "take_evicted") or self.dice.random() < 0.4:
            return None
        dice = self.dice
        drawn = {"delay_s": (0.0, 0.0, 0.02, 0.05, 0.3), "fails": (0, 0, 3), "token_s": (0.0, 0.0, 0.0004, 1.0)}
        return {name: dice.choice(values) for name, values in drawn.items()}

    def _when_full(self) -> WhenFull:
        options: tuple[WhenFull, ...] = ("shrink", "preempt", "refuse", "exit")
        return self.dice.choices(options, (5, 3, 1, 0.5))[0]

    def _moment(self) -> int:
        return self.dice.randint(0, MAX_STEPS)

    def _arrivals(self, longest: int) -> tuple[Arrival, ...]:
        """Steady, in storms, or both; prompts are drawn from a few beginnings."""
        dice = self.dice
        count = dice.choice((1, 4, 8, 13, 18, 24))
        storms = [self._moment() for _ in range(dice.choice((1, 2, 3)))]
        is_stormy = dice.random()
        steps = sorted(dice.choice(storms) if dice.random() < is_stormy else self._moment() for _ in range(count))
        alphabet = dice.sample(range(1, VOCAB_SIZE), dice.choice((1, 2, 4)))
        stems = [
            tuple(dice.choices(alphabet, k=dice.randint(1, max(1, longest)))) for _ in range(dice.choice((1, 2, 3)))
        ]
        traits = self._traits()
        return tuple(self._arrival(f"r{i}", step, longest, stems, alphabet, traits) for i, step in enumerate(steps))

    def _traits(self) -> dict[str, bool]:
        """What occurs in this trace at all."""
        names = ("lanes", "salts", "tenants", "priorities", "deadlines", "draws")
        traits = {name: self.dice.random() < 0.5 for name in names}
        return traits | {"searches": SEARCH in searches() and self.dice.random() < 0.2}

    def _arrival(
        self,
        name: str,
        step: int,
        longest: int,
        stems: list[tuple[int, ...]],
        alphabet: list[int],
        traits: dict[str, bool],
    ) -> Arrival:
        dice = self.dice
        num_prompt = max(1, round(longest * dice.random() ** 1.5))
        stem = dice.choice(stems)[:num_prompt] if dice.random() < 0.8 else ()
        tail = dice.choices(alphabet, k=max(not stem, min(num_prompt - len(stem), dice.randint(0, 6))))
        prompt = (*stem, *tail)
        room = longest - len(prompt)
        wanted = dice.randint(1, max(1, min(room, 14))) if dice.random() < 0.93 else longest
        drawn: dict[str, Any] = {}
        if traits["draws"] and dice.random() < 0.5:
            drawn |= {"temperature": dice.choice((0.7, 1.0, 2.0)), "seed": dice.randrange(1000)}
        if traits["lanes"] and dice.random() < 0.4:
            drawn["n"] = dice.randint(2, 4)
        if traits["salts"]:
            drawn["salt"] = dice.choice(SALTS)
        if traits["tenants"]:
            drawn["tenant"] = dice.choice(TENANTS)
        if traits["priorities"]:
            drawn["priority"] = dice.randint(0, 2)
        if traits["deadlines"] and dice.random() < 0.5:
            drawn["deadline_s"] = dice.choice((0.02, 0.1, 0.3, 1.0))
        if traits["searches"] and dice.random() < 0.4:
            width = dice.randint(drawn.get("n", 1), 4)
            drawn |= {"temperature": 0.0, "search": {"width": width, "early_stopping": dice.random() < 0.5}}
        return Arrival(
            name=name,
            step=step,
            prompt=prompt,
            max_tokens=None if dice.random() < 0.05 and longest < 30 else wanted,
            clip=dice.random() < 0.2,
            ignore_eos=dice.random() < 0.7,
            **drawn,
        )

    def _cancels(self, arrivals: tuple[Arrival, ...]) -> tuple[Cancel, ...]:
        share = self.dice.choice((0.0, 0.1, 0.4))
        given_up = [one for one in arrivals if self.dice.random() < share]
        return tuple(Cancel(step=one.step + self.dice.randint(0, 12), name=one.name) for one in given_up)

    def _faults(self) -> tuple[Fault, ...]:
        if self.dice.random() < 0.85:
            return ()
        kind = self.dice.choice(("raise", "poison", "poison"))
        return (Fault(step=self._moment(), kind=kind, nth=self.dice.randint(0, 3)),)

    def _unusual(self) -> dict[str, Any]:
        """A call that hangs for some steps, or an early end; not both, since what is held cannot be given back then."""
        chance = self.dice.random()
        if chance < 0.1:
            return {"holds": (Hold(step=self._moment(), num_steps=self.dice.randint(1, 5)),)}
        return {"closes": self._moment()} if chance < 0.2 else {}
