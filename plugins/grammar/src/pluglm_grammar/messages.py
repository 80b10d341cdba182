"""Turns llguidance's error texts into one line that names the place in the schema. Knows no grammar state."""

from __future__ import annotations

import re
from typing import Any

_REGEX_REASON = re.compile(r"^error: (.+)$", re.MULTILINE)
_PREFIX = re.compile(r"^(?:at \d+\(\d+\): )?(?:failed to compile JSON schema: )?")
_QUOTED = re.compile(r"[\"']([^\"']+)[\"']")
_NAMED = re.compile(r"^(?:Unknown format|Invalid type): (\S+)$")
_PLAIN_REASONS = {
    "NoExtension": "no text can match",
    "NoExtensionBias": "no text can match",
    "ParserTooComplex": "too many alternatives are open at once",
    "LexerTooComplex": "its patterns need too many states",
}
_MAX_LENGTH = 300


def one_line(text: str) -> str:
    """The reason inside a library message of several lines."""
    named = _REGEX_REASON.search(text)
    reason = named.group(1) if named else _PREFIX.sub("", text.strip()).split("\n", 1)[0]
    reason = " ".join(reason.split())[:_MAX_LENGTH]
    return _PLAIN_REASONS.get(reason, reason)


def schema_reason(text: str, schema: Any) -> str:
    """one_line, and where in the schema the thing that it names is first found."""
    reason = one_line(text)
    names = _QUOTED.findall(reason) or _NAMED.findall(reason)
    if reason.startswith("oneOf"):
        names, reason = ["oneOf"], "branches of oneOf that could both match are not supported; use anyOf"
    for name in names:
        path = find_name(schema, name)
        if path is not None:
            return f"{reason} at {path}"
    return reason


def find_name(value: Any, name: str) -> str | None:
    """Path (`#/a/0/b`) of the first key or string in a JSON value that equals `name`, breadth first."""
    queue = [("#", value)]
    for path, node in queue:
        if isinstance(node, dict):
            if name in node:
                return f"{path}/{name}"
            queue.extend((f"{path}/{key}", child) for key, child in node.items())
        elif isinstance(node, list):
            queue.extend((f"{path}/{index}", child) for index, child in enumerate(node))
        elif node == name:
            return path
    return None
