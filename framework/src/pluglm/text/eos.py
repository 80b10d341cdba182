"""Which ids end a sequence: the union of what the checkpoint's configs and its tokenizer say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pluglm.kernel.errors import CheckpointError
from pluglm.text.tokenizer import Tokenizer

KEY = "eos_token_id"


def eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any], tokenizer: Tokenizer | None
) -> frozenset[int]:
    """The EOS ids of a model; empty when nothing names one.

    config, generation_config: as on a Checkpoint; `eos_token_id` is an id, a list of ids, None or absent.
    Raises CheckpointError naming the config and the value when it is anything else.
    """
    found = _ids(config.get(KEY), "config.json") | _ids(generation_config.get(KEY), "generation_config.json")
    return frozenset(found) | (tokenizer.eos_token_ids if tokenizer is not None else frozenset())


def _ids(value: Any, name: str) -> set[int]:
    if value is None:
        return set()
    values = list(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in values):
        raise CheckpointError(f"{name}: {KEY} is {value!r}; it must be a token id (0 or more) or a list of token ids")
    return set(values)
