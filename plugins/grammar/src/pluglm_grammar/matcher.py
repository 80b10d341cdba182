"""The state of one sequence inside a grammar: an llguidance matcher, and EOS, which llguidance does not count.

It does not compile anything and knows nothing of schemas or regexes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pluglm.kernel.errors import ComponentFailure
from pluglm_grammar.messages import one_line
from pluglm_grammar.vocabulary import WORD_BITS

if TYPE_CHECKING:
    import numpy.typing as npt

    from pluglm_grammar.vocabulary import Vocabulary

# W: int32 words of a mask row, bit t % 32 of word t // 32 is token id t


class LlguidanceMatcher:
    """pluglm's Matcher contract. EOS never reaches llguidance: its count of tokens is ours, less one after EOS.

    Every method raises ComponentFailure once llguidance ran into one of its run-time limits: its state is then lost.
    """

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        """Takes ownership of `matcher`, an llguidance LLMatcher without an error."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_accepted = 0
        self._terminated = False
        self._row_W: npt.NDArray[np.int32] | None = None  # the current mask, computed when first asked for

    @property
    def terminated(self) -> bool:
        return self._terminated

    def fill_mask(self, mask_W: npt.NDArray[np.int32]) -> None:
        """Raises ValueError, and writes nothing, when the row is not int32 [ceil(V / 32)]."""
        words = self._vocabulary.words
        if mask_W.dtype != np.int32 or mask_W.shape != (words,):
            raise ValueError(f"a mask row must be int32 of shape ({words},), not {mask_W.dtype} of {mask_W.shape}")
        mask_W[:] = self._current_row()

    def accept(self, token_id: int) -> bool:
        if not self._allows(token_id):
            return False
        if token_id in self._vocabulary.eos_token_ids:
            self._terminated = True
        else:
            num_consumed = self._matcher.try_consume_tokens([token_id])
            self._check()
            if num_consumed != 1:
                raise self._failure(f"refused token {token_id}, which its own mask allows")
        self._num_accepted += 1
        self._row_W = None
        return True

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= self._num_accepted:
            raise ValueError(f"cannot roll back {num_tokens} tokens: {self._num_accepted} were accepted")
        if num_tokens == 0:
            return
        num_consumed = num_tokens - self._terminated
        if num_consumed and not self._matcher.rollback(num_consumed):
            self._check()
            raise self._failure(f"could not roll back {num_tokens} tokens")
        self._terminated = False
        self._num_accepted -= num_tokens
        self._row_W = None

    def forced(self) -> list[int]:
        """The canonical tokens of text that is certain; the mask has exactly one bit at each of them."""
        if self._terminated:
            return []
        token_ids: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        return token_ids

    def _allows(self, token_id: int) -> bool:
        # Asking the mask, not llguidance: where text is certain, llguidance takes tokens that its mask leaves closed.
        if not 0 <= token_id < self._vocabulary.num_ids:
            return False
        word = int(self._current_row()[token_id // WORD_BITS])
        return bool(word >> (token_id % WORD_BITS) & 1)

    def _current_row(self) -> npt.NDArray[np.int32]:
        if self._row_W is None:
            self._row_W = self._compute_row()
        return self._row_W

    def _compute_row(self) -> npt.NDArray[np.int32]:
        vocabulary = self._vocabulary
        if self._terminated:
            return np.zeros(vocabulary.words, dtype=np.int32)
        row_W = np.zeros(vocabulary.library_words, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(row_W.ctypes.data, row_W.nbytes)
        self._check()
        row_W = row_W[: vocabulary.words] & vocabulary.valid_W & ~vocabulary.eos_W
        if self._matcher.is_accepting():
            row_W |= vocabulary.eos_W
        return row_W

    def _check(self) -> None:
        # llguidance does not raise: after an error it answers everything, wrongly (a mask of EOS alone).
        if self._matcher.is_error():
            raise self._failure(f"stopped: {one_line(self._matcher.get_error())}")

    @staticmethod
    def _failure(what: str) -> ComponentFailure:
        return ComponentFailure("grammar 'llguidance'", what)
