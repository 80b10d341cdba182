"""What the engine is made of: everything that assembly built, by role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pluglm.kernel.interfaces.services import HookCalls
from pluglm.kernel.interfaces.services import Tiers as Tiers

if TYPE_CHECKING:
    from pluglm.kernel.core import Budget
    from pluglm.kernel.guard import Guard
    from pluglm.kernel.interfaces.drafter import Drafter
    from pluglm.kernel.interfaces.grammar import Grammar
    from pluglm.kernel.interfaces.kv import PrefixCache
    from pluglm.kernel.interfaces.sampler import Sampler
    from pluglm.kernel.interfaces.scheduler import Scheduler, SchedulingPolicy
    from pluglm.kernel.interfaces.search import Search
    from pluglm.kernel.interfaces.services import TextStream, TokenizerView
    from pluglm.kernel.planning import Planning
    from pluglm.kernel.runner import ModelRunner
    from pluglm.kernel.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds beside a step's budget. Written from the config, read at the door and where KV runs out.

    waiting_requests, waiting_tokens: the queue takes no more than these. offload_bytes: host memory for offloaded KV.
    exits_when_full: a request that finds no KV ends the run instead of itself.
    """

    max_model_len: int
    waiting_requests: int | None = None
    waiting_tokens: int | None = None
    offload_bytes: int = 0
    exits_when_full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything the wiring built. names: slot -> how messages call the component in it.

    prefix_cache: the KV manager's ability, if it has it. namespace: digest of what stored KV depends on in this run.
    kv_fields: the same by name, as text that holds in other processes too; reads all weight files when first called.
    verification: the rule for drafts that come with their rows. drafting_failed: called when a proposal was given up on
    or failed, so that whoever made it does nothing more. planning: makes what plans the steps, of the same
    arguments as Planning, which it is without one.
    """

    runner: ModelRunner
    prefix_cache: PrefixCache | None
    namespace: bytes
    kv_fields: Callable[[], Mapping[str, str]]
    tiers: Tiers
    scheduler: Scheduler
    policy: SchedulingPolicy | None
    sampler: Sampler
    drafter: Drafter | None
    grammar: Grammar | None
    search: Search | None
    tokenizer: TokenizerView
    text_stream: Callable[[SamplingParams], TextStream]
    eos_token_ids: frozenset[int]
    hooks: HookCalls
    guard: Guard
    names: dict[str, str]
    budget: Budget
    limits: Limits
    verification: str = "reproducible"
    drafting_failed: Callable[[], object] = lambda: None
    planning: Callable[..., Planning] | None = None

    @property
    def num_ids(self) -> int:
        """Ids that mean something and that the model can read: a tokenizer may be larger than the model, or smaller."""
        return min(self.tokenizer.vocab_size, self.runner.spec.vocab_size)
