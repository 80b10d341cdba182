"""Reads YAML into plain data and refuses what a config has no use for. Knows no key of a config."""

from __future__ import annotations

import re
from typing import Any

import yaml

_MOST_VALUES = 1_000_000  # counted with every alias written out


class UnreadableYamlError(ValueError):
    """The text is not YAML, or not YAML of this reader. The message is one line, without the place it came from."""


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader, where a key given twice in one mapping is an error, as YAML 1.2 (section 3.2.1.1) has it."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add((key.tag, key.value))
        return node


# YAML 1.2 reads 1e-5 as a number; PyYAML keeps to 1.1, where it is a string without the dot.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """The data of one YAML document: nothing is constructed but plain values.

    Raises UnreadableYamlError for wrong syntax, a key given twice, a value out of range, nesting that is too deep,
    an alias that holds itself, and aliases that would write out more than a million values.
    """
    try:
        data = yaml.load(text, Loader=_StrictLoader)
        _count(data, {})
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise UnreadableYamlError(f"{' '.join(str(error.problem or error.context).split())}{place}") from error
    except RecursionError as error:
        raise UnreadableYamlError("it is nested too deep") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that Python does not have
        raise UnreadableYamlError(" ".join(str(error).split())) from error
    return data


def _count(value: Any, counts: dict[int, int]) -> int:
    """Values below and with `value`, aliases written out. counts: what is known of containers; 0 while inside one."""
    if not isinstance(value, dict | list | tuple | set):
        return 1
    known = counts.get(id(value))
    if known == 0:
        raise UnreadableYamlError("an alias holds itself")
    if known is None:
        counts[id(value)] = 0
        inside = value.values() if isinstance(value, dict) else value
        known = counts[id(value)] = 1 + sum(_count(one, counts) for one in inside)
    if known > _MOST_VALUES:
        raise UnreadableYamlError(f"its aliases write out more than {_MOST_VALUES} values")
    return known
