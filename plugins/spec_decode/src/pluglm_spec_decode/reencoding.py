"""Between two tokenizers: the ids of a text in the other one, and of text behind it in the first. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence

from pluglm.kernel.interfaces.services import TokenizerView

LOOK_BEHIND = 10  # last tokens of a text that are encoded again with what follows, since tokens may join across the end


class Reencoder:
    """target: of the model that is drafted for; draft: of the model that drafts."""

    def __init__(self, target: TokenizerView, draft: TokenizerView) -> None:
        self._target = target
        self._draft = draft
        self._own = target.encode("")  # what the target's tokenizer puts before every text

    def to_draft(self, target_ids: Sequence[int]) -> list[int]:
        """The same text in the draft's ids. Special tokens have no text and are left out; the draft's own are added."""
        return self._draft.encode(self._target.decode(target_ids))

    def to_target(self, target_ids: Sequence[int], draft_ids: Sequence[int], drafts: Sequence[int]) -> list[int]:
        """What the draft's `drafts` behind `draft_ids` say, in the target's ids behind target_ids.

        Up to the first token that ends a text. Empty where that is not whole characters yet.
        """
        ends = [place for place, one in enumerate(drafts) if one in self._draft.eos_token_ids]
        said = self._text_behind(draft_ids, drafts[: ends[0]] if ends else drafts)
        if not said:
            return []
        tail = list(target_ids[-LOOK_BEHIND:])
        text = self._target.decode(tail)
        if self._encoded(text) == tail:
            joined = self._encoded(text + said)
            if joined[: len(tail)] == tail:
                return joined[len(tail) :]
        return self._encoded(said)

    def _text_behind(self, draft_ids: Sequence[int], drafts: Sequence[int]) -> str:
        """Decoded together with the last ids before, since a decoder may drop a space at the start."""
        tail = list(draft_ids[-LOOK_BEHIND:])
        before, both = self._draft.decode(tail), self._draft.decode([*tail, *drafts])
        if not both.startswith(before):
            return ""
        return both[len(before) :].rstrip("\ufffd")

    def _encoded(self, text: str) -> list[int]:
        """Without what the tokenizer puts before every text."""
        token_ids = self._target.encode(text)
        count = len(self._own)
        return token_ids[count:] if token_ids[:count] == self._own else token_ids
