"""The nouns of a run. Every field says who writes it and who reads it; none of them imports torch.

A request has *known* tokens (prompt + committed output) and *computed* tokens (those whose KV is stored). Each step
closes that gap; there are no phases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pluglm.kernel.quick_new import quick_new

if TYPE_CHECKING:
    import torch

    from pluglm.kernel.interfaces.drafter import Proposal
    from pluglm.kernel.interfaces.grammar import Matcher
    from pluglm.kernel.interfaces.search import Walk
    from pluglm.kernel.memory import Saved
    from pluglm.kernel.sampling_params import SamplingParams
    from pluglm.verification.counts import Outcome, SpeculationCounts

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error", "refused"]


class Status(Enum):
    """Where a sequence is. Written by the engine only."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller asked for, checked and complete. Written once at admission, read by everyone."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # 64 bits; drawn fresh when the caller gave none
    arrival_s: float  # backend clock
    max_new_tokens: int  # params.max_tokens, or what the context still holds
    priority: int = 0  # lower is more urgent
    tenant: str = ""
    deadline_s: float | None = None  # backend clock; the engine ends what has not finished by then
    salt: str = ""  # requests of different salts never share cached KV


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What stored KV is the KV of. Written by the engine, read by KV managers that reuse prefixes.

    namespace: digest of everything else that the KV depends on (model, dtype, positions, salt). token_ids: all known
    tokens, read only; it grows while the sequence lives. limit: how many of them may be adopted.
    """

    namespace: bytes
    token_ids: TokenIds[int]
    limit: int


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """The engine's mutable state of one lane of a request. Only the engine writes it, and the tiers num_loaded.

    Plugins see a RequestView.
    """

    sequence_id: int
    request: Request
    lane: int = 0  # which of the request's n outputs
    namespace: bytes = b""  # of its CacheKey
    token_ids: list[int]  # known: prompt, then committed output
    output_token_ids: list[int] = field(default_factory=list)  # the committed output alone
    num_computed: int = 0  # tokens whose KV is stored and final
    num_sound: int = 0  # those of them that finite logits came after
    num_published: int = 0  # those of them that the prefix cache was offered
    kv_epoch: int = 0  # resets of the prefix cache before the first of them was computed or adopted
    drafts: list[int] = field(default_factory=list)  # proposed for this step, never committed unverified
    proposal: Proposal | None = None  # what they are of, read by the planning and by Drawer
    status: Status = Status.WAITING
    holds_kv: bool = False  # has a table in the KV manager; one that waits may: paused, forked or parked
    offloaded: Saved | None = None  # its KV in host memory while it waits, num_computed tokens of it
    num_preemptions: int = 0
    num_loaded: int = 0  # tokens whose KV came from a tier, over all admissions
    num_cached: int = 0  # prompt tokens that were adopted instead of computed when it first ran
    num_recomputed: int = 0  # computed tokens that preemption threw away and no cached prefix gave back
    matcher: Matcher | None = None  # grammar state after the committed tokens
    sampler_memory: dict[Any, Any] = field(default_factory=dict)  # written by the sampler and its steps
    walk: Walk | None = None  # the search that decides how the request goes on, shared by its lanes
    parked: torch.Tensor | None = None  # logits_V of the next token, while it waits for the search's other lanes
    first_token_s: float | None = None
    windows: Counter[Outcome] = field(default_factory=Counter)  # steps that gave it tokens, by what became of drafts

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.output_token_ids)

    def drafts_within(self, num_tokens: int) -> int:
        """Drafts among the next num_tokens to compute; negative when not even all known tokens are."""
        return self.num_computed + num_tokens - len(self.token_ids)

    def pending(self, num_tokens: int) -> list[int]:
        """The next num_tokens to compute: known ones, then drafts."""
        stop = self.num_computed + num_tokens
        return self.token_ids[self.num_computed : stop] + self.drafts[: max(0, stop - len(self.token_ids))]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """What a scheduler or policy may know of one sequence. Written by the engine each step, read by schedulers."""

    sequence_id: int
    request_id: str
    tenant: str
    priority: int
    arrival_s: float
    num_prompt: int
    num_known: int
    num_computed: int
    num_drafts: int
    num_output: int
    max_new_tokens: int
    num_preemptions: int
    lane: int = 0
    deadline_s: float | None = None
    holds_kv: bool = False  # it runs; or it waits with its KV kept, paused or forked
    is_held_out: bool = False  # it waits for KV that is on its way
    cache_key: CacheKey | None = field(default=None, compare=False, repr=False)  # None: nothing can be adopted
    probe: Callable[[CacheKey], int] | None = field(default=None, compare=False, repr=False)

    @property
    def num_pending(self) -> int:
        """Tokens that could be computed now: the gap between known and computed, and the drafts.

        A lane of a search that waits for the others has none, nor has a sequence whose KV is on its way.
        """
        return 0 if self.is_held_out else self.num_known - self.num_computed + self.num_drafts

    def cached_prefix(self) -> int:
        """Known tokens whose KV could be adopted now. Asked when called and never stored, so only call it if needed."""
        return 0 if self.cache_key is None or self.probe is None else self.probe(self.cache_key)


new_view: Callable[..., RequestView] = quick_new(RequestView)  # by position too: so many names take as long as the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one step may spend. Written from the config, read by the scheduler and the validator."""

    num_tokens: int
    num_seats: int  # sequences running at once


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """The scheduler's whole world in one step. Written by the engine, read-only."""

    step: int
    now_s: float
    budget: Budget
    running: tuple[RequestView, ...]  # hold a seat and KV; in admission order
    waiting: tuple[RequestView, ...]  # hold no seat, some of them KV; in arrival order, preempted ones included


@dataclass(frozen=True, slots=True)
class PlanItem:
    """`num_tokens` (1 or more) of one sequence's pending tokens are computed in this step."""

    sequence_id: int
    num_tokens: int


new_item = quick_new(PlanItem)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A scheduler's decision; may be empty. Nobody is in two of the tuples.

    preempted lose seat and KV and compute everything again. offloaded lose both, and their KV is kept in host memory
    when there is room for it. paused lose the seat alone. refused end with that reason; all others wait again.
    """

    items: tuple[PlanItem, ...] = ()
    preempted: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()
    paused: tuple[int, ...] = ()
    refused: tuple[tuple[int, str], ...] = ()


class Chunk(NamedTuple):
    """Tokens of one sequence to compute now, behind num_computed that the KV holds. What a flat batch is made of."""

    sequence_id: int
    token_ids: list[int]
    num_computed: int
    num_prompt: int = 0  # as in Segment


BlockCopies = tuple[tuple[int, int], ...]  # (source block, target block)


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's rows in a flat batch. Written by the engine, read by backend and attention.

    Rows query_start .. query_start + num_query of the batch are positions num_context .. of the sequence.
    block_table covers num_context + num_query tokens; in a batch with groups, only a GroupInput's segments have one.
    num_prompt is the request's prompt length, for what depends on it whatever the chunks (dynamic rope scaling); 0 when
    there is no prompt to speak of.
    """

    sequence_id: int
    query_start: int
    num_query: int
    num_context: int
    block_table: tuple[int, ...]
    num_prompt: int = 0

    @property
    def num_keys(self) -> int:
        return self.num_context + self.num_query

    def slots(self, block_size: int, start: int = 0) -> list[int]:
        """Where the keys at positions start .. num_keys are stored."""
        table, stop = self.block_table, self.num_context + self.num_query
        return [table[p // block_size] * block_size + p % block_size for p in range(start, stop)]


new_segment = quick_new(Segment)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInput:
    """Where one group of layers stores and finds its keys. Written by the engine, read by the backend.

    segments: those of the batch with the group's tables, as if each sequence began behind the tokens that the group
    gave back: positions count from there. slots_T: int64 [T], of the group.
    """

    layers: tuple[int, ...]
    segments: tuple[Segment, ...]
    slots_T: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """A flat batch of T tokens of several sequences. Written by the engine, read by backend, model and attention.

    token_ids_T, positions_T, slots_T: int64 [T]; slots_T says where each token's key and value are stored.
    groups: of a KV layout with groups, in its order; slots_T is then empty, and so are the tables of the segments.
    logit_rows_R: int64 [R], the rows whose logits are needed.
    copies: (source block, target block) pairs that the backend copies before anything else (copy on write).
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    logit_rows_R: torch.Tensor
    segments: tuple[Segment, ...]
    block_size: int
    copies: BlockCopies = ()
    groups: tuple[GroupInput, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """Everything that one draw depends on. Written by the engine, read by the sampler and its steps.

    output_token_ids holds the committed output and, under speculation, the drafts before this row. memory is the lane's
    own: who keeps something between its tokens keeps it there, under itself as the key and by position, so that a draft
    that is refused leaves nothing behind. None is a row by itself.
    """

    params: SamplingParams
    prompt_token_ids: tuple[int, ...]
    output_token_ids: list[int]
    seed: int
    lane: int  # which of the request's n outputs; part of the key of every draw
    position: int  # index of the output token that is drawn
    memory: dict[Any, Any] | None = None  # written by the sampler and its steps


new_row = quick_new(SampleRow)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (nats) of one position, by the row of logprobs_mode; impossible tokens are not in top."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What happened to one request in one step. Written by the engine, read by callers and hooks.

    Exactly one event of a request has finish_reason set, and it is the last one. Of a request with n outputs, lane says
    which one the tokens belong to, and the last event of each lane has lane_finish_reason set.
    """

    request_id: str
    lane: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    lane_finish_reason: FinishReason | None = None
    finish_reason: FinishReason | None = None
    stop: str | int | None = None  # the stop string or token id that ended it
    error: str | None = None
    metrics: RequestMetrics | None = None  # with finish_reason only


new_event = quick_new(Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times in seconds on the backend's clock. Written at the terminal event, read by callers."""

    num_prompt_tokens: int
    num_output_tokens: int
    arrival_s: float
    first_token_s: float | None
    finished_s: float
    num_preemptions: int
    speculation: SpeculationCounts  # of all its sequences
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    num_recomputed_tokens: int = 0

    @property
    def num_drafted(self) -> int:
        return self.speculation.num_drafted

    @property
    def num_accepted(self) -> int:
        return self.speculation.num_accepted

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first, of all lanes; None for a search, whose tokens come at once."""
        if self.first_token_s in (None, self.finished_s) or self.num_output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.num_output_tokens - 1)
