"""Classes of confidence of what is copied, by how much of the text stood before in the same way."""

from __future__ import annotations

from bisect import bisect_right

LEAST = (0, 1, 2, 3, 4, 8, 16)  # tokens of context of each class; the first is of those that went on in several ways
PRIORS = (0.18, 0.25, 0.55, 0.75, 0.85, 0.92, 0.96)  # share of drafts kept, on the prompts that lengths were tuned on
MOST_CONTEXT = LEAST[-1]


def kinds_of(num_context: int, num_drafts: int, is_unanimous: bool = True) -> list[int]:
    """The class of each of num_drafts drafts that are chosen by num_context tokens, 1 or more, which occurred before.

    Once a draft is kept, it is context of the next. is_unanimous: the text went on in the same way every time.
    """
    kinds = [bisect_right(LEAST, num_context + place) - 1 for place in range(num_drafts)]
    if kinds and not is_unanimous:
        kinds[0] = 0
    return kinds
