"""What a drafter may use of the model that it drafts for: its first layers over the run's KV, its hidden states.

`BuildContext.target` is a Target. A drafter asks for what it needs while it is built, before the weights are read, and
uses it inside `propose` alone: elsewhere, when the call was given up on, and without having asked, every use raises
RuntimeError. ValueError for other sequences than those that are proposed for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from pluglm.kernel.core import Chunk, ModelInput
    from pluglm.kernel.interfaces.attention import Attention
    from pluglm.kernel.interfaces.kv import KVStore
    from pluglm.kernel.interfaces.model import Model
    from pluglm.kernel.interfaces.services import Runner

# T: tokens of a flat batch, R: rows with logits, n: tokens of one sequence, D: hidden size, V: the target's logits


class HiddenRows(NamedTuple):
    """Hidden states of consecutive tokens of one sequence, before the final norm, on the target's device.

    start: position of the first of them. rows_nD: in the run's dtype.
    """

    start: int
    rows_nD: torch.Tensor


class Target(Protocol):
    """The model that is drafted for. What is asked for while building raises RuntimeError later."""

    def use_first_layers(self, num_layers: int) -> None:
        """While building: the first num_layers, 1 to all but one, will be run. PluginError for another number."""
        ...

    def use_hidden_states(self) -> None:
        """While building: hidden states of all tokens are kept from now on."""
        ...

    def build_head(self, path: str) -> Runner:
        """While building: the checkpoint folder of a family that goes on from hidden states (FedModel).

        It has attention and KV of the run's classes, but of its own. Its token ids are the target's.
        """
        ...

    def room(self, wanted: Mapping[int, int]) -> AbstractContextManager[frozenset[int]]:
        """wanted: sequence_id -> tokens in all. Gives those that have room for so many, until the block ends.

        The KV of a sequence's committed tokens but the last is there, and stays as it is. A full pool gives to some
        or none. ValueError for more than len(token_ids) + max_tokens; RuntimeError inside another `room`. This and
        `run_first` need `use_first_layers`.
        """
        ...

    def run_first(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Inside `room`, one chunk of each sequence: logits_RV float32 of each chunk's last token.

        They are what the final norm and the head make of the first layers.

        The KV of these layers is stored for all tokens of the chunks; what was drafted is computed anew when verified.
        ValueError for a sequence that `room` did not give, for a chunk that begins before the newest committed token,
        num_computed = len(token_ids) - 1, or behind what is stored, and for one that ends beyond the room.
        """
        ...

    def take_hidden(self, sequence_id: int, stop: int) -> HiddenRows | None:
        """Those kept of positions before `stop`, up to the last of them, and forgets them; None when there are none.

        The newest committed token has no state yet, so `stop` is at most len(token_ids) - 1; ValueError for more. What
        is not returned stays. This and the two below need `use_hidden_states`.
        Kept are those that were computed for this id since they were last taken. Of tokens whose KV was adopted or
        loaded, there are none; where such lie between, only what was computed behind them is kept.
        """
        ...

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """x_TD that the target's first layer gets of these ids (int64), in the run's dtype."""
        ...

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Final norm and head: logits_RV float32."""
        ...


@runtime_checkable
class DraftSource(Protocol):
    """Optional ability of a Model: a Target is made of it."""

    def first_layers(self, num_layers: int) -> Model:
        """The model of its first layers, with its final norm and head. It shares every tensor, and layer indices."""
        ...

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """As of Target."""
        ...


@runtime_checkable
class FedModel(Protocol):
    """Optional ability of a Model: beside its token id, each token of a batch comes with a row made elsewhere.

    feed: set before each run. It is called by `forward` with the batch's token_ids_T and gives the rows x_TD that the
    family goes on from. Its steps are never captured as graphs.
    """

    feed: Callable[[torch.Tensor], torch.Tensor]


@runtime_checkable
class BranchFollower(Protocol):
    """Optional ability of a ModelRunner that keeps something of each sequence it computes."""

    def take_over(self, sequence_id: int, branch_id: int) -> None:
        """Both were computed in this step, the branch from the sequence's newest committed token on, and it was right.

        What the step kept of the branch is the sequence's, in place of its own. No other branch is heard of again.
        """
        ...


@runtime_checkable
class OpenBackend(Protocol):
    """Optional ability of a Backend: hidden states, and functions of a model beside its steps."""

    def execute_open(
        self, model: Model, inputs: ModelInput, attention: Attention, kv: KVStore
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `execute`; also hidden_TD of all rows, before the final norm."""
        ...

    def compute(self, function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """function(rows), with rows on this device and this backend's own settings, as when a step runs."""
        ...
