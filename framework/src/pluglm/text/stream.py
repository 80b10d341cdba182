"""One output's way from token ids to text that may be shown: detokenizer, then stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from pluglm.kernel.interfaces.services import TextDelta
from pluglm.text.detokenizer import IncrementalDetokenizer
from pluglm.text.stop import StopMatcher
from pluglm.text.tokenizer import Tokenizer


class TextStream:
    """Text of one output. `push` is called once a token, in order, so the caller knows which token completes a stop.

    min_tokens: a stop string counts only if the token that completes it comes after so many. The other arguments, and
    what they raise, are those of IncrementalDetokenizer and StopMatcher.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop, include_stop=include_stop)
        self._may_stop = bool(stop)
        self._num_unstoppable = min_tokens  # tokens still to come before one may complete a stop

    @property
    def stopped(self) -> str | None:
        """The stop string found so far; `finish` may find one too."""
        return self._matcher.matched

    def push(self, token_id: int) -> TextDelta:
        """The text released by the next token. After a stop every delta is empty."""
        text = self._detokenizer.push_token(token_id)
        if not self._may_stop:
            return TextDelta(text)
        self._num_unstoppable -= 1
        return TextDelta(*self._matcher.push(text, may_stop=self._num_unstoppable < 0))

    def finish(self) -> str:
        """The rest of the text, through the same stop strings; to be called once, at the end of the output."""
        emitted, _ = self._matcher.push(self._detokenizer.flush(), may_stop=self._num_unstoppable < 0)
        return emitted + self._matcher.flush()
