"""The Target of a run: lends a drafter the model, its KV and its hidden states, for as long as it proposes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from pluglm.kernel.core import Chunk
from pluglm.kernel.errors import KVExhausted, PluginError
from pluglm.kernel.interfaces.drafter import DRAFTER_VERSION, Drafter, DraftRequest, Proposal
from pluglm.kernel.interfaces.model import ModelSpec
from pluglm.kernel.interfaces.services import Runner
from pluglm.kernel.interfaces.target import DraftSource, HiddenRows, OpenBackend
from pluglm.kernel.runner import ModelRunner
from pluglm.target.hidden import RecordingRunner
from pluglm.target.lending import OUTSIDE, LentTarget


class TargetAccess(LentTarget):
    """The Target; `bind` gives it the model once that is loaded. `lent`, `revoke` and `let_go` are the engine's.

    may_evict: cached KV may make room for drafts. The rest is LentTarget's.
    """

    def __init__(
        self, spec: ModelSpec, drafter: str, head: Callable[[str], Runner], *, may_evict: bool, patience_s: float
    ) -> None:
        super().__init__(spec, drafter, head, patience_s=patience_s)
        self._may_evict = may_evict
        self._runner: ModelRunner | None = None
        self._first: ModelRunner | None = None

    def bind(self, runner: ModelRunner) -> None:
        """Ends the building. PluginError when model or backend cannot lend what was asked for."""
        self.end_building()
        if not self.is_used:
            return
        if not isinstance(runner.model, DraftSource):
            raise PluginError(f"{self.drafter} drafts with the model itself, and family '{self.spec.family}' cannot")
        if self.keeps_hidden and not isinstance(runner.backend, OpenBackend):
            raise PluginError(f"{self.drafter} reads the model's hidden states, and the backend gives none")
        self._runner = runner
        if self.num_layers:
            model = runner.model.first_layers(self.num_layers)
            self._first = ModelRunner(runner.backend, model, runner.attention, runner.kv, runner.store)

    def forget(self, sequence_id: int) -> None:
        """What is kept of a sequence that ended or lost its KV."""
        if isinstance(self._runner, RecordingRunner):
            self._runner.hidden.drop(sequence_id)

    def let_go(self) -> None:
        """Of weights and KV memory, at the end of the run: what is lent shares them."""
        self.revoke()
        self._runner = self._first = None

    def _extend(self, wanted: Mapping[int, int]) -> frozenset[int]:
        runner, roomy = self._bound(self._runner), set()
        transaction = runner.kv.transaction()
        try:
            for sequence_id, num_tokens in wanted.items():
                try:
                    transaction.extend(sequence_id, num_tokens, evict=self._may_evict)
                except KVExhausted:
                    continue
                roomy.add(sequence_id)
        except BaseException:
            transaction.rollback()
            raise
        runner.store.copy_blocks(transaction.commit())
        return frozenset(roomy)

    def _trim(self, kept: Mapping[int, int]) -> None:
        transaction = self._bound(self._runner).kv.transaction()
        try:
            for sequence_id, num_tokens in kept.items():
                transaction.trim(sequence_id, num_tokens)
        except BaseException:
            transaction.rollback()
            raise
        transaction.commit()

    def _run_first(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        first = self._bound(self._first)
        return first.run(first.make_input(chunks))

    def _take_hidden(self, sequence_id: int, stop: int) -> HiddenRows | None:
        return cast(RecordingRunner, self._bound(self._runner)).hidden.take(sequence_id, stop)

    def _embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        runner = self._bound(self._runner)
        return cast(OpenBackend, runner.backend).compute(cast(DraftSource, runner.model).embed, token_ids_T)

    def _logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        runner = self._bound(self._runner)
        return cast(OpenBackend, runner.backend).compute(runner.model.logits, hidden_RD)

    def _bound(self, runner: ModelRunner | None) -> ModelRunner:
        if runner is None:
            raise RuntimeError(OUTSIDE)  # it was let go while the use began
        return runner


class LendingDrafter(Drafter):
    """A drafter that is lent the target while it proposes."""

    interface_version = DRAFTER_VERSION

    def __init__(self, drafter: Drafter, target: TargetAccess) -> None:
        self.drafter, self._target = drafter, target

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        with self._target.lent(requests):
            return self.drafter.propose(requests)

    def observe(self, sequence_id: int, num_accepted: int, token_ids: Sequence[int]) -> None:
        self.drafter.observe(sequence_id, num_accepted, token_ids)

    def release(self, sequence_id: int) -> None:
        self._target.forget(sequence_id)
        self.drafter.release(sequence_id)

    def let_go(self) -> None:
        """See TargetAccess."""
        self._target.let_go()

    def __getattr__(self, name: str) -> Any:
        """What a drafter has beside the contract, such as counters, stays within reach."""
        return getattr(self.drafter, name)
