"""What every Target checks: who may use it, when, for which sequences, how far. Knows nothing of what it lends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, get_ident
from typing import NamedTuple

import torch

from pluglm.kernel.core import Chunk
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.drafter import DraftRequest
from pluglm.kernel.interfaces.model import ModelSpec
from pluglm.kernel.interfaces.services import Runner
from pluglm.kernel.interfaces.target import HiddenRows

# R: rows with logits, T: token ids, D: hidden size, V: the target's logits

OUTSIDE = "the target may be used inside propose alone, and no longer once that call was given up on"
UNASKED = "the target was not asked for this; call {} while the drafter is built"
TOO_LATE = "{} is called while the drafter is built; the target takes no more wishes afterwards"
LAYERS, HIDDEN = "use_first_layers", "use_hidden_states"


class _Known(NamedTuple):
    """A sequence as it was lent. Its list of tokens is the drafter's own, and may grow meanwhile."""

    num_tokens: int
    max_tokens: int
    num_prompt: int

    @property
    def num_computed(self) -> int:
        """The newest token has neither KV nor a hidden state yet."""
        return max(0, self.num_tokens - 1)


@dataclass(slots=True)
class _Room:
    """Tokens of a sequence that there is room for, and how many of them have KV of the first layers."""

    num_tokens: int
    num_stored: int


class LentTarget(ABC):
    """A Target that checks every use. What subclasses define in its place is called for legal uses only, one at a time.

    drafter: how messages call it. head: makes the runner of the checkpoint in a folder. patience_s: how long `revoke`
    waits for a use that is under way.
    """

    def __init__(self, spec: ModelSpec, drafter: str, head: Callable[[str], Runner], *, patience_s: float) -> None:
        self.spec, self.drafter = spec, drafter
        self.num_layers, self.keeps_hidden = 0, False
        self._head, self._patience_s = head, patience_s
        self._is_building = True
        self._lock = Lock()  # held while the target is at work
        self._owner: int | None = None  # the thread that proposes
        self._known: dict[int, _Known] = {}
        self._room: dict[int, _Room] | None = None  # inside `room`: those that it gave

    @property
    def is_used(self) -> bool:
        return bool(self.num_layers) or self.keeps_hidden

    def use_first_layers(self, num_layers: int) -> None:
        self._require_building(LAYERS)
        most = len(self.spec.layers) - 1
        if not 1 <= num_layers <= most:
            raise PluginError(
                f"{self.drafter}: num_layers is {num_layers} and the model has {most + 1} layers; "
                + (f"give 1 to {most}" if most > 0 else "a model of one layer has none to stop at")
            )
        self.num_layers = num_layers

    def use_hidden_states(self) -> None:
        self._require_building(HIDDEN)
        self.keeps_hidden = True

    def build_head(self, path: str) -> Runner:
        self._require_building("build_head")
        return self._head(path)

    def end_building(self) -> None:
        """The drafter was built, and asked for what it needs."""
        self._is_building = False

    @contextmanager
    def lent(self, requests: Sequence[DraftRequest]) -> Iterator[None]:
        """The calling thread may use it for these sequences."""
        owner = get_ident()
        self._known = {
            one.sequence_id: _Known(len(one.token_ids), one.max_tokens, len(one.request.prompt_token_ids))
            for one in requests
        }
        self._room = None
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

    @contextmanager
    def room(self, wanted: Mapping[int, int]) -> Iterator[frozenset[int]]:
        with self._using(LAYERS):
            if self._room is not None:
                raise RuntimeError("room was asked for inside room; ask once, for all sequences")
            for sequence_id, num_tokens in wanted.items():
                self._require_fit(sequence_id, num_tokens)
            roomy = self._extend(wanted)
            self._room = {one: _Room(wanted[one], self._known[one].num_computed) for one in roomy}
        try:
            yield roomy
        finally:
            with self._using(LAYERS):
                self._room = None
                self._trim({one: self._known[one].num_computed for one in roomy})

    def run_first(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        with self._using(LAYERS):
            if self._room is None:
                raise RuntimeError("run_first may be used inside room alone")
            room = self._room
            if not chunks or len({one.sequence_id for one in chunks}) < len(chunks):
                raise ValueError(f"run_first takes one chunk of each sequence and at least one, not {list(chunks)}")
            logits_RV = self._run_first([self._checked(one, room.get(one.sequence_id)) for one in chunks])
            for one in chunks:
                room[one.sequence_id].num_stored = one.num_computed + len(one.token_ids)
            return logits_RV

    def take_hidden(self, sequence_id: int, stop: int) -> HiddenRows | None:
        with self._using(HIDDEN):
            most = self._lent(sequence_id).num_computed
            if stop > most:
                raise ValueError(
                    f"hidden states of sequence {sequence_id} were to be taken up to {stop}; its newest token has none "
                    f"yet, so stop is at most {most}, one less than its tokens"
                )
            return self._take_hidden(sequence_id, stop)

    def embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        with self._using(HIDDEN):
            return self._embed(token_ids_T)

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        with self._using(HIDDEN):
            return self._logits(hidden_RD)

    @abstractmethod
    def _extend(self, wanted: Mapping[int, int]) -> frozenset[int]:
        """Makes room for so many tokens; who got it."""

    @abstractmethod
    def _trim(self, kept: Mapping[int, int]) -> None:
        """Gives back the room of these sequences behind so many tokens."""

    @abstractmethod
    def _run_first(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """As `run_first`; the chunks have their prompts' lengths."""

    @abstractmethod
    def _take_hidden(self, sequence_id: int, stop: int) -> HiddenRows | None:
        """As `take_hidden`."""

    @abstractmethod
    def _embed(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """As `embed`."""

    @abstractmethod
    def _logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """As `logits`."""

    @contextmanager
    def _using(self, wish: str) -> Iterator[None]:
        """A use that needs `wish`: without it nobody has looked whether model and backend can do it."""
        if not (self.num_layers if wish == LAYERS else self.keeps_hidden):
            raise RuntimeError(UNASKED.format(wish))
        with self._lock:
            if self._owner != get_ident():
                raise RuntimeError(OUTSIDE)
            yield

    def _require_building(self, method: str) -> None:
        if not self._is_building:
            raise RuntimeError(TOO_LATE.format(method))

    def _lent(self, sequence_id: int) -> _Known:
        if (known := self._known.get(sequence_id)) is None:
            raise ValueError(f"sequence {sequence_id} is not among those that are proposed for, {sorted(self._known)}")
        return known

    def _require_fit(self, sequence_id: int, num_tokens: int) -> None:
        known = self._lent(sequence_id)
        most = known.num_tokens + known.max_tokens
        if num_tokens > most:
            raise ValueError(
                f"wants room for {num_tokens} tokens of sequence {sequence_id}, more than the {most} that were asked "
                f"for: its {known.num_tokens} and max_tokens, {known.max_tokens}"
            )

    def _checked(self, chunk: Chunk, room: _Room | None) -> Chunk:
        """With its prompt's length. ValueError for tokens without room, behind a gap, or with KV of the target's."""
        name, start, count = f"sequence {chunk.sequence_id}", chunk.num_computed, len(chunk.token_ids)
        known = self._lent(chunk.sequence_id)
        if room is None:
            raise ValueError(f"{name} was given no room; run those alone that room gave")
        if not known.num_computed <= start <= room.num_stored:
            raise ValueError(
                f"{name} was to be run from position {start}; the first allowed is {known.num_computed}, that of its "
                f"newest token, and the last {room.num_stored}, behind what is stored"
            )
        if not 0 < count <= room.num_tokens - start:
            raise ValueError(
                f"{name} was to be run for {count} tokens from position {start}; run at least one, and up to the "
                f"{room.num_tokens} in all that it has room for"
            )
        return chunk._replace(num_prompt=known.num_prompt)
