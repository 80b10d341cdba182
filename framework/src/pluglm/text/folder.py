"""Reads a tokenizer from a checkpoint folder: tokenizer.json and the small files beside it. Knows no weights.

tokenizer.json alone decides how text is split and what goes around it (as in transformers, `add_bos_token` beside it
counts for nothing); the other files name special tokens and the chat template.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from pluglm.kernel.errors import TokenizerError
from pluglm.text.messages import one_line
from pluglm.text.tokenizer import Tokenizer

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face checkpoint folder. Raises TokenizerError naming the file and the fix."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(_what_is_missing(folder))
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every kind of damage
        raise TokenizerError(f"{path}: not a tokenizer ({one_line(error)}); fetch the file again") from error
    config = _read_object(folder / "tokenizer_config.json")
    stated = {key: value for key, value in config.items() if value is not None}
    config = _read_object(folder / "special_tokens_map.json") | stated
    named = _named_tokens(config, folder)
    _add_missing_tokens(backend, config, named, folder)
    template = _chat_template(folder, config)
    return Tokenizer(backend, source=str(folder), special_tokens=named, chat_template=template)


def _what_is_missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder; give the folder that holds tokenizer.json"
    for name in ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json"):
        if (folder / name).is_file():
            return (
                f"{folder}: has {name} but no tokenizer.json; convert it once with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
    return f"{folder}: has no tokenizer.json; copy the model's tokenizer.json and tokenizer_config.json there"


def _read_object(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    _check_file(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise TokenizerError(f"{path}: not JSON ({one_line(error)}); fetch the file again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: holds a {type(value).__name__}, not an object; fetch the file again")
    return value


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise TokenizerError(f"{path}: a folder, a broken link or no plain file; fetch the file again")


def _token_text(value: Any, key: str, folder: Path) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    if text is None or isinstance(text, str):
        return text
    raise TokenizerError(f"{folder}: {key} is {value!r}; it must be a string or an object with 'content'")


def _named_tokens(config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    texts = {key: _token_text(config.get(key), key, folder) for key in NAMED_TOKENS}
    return {key: text for key, text in texts.items() if text is not None}


def _declared_tokens(
    config: Mapping[str, Any], named: Mapping[str, str], folder: Path
) -> Iterator[tokenizers.AddedToken]:
    """Every token that the small files declare, in the order in which transformers would append it."""
    declared = config.get("added_tokens_decoder") or {}
    try:
        by_id = sorted(declared.items(), key=lambda item: int(item[0]))
        yield from (_added_token(entry) for _, entry in by_id)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder is damaged ({one_line(error)})"
        ) from error
    for text in named.values():
        yield tokenizers.AddedToken(text, special=True, normalized=False)
    for key in EXTRA_TOKENS:
        values = config.get(key) or []
        values = list(values.values()) if isinstance(values, dict) else values
        if not isinstance(values, list):
            raise TokenizerError(
                f"{folder / 'tokenizer_config.json'}: {key} is {values!r}; it must be a list of tokens"
            )
        for value in values:
            if (extra := _token_text(value, key, folder)) is not None:
                yield tokenizers.AddedToken(extra, special=True, normalized=False)


def _added_token(entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = {key: bool(entry[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry}
    return tokenizers.AddedToken(entry["content"], special=bool(entry.get("special", False)), **flags)


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str], folder: Path
) -> None:
    """Adds declared tokens that tokenizer.json does not list, and marks named ones as control tokens.

    What tokenizer.json says of a token it lists (stripping, normalisation) stays.
    """
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for token in _declared_tokens(config, named, folder):
        listed = known.get(token.content)
        if listed is not None and (listed.special or not token.special):
            continue
        if listed is not None:
            listed.special = True
            token = listed
        backend.add_tokens([token])
        known[token.content] = token


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, whose entry is one template or a list of named ones."""
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        _check_file(path)
        try:
            return path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise TokenizerError(f"{path}: unreadable ({one_line(error)}); fetch the file again") from error
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    try:
        by_name = {entry["name"]: entry["template"] for entry in template}
    except (TypeError, KeyError) as error:
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither a string nor a list of name/template pairs"
        ) from error
    default = next(iter(by_name.values())) if len(by_name) == 1 else by_name.get("default")
    if by_name and not isinstance(default, str):
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: none of the chat templates {sorted(map(str, by_name))} is a string "
            "named 'default'; name one so"
        )
    return default
