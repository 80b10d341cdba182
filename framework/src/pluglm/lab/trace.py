"""A trace: the requests of a workload one by one, as data that can be written, read and replayed on any engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, model_validator

from pluglm.assembly.validation import validate
from pluglm.kernel.errors import ConfigError
from pluglm.lab.amounts import MOST, MOST_TOKENS, Name, Number, Strict

Count = Annotated[int, Field(strict=True, ge=1, le=MOST_TOKENS)]
Part = tuple[Name, Count]


class TraceRequest(Strict):
    """One request. Lines of a trace file hold these keys.

    arrival_s: seconds after the begin of the trace; with `after`, seconds after the end of that request, whose prompt
    and output come before this prompt. prompt: parts (key, number of tokens), see `part_token_ids`. output_tokens: all
    of them are generated. deadline_s, cancel_s: seconds after the arrival.
    """

    request_id: Annotated[Name, Field(min_length=1)]
    arrival_s: Number
    prompt: Annotated[tuple[Part, ...], Field(min_length=1)]
    output_tokens: Count
    after: Name | None = None
    tenant: Name = ""
    priority: Annotated[int, Field(strict=True)] = 0
    deadline_s: Number | None = None
    cancel_s: Number | None = None
    salt: Name = ""

    @model_validator(mode="after")
    def _of_a_size_that_fits(self) -> Self:
        if (num_prompt := sum(count for _, count in self.prompt)) > MOST_TOKENS:
            raise ValueError(f"a prompt of {num_prompt:,} tokens; {MOST_TOKENS:,} is the most")
        return self


Trace = tuple[TraceRequest, ...]


def part_token_ids(key: str, num_tokens: int, num_ids: int) -> list[int]:
    """The first num_tokens of the endless sequence of ids below num_ids that `key` stands for.

    It is the output of SHAKE128 (FIPS 202) for the key, in 32-bit little-endian numbers, modulo num_ids. So parts with
    one key and different lengths begin alike, and parts with different keys do not.
    """
    numbers = np.frombuffer(hashlib.shake_128(key.encode()).digest(4 * num_tokens), dtype="<u4")
    token_ids: list[int] = (numbers % num_ids).tolist()
    return token_ids


def prompt_token_ids(prompt: Sequence[Part], num_ids: int) -> list[int]:
    """The parts' ids, one after the other."""
    return [token_id for key, count in prompt for token_id in part_token_ids(key, count, num_ids)]


def write_trace(path: Path, trace: Trace) -> None:
    """One JSON object a line; fields at their default are left out. Raises ConfigError when it cannot be written."""
    try:
        path.write_text(_trace_text(trace), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


def _trace_text(trace: Trace) -> str:
    return "".join(f"{one.model_dump_json(exclude_defaults=True)}\n" for one in trace)


def trace_digest(trace: Trace) -> str:
    """BLAKE2b of what write_trace would write: equal for equal traces, in any process."""
    return hashlib.blake2b(_trace_text(trace).encode(), digest_size=16).hexdigest()


def read_trace(path: Path) -> Trace:
    """What write_trace wrote. ConfigError names file, line and what is wrong."""
    trace: list[TraceRequest] = []
    known: set[str] = set()
    for line, data in json_lines(path):
        where = f"{path}:{line}"
        one = validate(TraceRequest, data, where)
        if one.request_id in known:
            raise ConfigError(f"{where}: request_id '{one.request_id}' is on a line above already")
        if one.after is not None and one.after not in known:
            raise ConfigError(f"{where}: after: '{one.after}' is on no line above")
        known.add(one.request_id)
        trace.append(one)
    return tuple(trace)


def json_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number, object) of every line that is not blank. ConfigError when there is none, or one is no object."""
    found = False
    for line, text in enumerate(file_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{line}: not valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path}:{line}: must be a JSON object, not {type(data).__name__}")
        found = True
        yield line, data
    if not found:
        raise ConfigError(f"{path}: holds no request; write one JSON object a line")


def file_text(path: Path) -> str:
    """The text of a UTF-8 file, or ConfigError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def first(trace: Trace, count: int) -> Trace:
    """The first requests of a trace: every later turn stands behind the turn that it follows."""
    return trace[:count]


def sped_up(trace: Trace, factor: float) -> Trace:
    """The same requests, arriving `factor` times as fast; think times and deadlines stay.

    Raises ConfigError where that is later than a trace can say.
    """
    if any(one.after is None and not one.arrival_s / factor <= MOST for one in trace):
        raise ConfigError(f"speed {factor:g}: the last request would come after more than {MOST:g} seconds; take more")
    return tuple(
        one if one.after is not None else one.model_copy(update={"arrival_s": one.arrival_s / factor}) for one in trace
    )
