"""What `pluglm run` has to do: one job per prompt, from the command line, standard input or a JSONL file.

A JSONL file is checked whole before anything runs. Token ids cannot be checked before the tokenizer is there.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pluglm.assembly.validation import validate
from pluglm.kernel.errors import ConfigError, PluglmError
from pluglm.outputs import Prompt
from pluglm.params import SamplingParams

KINDS = ("prompt", "prompt_token_ids", "messages")
KNOWN = (*KINDS, "params", "id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt to run. where: how messages name it; label: the caller's own id; plain: text that no form was
    chosen for, which the chat template may wrap."""

    prompt: Prompt
    params: SamplingParams
    where: str
    label: str | int | None = None
    plain: bool = False


class BadLinesError(ConfigError):
    """The prompts file is malformed; `lines` holds one message for every bad line."""

    def __init__(self, path: Path, lines: Sequence[str]) -> None:
        super().__init__(f"{path}: nothing was run, {len(lines)} bad line(s)")
        self.lines = tuple(lines)


def single_job(text: str | None, params: SamplingParams) -> Job:
    """The job of --prompt, or of standard input when that is piped. Raises ConfigError when there is neither."""
    where = "--prompt" if text is not None else "standard input"
    if text is None:
        text = _piped()
    if not text:
        raise ConfigError(f"{where} is empty; give --prompt TEXT, --prompts-file FILE, or pipe the prompt in")
    return Job(prompt=text, params=with_seed(params), where=where, plain=True)


def _piped() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("no prompt; give --prompt TEXT, --prompts-file FILE, or pipe the prompt in")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not valid text: {error}") from error


def with_seed(params: SamplingParams) -> SamplingParams:
    """The params with a fresh seed when they have none, so that every result can be had again.

    53 bits, because many readers of JSON keep no more of an integer.
    """
    return params if params.seed is not None else params.model_copy(update={"seed": secrets.randbits(53)})


def read_jobs(path: Path, sampling: SamplingParams) -> list[Job]:
    """One job per line that is not blank. Raises BadLinesError with every bad line, or ConfigError for the file."""
    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    jobs: list[Job] = []
    bad: list[str] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            jobs.append(_job(_parsed(line), sampling, f"{path}:{number}"))
        except PluglmError as error:
            text = str(error)
            bad.append(text if text.startswith(f"{path}:{number}") else f"{path}:{number}: {text}")
    if bad:
        raise BadLinesError(path, bad)
    if not jobs:
        raise ConfigError(f'{path}: holds no prompt; write one JSON object a line, such as {{"prompt": "Hello"}}')
    return jobs


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line.decode("utf-8"), object_pairs_hook=_no_repeats, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text: byte {error.start + 1} is {error.object[error.start]:#04x}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"not valid JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"must be a JSON object with one of {', '.join(KINDS)}, not {type(data).__name__}")
    return data


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    repeated = next((key for key in keys if keys.count(key) > 1), None)
    if repeated is not None:
        raise ValueError(f"key {repeated!r} is given twice")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _job(data: Mapping[str, Any], sampling: SamplingParams, where: str) -> Job:
    unknown = next((key for key in data if key not in KNOWN), None)
    if unknown is not None:
        raise ConfigError(f"unknown key {unknown!r}; known keys: {', '.join(KNOWN)}")
    given = [kind for kind in KINDS if kind in data]
    if len(given) != 1:
        raise ConfigError(f"give exactly one of {', '.join(KINDS)}, not {' and '.join(given) or 'none'}")
    label = data.get("id")
    if label is not None and (isinstance(label, bool) or not isinstance(label, str | int)):
        raise ConfigError(f"id must be a string or an integer, not {label!r}")
    params = _params(data.get("params", {}), sampling, where)
    return Job(prompt=_prompt(given[0], data[given[0]]), params=with_seed(params), where=where, label=label)


def _prompt(kind: str, value: Any) -> Prompt:
    if kind == "prompt":
        if not isinstance(value, str):
            raise ConfigError(f"prompt must be a string, not {type(value).__name__}")
        return value
    if kind == "messages":
        from pluglm.text.chat_template import checked_messages

        return checked_messages(value)  # type: ignore[return-value]  # further keys reach the template
    is_ids = isinstance(value, list) and value and all(type(one) is int and one >= 0 for one in value)
    if not is_ids:
        raise ConfigError("prompt_token_ids must be a list of at least one integer, none below 0")
    return {"prompt_token_ids": value}


def _params(overrides: Any, sampling: SamplingParams, where: str) -> SamplingParams:
    if not isinstance(overrides, dict):
        raise ConfigError(f"params must be an object of sampling parameters, not {type(overrides).__name__}")
    if not overrides:
        return sampling
    return validate(SamplingParams, {**sampling.model_dump(), **overrides}, where, ("params",))
