"""What callers hand to the Engine beside prompts: its defaults, and its types before any component sees them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pluglm.assembly.validation import validate
from pluglm.kernel.errors import ConfigError, RequestError
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.outputs import Prompt

MOST_PRIORITY = 10**9  # either way: policies reckon with it in float64, and want parts of one as well

Params = SamplingParams | Sequence[SamplingParams] | None


class Options(NamedTuple):
    """How one request is to be scheduled, as in Engine.submit."""

    priority: int = 0
    tenant: str = ""
    deadline_s: float | None = None
    salt: str = ""


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody asked to see."""


def as_list(prompts: Any) -> list[Prompt]:
    """A list of prompts from one or many; a list of messages is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be a prompt or a list of them, not {type(prompts).__name__}")
    many = list(prompts)
    is_chat = bool(many) and all(isinstance(one, Mapping) and "role" in one for one in many)
    return [many] if is_chat else many


def check_types(params: object, request_id: object, options: Options) -> None:
    """A wrong type here would only show in a component, as everybody's failure."""
    checks = (
        ("params", params, SamplingParams),
        ("request_id", "" if request_id is None else request_id, str),
        ("priority", options.priority, int),
        ("tenant", options.tenant, str),
        ("deadline_s", 0.0 if options.deadline_s is None else options.deadline_s, int | float),
        ("salt", options.salt, str),
    )
    for name, value, kind in checks:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise RequestError(f"{name} must be {getattr(kind, '__name__', 'a number')}, not {type(value).__name__}")
    if options.deadline_s is not None and not 0 < options.deadline_s <= sys.float_info.max:
        raise RequestError(f"deadline_s must be a number of seconds above 0, not {_shown(options.deadline_s)}")
    if abs(options.priority) > MOST_PRIORITY:
        limits = f"an integer from {-MOST_PRIORITY} to {MOST_PRIORITY}"
        raise RequestError(f"priority must be {limits}, not {_shown(options.priority)}")


def checked(params: SamplingParams) -> SamplingParams:
    """Params validated anew, since pydantic's model_copy puts in anything. Raises RequestError."""
    try:
        return validate(type(params), dict(vars(params)), "params")
    except ConfigError as error:
        raise RequestError(str(error)) from None


def _shown(number: float) -> str:
    """Python itself refuses to print an integer of some thousand digits."""
    is_long = isinstance(number, int) and number.bit_length() > 128
    return f"one of {int(number).bit_length()} bits" if is_long else str(number)


def params_list(params: Params, count: int, default: SamplingParams) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or default] * count
    if not isinstance(params, Sequence) or isinstance(params, str):
        raise RequestError(f"sampling params must be SamplingParams, not {type(params).__name__}")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params for {count} prompts; give one, or one each")
    if wrong := [one for one in params if not isinstance(one, SamplingParams)]:
        raise RequestError(f"sampling params must be SamplingParams, not {type(wrong[0]).__name__}")
    return list(params)
