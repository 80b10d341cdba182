"""Turns output ids into text as they come. Knows nothing of stop strings or of the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from pluglm.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of one output, piece by piece: all pushes and the flush together equal `tokenizer.decode(all ids)`.

    Text leaves as soon as no later id can change it, so a piece never ends inside a UTF-8 sequence. A run of
    byte-fallback tokens is held until it ends, because decoding takes such a run as a whole. Work per id does not
    grow with the length of the output. Ids without a token add nothing.
    Raises TokenizerError when the tokenizer's decoder cannot be streamed. Not shared between threads.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = tokenizer.stream_decoder()

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids`, the next ones of the output, make certain; may be empty."""
        return "".join(map(self.push_token, ids))

    def push_token(self, token_id: int) -> str:
        """The same for the next one alone."""
        text = None if token_id in self._skipped else self._tokenizer.token_text(token_id)
        return "" if text is None else "".join(self._decoder.push(text))

    def flush(self) -> str:
        """The rest of the text at the end of the output; afterwards a new output may begin."""
        return "".join(self._decoder.flush())
