"""Reads public trace formats, and says which kind of file it was given. Knows formats, no engine."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from pluglm.assembly.validation import validate
from pluglm.kernel.errors import ConfigError
from pluglm.lab.amounts import MOST
from pluglm.lab.generate import generate
from pluglm.lab.trace import Part, Trace, TraceRequest, file_text, json_lines, read_trace
from pluglm.lab.workload import read_workload

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK = 512  # tokens that one hash id stands for
MOST_DIGITS = 18  # of a count in a CSV file; Python itself refuses some thousands
SHOWN = 40  # characters of a bad value in a message
Timed = tuple[float, TraceRequest]  # with the time of its arrival on the file's own clock

WholeNumber = Annotated[int, Field(strict=True, ge=0)]
Milliseconds = Annotated[float, Field(strict=True, ge=0.0, le=MOST * 1000, allow_inf_nan=False)]


def load_trace(path: Path) -> Trace:
    """The requests of a workload (.yaml, .yml), an Azure trace (.csv), a Mooncake trace or one of ours (.jsonl)."""
    if path.suffix in (".yaml", ".yml"):
        return generate(read_workload(path))
    if path.suffix == ".csv":
        return read_azure(path)
    if path.suffix == ".jsonl":
        _, first = next(iter(json_lines(path)))
        return read_mooncake(path) if "input_length" in first else read_trace(path)
    raise ConfigError(f"{path}: the name must end in .yaml (a workload), .jsonl (a trace) or .csv (an Azure trace)")


def read_azure(path: Path) -> Trace:
    """An Azure LLM inference trace: CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens, others unread.

    Format: https://github.com/Azure/AzurePublicDataset (2023 and 2024). Prompts share nothing, for it says nothing of
    their content; a count of 0 is taken for 1. Times without an offset are UTC, digits behind microseconds are cut.
    """
    reader = csv.DictReader(io.StringIO(file_text(path)))
    if missing := [name for name in AZURE_COLUMNS if name not in (reader.fieldnames or ())]:
        raise ConfigError(f"{path}:1: column {missing[0]} is missing; an Azure trace has {', '.join(AZURE_COLUMNS)}")
    try:
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num + 1}: not valid CSV: {error}") from error
    if not rows:
        raise ConfigError(f"{path}: holds no request, only the names of the columns")
    return _by_arrival([_azure_request(path, line, row) for line, row in rows])


def _azure_request(path: Path, line: int, row: Mapping[str, str | None]) -> Timed:
    num_prompt, num_output = (_count(path, line, row, column) for column in AZURE_COLUMNS[1:])
    return _timestamp(path, line, row), _request(path, line, (), num_prompt, num_output)


def _timestamp(path: Path, line: int, row: Mapping[str, str | None]) -> float:
    """Seconds since 1970."""
    text = row["TIMESTAMP"] or ""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        what = f"TIMESTAMP {text[:SHOWN]!r} is no time like 2023-11-16 18:15:46.6805900"
        raise ConfigError(f"{path}:{line}: {what}") from None
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


def _count(path: Path, line: int, row: Mapping[str, str | None], column: str) -> int:
    text = row[column] or ""
    if not text.isascii() or not text.isdecimal() or len(text) > MOST_DIGITS:
        raise ConfigError(
            f"{path}:{line}: {column} {text[:SHOWN]!r} is not a whole number of {MOST_DIGITS} digits at most"
        )
    return int(text)


class MooncakeRequest(BaseModel):
    """One line of a Mooncake trace. timestamp: milliseconds. Keys that other producers add are not read."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    timestamp: Milliseconds
    input_length: WholeNumber
    output_length: WholeNumber
    hash_ids: tuple[WholeNumber, ...] = ()


def read_mooncake(path: Path, block_tokens: int = MOONCAKE_BLOCK) -> Trace:
    """A Mooncake trace: JSON lines with timestamp, input_length, output_length and hash_ids.

    Format: https://github.com/kvcache-ai/Mooncake (Qin et al., FAST 2025). An id stands for block_tokens tokens of the
    prompt, the last one for what is left; equal ids become equal tokens, so that prefixes are shared as they were.
    Tokens behind the last id are the request's own. A length of 0 is taken for 1.
    """
    requests = []
    for line, data in json_lines(path):
        one = validate(MooncakeRequest, data, f"{path}:{line}")
        length, fit = max(one.input_length, 1), -(-max(one.input_length, 1) // block_tokens)
        if len(one.hash_ids) > fit:
            what = f"{len(one.hash_ids)} ids for {length} tokens, which are {fit} blocks of {block_tokens}"
            raise ConfigError(f"{path}:{line}: hash_ids: {what}")
        sizes = [min(block_tokens, length - index * block_tokens) for index in range(len(one.hash_ids))]
        blocks = tuple((f"block-{name}", size) for name, size in zip(one.hash_ids, sizes, strict=True))
        request = _request(path, line, blocks, length - sum(sizes), one.output_length)
        requests.append((one.timestamp / 1000, request))
    return _by_arrival(requests)


def _request(path: Path, line: int, shared: tuple[Part, ...], num_own: int, num_output: int) -> TraceRequest:
    """At time 0, which is not known yet."""
    own: tuple[Part, ...] = ((f"line-{line}", max(num_own, 1)),) if num_own or not shared else ()
    data = {
        "request_id": f"line-{line}",
        "arrival_s": 0.0,
        "prompt": (*shared, *own),
        "output_tokens": max(num_output, 1),
    }
    return validate(TraceRequest, data, f"{path}:{line}")


def _by_arrival(requests: list[Timed]) -> Trace:
    """In order of arrival, those of one moment in the order of the file, the first one at 0."""
    begin = min(time_s for time_s, _ in requests)
    moved = [one.model_copy(update={"arrival_s": time_s - begin}) for time_s, one in requests]
    return tuple(sorted(moved, key=lambda one: one.arrival_s))
