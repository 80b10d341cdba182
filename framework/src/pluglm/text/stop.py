"""Finds stop strings in a text that arrives in pieces. Knows no tokens.

Method: Aho and Corasick, "Efficient string matching: an aid to bibliographic search", CACM 18(6), 1975.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pluglm.kernel.errors import RequestError


class Node:
    """One prefix of some stop string. `depth`: its length; `match`: the longest stop string that ends here, or None."""

    __slots__ = ("depth", "fallback", "match", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, Node] = {}
        self.fallback: Node | None = None
        self.match: str | None = None


class StopMatcher:
    """Cuts a text at the first stop string that it completes, whatever pieces the text comes in.

    First means completed first; of several completed by the same character, the longest. Text is held back only
    while it is a proper prefix of some stop string. After a match everything that follows is dropped. A stop string
    that is completed where it may not stop is text like any other.
    Raises RequestError for an empty stop string.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False) -> None:
        if isinstance(stop, str) or any(not isinstance(text, str) or not text for text in stop):
            raise RequestError(f"stop is {stop!r}; it must be a list of strings, none of them empty")
        self._root = _automaton(stop)
        self._include_stop = include_stop
        self._node = self._root
        self._held = ""
        self.matched: str | None = None

    @property
    def held(self) -> str:
        """The text held back now: a proper prefix of some stop string."""
        return self._held

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Takes the next piece; returns the text that may leave now and the stop string found, if any.

        may_stop: whether a stop string counts that this piece completes, wherever it began.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._root.next:
            return text, None
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._node = _step(self._root, self._node, character)
            if may_stop and self._node.match is not None:
                self.matched, self._held = self._node.match, ""
                return pending[: end if self._include_stop else end - len(self.matched)], self.matched
        while not self._node.next:  # a whole stop string that did not count: it goes on as a prefix of another, or none
            self._node = self._node.fallback or self._root
        cut = len(pending) - self._node.depth
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """The held text at the end of the output; empty after a match."""
        held, self._held = self._held, ""
        self._node = self._root
        return held


def _step(root: Node, node: Node, character: str) -> Node:
    current: Node | None = node
    while current is not None:
        if character in current.next:
            return current.next[character]
        current = current.fallback
    return root


def _automaton(stop: Sequence[str]) -> Node:
    root = Node(0)
    for text in stop:
        node = root
        for depth, character in enumerate(text, start=1):
            node = node.next.setdefault(character, Node(depth))
        node.match = text
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for character, child in node.next.items():
            child.fallback = root if node.fallback is None else _step(root, node.fallback, character)
            child.match = child.match or child.fallback.match
            queue.append(child)
    return root
