"""What the engine is made of: everything that assembly built, by role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pluglm.kernel.core import Budget
    from pluglm.kernel.guard import Guard
    from pluglm.kernel.interfaces.drafter import Drafter
    from pluglm.kernel.interfaces.grammar import Grammar
    from pluglm.kernel.interfaces.sampler import Sampler
    from pluglm.kernel.interfaces.scheduler import Scheduler, SchedulingPolicy
    from pluglm.kernel.interfaces.services import TextStream, TokenizerView
    from pluglm.kernel.runner import ModelRunner
    from pluglm.kernel.sampling_params import SamplingParams


class HookCalls(Protocol):
    """Calls the hook of this name in every registered plugin; never raises."""

    def call(self, hook: str, **arguments: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything the wiring built. names: slot -> how messages call the component in it."""

    runner: ModelRunner
    scheduler: Scheduler
    policy: SchedulingPolicy | None
    sampler: Sampler
    drafter: Drafter | None
    grammar: Grammar | None
    tokenizer: TokenizerView
    text_stream: Callable[[SamplingParams], TextStream]
    eos_token_ids: frozenset[int]
    hooks: HookCalls
    guard: Guard
    names: dict[str, str]
    budget: Budget
    max_model_len: int

    @property
    def num_ids(self) -> int:
        """Ids that mean something and that the model can read: a tokenizer may be larger than the model, or smaller."""
        return min(self.tokenizer.vocab_size, self.runner.spec.vocab_size)
