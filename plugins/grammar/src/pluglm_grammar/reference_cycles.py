"""Finds references of a JSON Schema that lead back to themselves before any character of the text is read.

JSON Schema 2020-12 core, 9.4.1 forbids them; llguidance compiles them to an empty language.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

_IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
_Node = dict[str, Any]


def find_reference_cycle(schema: _Node) -> str | None:
    """Path of a schema on such a cycle, or None. References that resolve to nothing here are left to the compiler."""
    places = _Places(schema)
    done: set[int] = set()
    for start in places.nodes:
        found = _search(start, places, done)
        if found is not None:
            return places.path(found)
    return None


def _search(start: _Node, places: _Places, done: set[int]) -> _Node | None:
    """Depth-first with an explicit stack: a chain of references may be longer than Python's recursion limit."""
    on_path: set[int] = set()
    stack = [(start, False)]
    while stack:
        node, leaving = stack.pop()
        if leaving:
            on_path.discard(id(node))
            done.add(id(node))
        elif id(node) in on_path:
            return node
        elif id(node) not in done:
            on_path.add(id(node))
            stack.append((node, True))
            stack.extend((target, False) for target in places.in_place_targets(node))
    return None


class _Places:
    """Every object of the document, with its path, its base URI and what can be referred to."""

    def __init__(self, schema: _Node) -> None:
        self.nodes: list[_Node] = []
        self._where: dict[int, tuple[str, str]] = {}  # id(node) -> path, base
        self._targets: dict[str, Any] = {"": schema}
        queue: list[tuple[str, str, Any]] = [("#", "", schema)]
        for path, base, node in queue:
            if isinstance(node, dict):
                base = self._add(path, base, node)
                queue.extend((f"{path}/{key}", base, child) for key, child in node.items())
            elif isinstance(node, list):
                queue.extend((f"{path}/{index}", base, child) for index, child in enumerate(node))

    def path(self, node: _Node) -> str:
        return self._where[id(node)][0]

    def in_place_targets(self, node: _Node) -> list[_Node]:
        """The schemas that are applied to the very same text as `node`."""
        targets = []
        if isinstance(node.get("$ref"), str):
            targets.append(self._resolve(node["$ref"], self._where[id(node)][1]))
        for keyword in _IN_PLACE_LISTS:
            branches = node.get(keyword)
            targets.extend(branches if isinstance(branches, list) else ())
        return [target for target in targets if isinstance(target, dict) and id(target) in self._where]

    def _add(self, path: str, base: str, node: _Node) -> str:
        identifier, anchor = node.get("$id"), node.get("$anchor")
        if isinstance(identifier, str) and identifier.startswith("#"):
            anchor = identifier[1:]  # how draft-06 and draft-07 name an anchor
        elif isinstance(identifier, str):
            base = urldefrag(urljoin(base, identifier)).url
            self._targets.setdefault(base, node)
        if isinstance(anchor, str):
            self._targets.setdefault(f"{base}#{anchor}", node)
        self.nodes.append(node)
        self._where[id(node)] = (path, base)
        return base

    def _resolve(self, reference: str, base: str) -> Any:
        # urljoin drops the base of a fragment when it does not know the scheme (urn:).
        url, fragment = urldefrag(base + reference if reference.startswith("#") else urljoin(base, reference))
        if fragment and not fragment.startswith("/"):
            return self._targets.get(f"{url}#{fragment}")
        return _follow(self._targets.get(url), fragment)


def _follow(node: Any, pointer: str) -> Any:
    """RFC 6901, in its URI fragment form. None when there is nothing."""
    for part in pointer.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(key)
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return None
    return node
