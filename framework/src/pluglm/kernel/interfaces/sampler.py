"""The contracts of sampling: logits rows in, token ids out; and the small seam of one logits step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from pluglm.kernel.interfaces.component import BuildContext, Component

if TYPE_CHECKING:
    import torch

    from pluglm.kernel.core import SampleRow
    from pluglm.kernel.sampling_params import SamplingParams

SAMPLER_VERSION = 1
LOGITS_STEP_VERSION = 1
FINAL_ROWS = "sampler:final_rows"
NO_TOKEN = -1  # what a sampler returns for a row that nothing can be drawn from; that request alone fails

# R: rows (one draw each), V: vocabulary


class Sampler(Component, Protocol):
    """Draws one token a row. A row's token depends on that row alone: never on its neighbours or on earlier calls.

    What a method must carry from token to token of a lane is kept in `row.memory`, and nowhere else.
    """

    def sample(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """logits_RV float32, hard masks already at -inf; it may be changed in place.

        Randomness comes only from (row.seed, row.lane, row.position) by a counter-based generator; greedy rows draw
        none. Returns R ids with positive probability; NO_TOKEN for a row that has none, be it all -inf as it comes or
        by the sampler's own masks, or broken by a NaN of a step. Ties go to the lowest id.
        """
        ...


@runtime_checkable
class ParamsChecker(Protocol):
    """Optional ability of a sampler: refuse at admission what it would have to ignore."""

    def check(self, params: SamplingParams) -> str | None:
        """Why this sampler cannot honour params, or None."""
        ...


@runtime_checkable
class EarlyParamsChecker(Protocol):
    """Optional ability of a sampler: tell what `check` would refuse before anything is built, as of a config's own."""

    @classmethod
    def check_early(cls, config: Any, params: SamplingParams, parts: Sequence[type[Any]]) -> str | None:
        """Why a sampler of this config cannot honour params, or None; None too where only a built one can tell.

        parts: the classes that `uses` names, in its order.
        """
        ...


@runtime_checkable
class FinalRows(Protocol):
    """Optional ability of a sampler, declared by the tag FINAL_ROWS: tells the probabilities that `sample` draws from.

    Verification by `token` and `block` needs them, and so do processed logprobs.
    """

    def final_rows(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        """probs_RV float32 on the logits' device, [R, V]; zero for whatever is at -inf in logits_RV.

        The sum of each row, in float64, is within 1e-5 of 1, and no entry is negative or NaN; a row for which `sample`
        returns NO_TOKEN is all zero. Of a greedy row all mass is on its token. The same rows may come to `sample` too,
        and what it draws has more than 0 here. If a row is not so, all requests of the step fail by the sampler's name.
        As in `sample`, a row depends on itself alone, and logits_RV may be changed in place.
        """
        ...


class LogitsStep(Component, Protocol):
    """One transformation of logits. Built as cls(config, vocab_size: int) by the sampler, not by the kernel.

    argmax_invariant: the most likely token is never changed, so greedy rows skip the step.
    hard_mask: it sends tokens to -inf by the row's text and params alone, and may leave none.
    parameters: the SamplingParams fields that it reads.
    """

    argmax_invariant: ClassVar[bool]
    hard_mask: ClassVar[bool] = False
    parameters: ClassVar[tuple[str, ...]]

    def is_active(self, params: SamplingParams) -> bool:
        """False when the step would leave this request's rows bitwise unchanged."""
        ...

    def apply(self, logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        """Rows transformed (all of them are active). May work in place; -inf stays -inf.

        Truncations only send logits to -inf; they keep at least one, unless they are hard masks. A row with NaN or
        without a token touches no other. Rows of one lane may come together, behind drafts that may be refused: a step
        that keeps something in their `memory` takes them by position, each after the ones before it.
        """
        ...


@runtime_checkable
class ContextStep(Protocol):
    """Optional ability of a logits step: built from what the run knows, such as its EOS ids."""

    @classmethod
    def from_context(cls, config: Any, context: BuildContext) -> LogitsStep:
        """The step, in place of cls(config, vocab_size)."""
        ...
