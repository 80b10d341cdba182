"""The Target of a run: lends a drafter the model, its KV and its hidden states, for as long as it proposes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any, cast

import torch

from pluglm.kernel.core import BlockCopies, Chunk
from pluglm.kernel.errors import KVExhausted, PluginError
from pluglm.kernel.interfaces.drafter import DRAFTER_VERSION, Drafter, DraftRequest, Proposal
from pluglm.kernel.interfaces.model import ModelSpec
from pluglm.kernel.interfaces.services import Runner
from pluglm.kernel.interfaces.target import DraftSource, HiddenRows, OpenBackend
from pluglm.kernel.runner import ModelRunner
from pluglm.target.hidden import RecordingRunner

OUTSIDE = "the target may be used inside propose alone, and no longer once that call was given up on"
UNASKED = "the target was not asked for this; call {} while the drafter is built"


class TargetAccess:
    """The Target; `bind` gives it the model once that is loaded. `lent`, `revoke` and `let_go` are the engine's.

    drafter: how messages call it. head: makes the runner of the checkpoint in a folder. may_evict: cached KV may make
    room for drafts. patience_s: how long `revoke` waits for a use that is under way.
    """

    def __init__(
        self, spec: ModelSpec, drafter: str, head: Callable[[str], Runner], *, may_evict: bool, patience_s: float
    ) -> None:
        self._spec, self._name, self._head = spec, drafter, head
        self._may_evict, self._patience_s = may_evict, patience_s
        self._num_layers, self.keeps_hidden = 0, False
        self._runner: ModelRunner | None = None
        self._first: ModelRunner | None = None
        self._lock = Lock()  # held while the target is at work
        self._owner: int | None = None  # the thread that proposes
        self._asked: Mapping[int, DraftRequest] = {}
        self._roomy: dict[int, int] = {}  # tokens that there is room for

    @property
    def is_used(self) -> bool:
        return bool(self._num_layers) or self.keeps_hidden

    def use_first_layers(self, num_layers: int) -> None:
        most = len(self._spec.layers) - 1
        if not 1 <= num_layers <= most:
            raise PluginError(
                f"{self._name}: num_layers is {num_layers} and the model has {most + 1} layers; "
                + (f"give 1 to {most}" if most else "a model of one layer has none to stop at")
            )
        self._num_layers = num_layers

    def use_hidden_states(self) -> None:
        self.keeps_hidden = True

    def build_head(self, path: str) -> Runner:
        return self._head(path)

    def bind(self, runner: ModelRunner) -> None:
        """PluginError when model or backend cannot lend what was asked for."""
        if not isinstance(runner.model, DraftSource):
            raise PluginError(f"{self._name} drafts with the model itself, and family '{self._spec.family}' cannot")
        if self.keeps_hidden and not isinstance(runner.backend, OpenBackend):
            raise PluginError(f"{self._name} reads the model's hidden states, and the backend gives none")
        self._runner = runner
        if self._num_layers:
            model = runner.model.first_layers(self._num_layers)
            self._first = ModelRunner(runner.backend, model, runner.attention, runner.kv, runner.store)

    @contextmanager
    def lent(self, requests: Sequence[DraftRequest]) -> Iterator[None]:
        """The calling thread may use it for these sequences."""
        owner = get_ident()
        self._asked = {one.sequence_id: one for one in requests}
        self._roomy = {}
        self._owner = owner
        try:
            yield
        finally:
            if self._owner == owner:  # else it was taken away, and may be lent to another thread by now
                self._owner = None

    def revoke(self) -> None:
        """Whoever has it may no longer use it. Waits for a use that is under way."""
        self._owner = None
        if self._lock.acquire(timeout=self._patience_s):
            self._lock.release()

    def let_go(self) -> None:
        """Of weights and KV memory, at the end of the run: what is lent shares them."""
        self.revoke()
        self._runner = self._first = None

    @contextmanager
    def room(self, wanted: Mapping[int, int]) -> Iterator[frozenset[int]]:
        for sequence_id, num_tokens in wanted.items():
            asked = self._asked.get(sequence_id)
            if asked is None or num_tokens > len(asked.token_ids) + asked.max_tokens:
                raise ValueError(
                    f"wants room for {num_tokens} tokens of sequence {sequence_id}, more than was asked for"
                )
        with self._using() as runner:
            copies = self._extend(runner, wanted)
            runner.store.copy_blocks(copies)
        try:
            yield frozenset(self._roomy)
        finally:
            with self._using() as runner:
                self._give_back(runner)

    def run_first(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        checked = [self._checked(one) for one in chunks]
        with self._using():
            if (first := self._first) is None:
                raise RuntimeError(UNASKED.format("use_first_layers"))
            return first.run(first.make_input(checked))

    def take_hidden(self, sequence_id: int, stop: int) -> HiddenRows | None:
        with self._using_hidden() as runner:
            return cast(RecordingRunner, runner).hidden.take(sequence_id, stop)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        with self._using_hidden() as runner:
            return cast(OpenBackend, runner.backend).compute(cast(DraftSource, runner.model).embed, token_ids_T)

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        with self._using_hidden() as runner:
            return cast(OpenBackend, runner.backend).compute(runner.model.logits, hidden_RD)

    @contextmanager
    def _using(self) -> Iterator[ModelRunner]:
        with self._lock:
            if self._owner != get_ident() or self._runner is None:
                raise RuntimeError(OUTSIDE)
            yield self._runner

    @contextmanager
    def _using_hidden(self) -> Iterator[ModelRunner]:
        with self._using() as runner:
            if not self.keeps_hidden:  # so `bind` has not looked whether the backend can
                raise RuntimeError(UNASKED.format("use_hidden_states"))
            yield runner

    def _extend(self, runner: ModelRunner, wanted: Mapping[int, int]) -> BlockCopies:
        transaction = runner.kv.transaction()
        try:
            for sequence_id, num_tokens in wanted.items():
                try:
                    transaction.extend(sequence_id, num_tokens, evict=self._may_evict)
                except KVExhausted:
                    continue
                self._roomy[sequence_id] = num_tokens
        except BaseException:
            self._roomy = {}
            transaction.rollback()
            raise
        return transaction.commit()

    def _give_back(self, runner: ModelRunner) -> None:
        transaction = runner.kv.transaction()
        try:
            for sequence_id in self._roomy:
                transaction.trim(sequence_id, len(self._asked[sequence_id].token_ids) - 1)
        except BaseException:
            transaction.rollback()
            raise
        transaction.commit()
        self._roomy = {}

    def _checked(self, chunk: Chunk) -> Chunk:
        """With its prompt's length. ValueError for tokens without room, or whose KV is the target's own."""
        stop, room = chunk.num_computed + len(chunk.token_ids), self._roomy.get(chunk.sequence_id, 0)
        asked = self._asked.get(chunk.sequence_id)
        if asked is None or not chunk.token_ids or chunk.num_computed < len(asked.token_ids) - 1 or stop > room:
            raise ValueError(
                f"sequence {chunk.sequence_id} was to be run at {chunk.num_computed} to {stop}, with room up to {room}"
            )
        return chunk._replace(num_prompt=len(asked.request.prompt_token_ids))


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
        self.drafter.release(sequence_id)

    def let_go(self) -> None:
        """See TargetAccess."""
        self._target.let_go()

    def __getattr__(self, name: str) -> Any:
        """What a drafter has beside the contract, such as counters, stays within reach."""
        return getattr(self.drafter, name)
