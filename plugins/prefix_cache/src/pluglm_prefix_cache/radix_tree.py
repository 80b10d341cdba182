"""Finds blocks by content with a radix tree of token runs. Knows no table and no eviction.

The tree is that of SGLang's RadixAttention (arXiv:2312.07104). Runs are split where blocks begin, since a block belongs
to one path; where paths part inside a block each has a block of its own, and the children of a node are sorted, so the
one that shares most tokens with a text is next to where the text would stand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from pluglm.kernel.core import CacheKey
from pluglm.kv.prefix_index import CacheEntry

Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """A run of blocks without a branch. Only the last block of a run without children may be partly filled.

    first: number of its first block in the sequence. keys: the first block's tokens of every child, sorted.
    """

    namespace: bytes
    parent: Node | None  # None is the root of the namespace, which has no blocks
    first: int = 0
    tokens: list[int] = field(default_factory=list)
    entries: list[CacheEntry] = field(default_factory=list)
    keys: list[Tokens] = field(default_factory=list)
    children: dict[Tokens, Node] = field(default_factory=dict)

    def insert(self, key: Tokens, child: Node) -> None:
        self.keys.insert(bisect_left(self.keys, key), key)
        self.children[key] = child

    def discard(self, key: Tokens) -> None:
        del self.keys[bisect_left(self.keys, key)]
        del self.children[key]

    def nearest(self, text: Tokens, without: Container[int]) -> Node | None:
        """The child that shares the most first tokens with text, if any does; of two the smaller one."""
        if text in self.children and self.children[text].entries[0].block not in without:
            return self.children[text]
        at = bisect_left(self.keys, text)
        sides = (range(at - 1, -1, -1), range(at, len(self.keys)))
        best, most = None, 0
        for side in sides:
            for key in (self.keys[number] for number in side):
                if self.children[key].entries[0].block not in without:
                    if (common := common_length(key, text)) > most:
                        best, most = self.children[key], common
                    break
        return best


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many first tokens are the same; both must be of one type. Halving compares runs at the speed of ==."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


class RadixTree:
    """A PrefixIndex of blocks of which any first tokens can be found. entry.place is the node of the entry."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[bytes, Node] = {}

    def match(self, key: CacheKey, without: Container[int]) -> tuple[list[CacheEntry], int]:
        size, text = self._block_size, list(key.token_ids[: max(0, key.limit)])
        node, found, length = self._roots.get(key.namespace), list[CacheEntry](), 0
        while node is not None and length < len(text):
            child = node.nearest(tuple(text[length : length + size]), without)
            if child is None:
                break
            common = common_length(child.tokens, text[length : length + len(child.tokens)])
            taken = child.entries[: -(-common // size)]
            if without:
                there = next((i for i, entry in enumerate(taken) if entry.block in without), len(taken))
                taken, common = taken[:there], min(common, there * size)
            found += taken
            length += common
            node = child if common == len(child.tokens) else None
        return found, length

    def find(self, namespace: bytes, parent: CacheEntry | None, tokens: Tokens) -> CacheEntry | None:
        node, at = self._after(namespace, parent)
        if node is None:
            return None
        if at < len(node.entries):
            start = at * self._block_size
            return node.entries[at] if node.tokens[start : start + len(tokens)] == list(tokens) else None
        at = bisect_left(node.keys, tokens)
        is_start = at < len(node.keys) and node.keys[at][: len(tokens)] == tokens
        return node.children[node.keys[at]].entries[0] if is_start else None

    def add(self, namespace: bytes, parent: CacheEntry | None, tokens: Tokens, entry: CacheEntry) -> CacheEntry | None:
        """Returns a partly filled block after the same parent whose tokens this one begins with, if there is one."""
        node, at = self._after(namespace, parent)
        if node is None:
            node = self._roots[namespace] = Node(namespace, None)
        if at < len(node.entries):
            self._split(node, at)
        if node.entries and not node.children:
            node.tokens += tokens
            node.entries.append(entry)
            entry.place = node
            return None
        number = bisect_left(node.keys, tokens) - 1
        shorter = node.keys[number] if number >= 0 else None
        entry.place = Node(namespace, node, node.first + len(node.entries), list(tokens), [entry])
        node.insert(tokens, entry.place)
        is_useless = shorter is not None and shorter == tokens[: len(shorter)]
        return node.children[shorter].entries[0] if shorter is not None and is_useless else None

    def remove(self, entry: CacheEntry) -> None:
        node: Node = entry.place
        key = tuple(node.tokens[: self._block_size])
        node.entries.pop()
        del node.tokens[len(node.entries) * self._block_size :]
        if node.entries or node.parent is None:
            return
        above = node.parent
        above.discard(key)
        if above.parent is not None and len(above.keys) == 1:
            _merge(above)
        elif above.parent is None and not above.keys:
            del self._roots[above.namespace]

    def path(self, entry: CacheEntry) -> tuple[bytes, tuple[int, ...]]:
        node: Node = entry.place
        runs = [node.tokens[: entry.num_before + entry.num_tokens - node.first * self._block_size]]
        while node.parent is not None:
            node = node.parent
            runs.append(node.tokens)
        return node.namespace, tuple(chain.from_iterable(reversed(runs)))

    def audit(self, entries: Collection[CacheEntry]) -> None:
        found: list[CacheEntry] = []
        for namespace, root in self._roots.items():
            for node in _below(root):
                _audit_node(node, namespace, self._block_size)
                found += node.entries
        if len(found) != len(entries) or set(found) != set(entries):
            raise RuntimeError(f"KV cache: the tree has {len(found)} blocks, {len(entries)} are cached")

    def _after(self, namespace: bytes, parent: CacheEntry | None) -> tuple[Node | None, int]:
        """The node of what follows parent, and how many of its blocks come before that."""
        if parent is None:
            return self._roots.get(namespace), 0
        node: Node = parent.place
        return node, parent.num_before // self._block_size - node.first + 1

    def _split(self, node: Node, at: int) -> None:
        """The blocks from number `at` on become a child, with what was below."""
        start = at * self._block_size
        lower = Node(
            node.namespace, node, node.first + at, node.tokens[start:], node.entries[at:], node.keys, node.children
        )
        del node.tokens[start:], node.entries[at:]
        node.keys, node.children = [], {}
        node.insert(tuple(lower.tokens[: self._block_size]), lower)
        _adopt(lower, lower)


def _merge(node: Node) -> None:
    """Take in the only child."""
    (child,) = node.children.values()
    node.tokens += child.tokens
    node.entries += child.entries
    node.keys, node.children = child.keys, child.children
    _adopt(node, child)


def _adopt(node: Node, from_node: Node) -> None:
    """Tell the entries and children of from_node where they are now."""
    for entry in from_node.entries:
        entry.place = node
    for child in node.children.values():
        child.parent = node


def _below(root: Node) -> Iterator[Node]:
    todo = [root]
    while todo:
        todo += (node := todo.pop()).children.values()
        yield node


def _audit_node(node: Node, namespace: bytes, size: int) -> None:
    above, num_blocks = node.parent, len(node.entries)
    sound = (
        node.namespace == namespace
        and (num_blocks > 0) == (above is not None)
        and (above is None or (len(node.keys) != 1 and node.first == above.first + len(above.entries)))
        and -(-len(node.tokens) // size) == num_blocks
        and (not node.keys or len(node.tokens) % size == 0)
        and node.keys == sorted(node.children)
        and all(child.parent is node and tuple(child.tokens[:size]) == key for key, child in node.children.items())
    )
    before = above.entries[-1] if above is not None and above.entries else None
    for number, entry in enumerate(node.entries):
        start, end = number * size, min(len(node.tokens), (number + 1) * size)
        place = (entry.place, entry.parent, entry.num_before, entry.num_tokens)
        sound = sound and place == (node, before, (node.first + number) * size, end - start)
        before = entry
    if not sound:
        raise RuntimeError(f"KV cache: the tree is unsound at block {node.first} of a path: {node.tokens[:size]}...")
