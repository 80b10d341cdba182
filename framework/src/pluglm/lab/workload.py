"""A workload file: what requests come, in distributions, with a seed. Knows no engine and draws nothing itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from pluglm.assembly.strict_yaml import UnreadableYamlError, parse_yaml
from pluglm.assembly.validation import validate
from pluglm.kernel.errors import ConfigError
from pluglm.lab.amounts import MOST_REQUESTS, Amount, Lengths, Name, Number, Positive, Strict
from pluglm.lab.arrivals import Arrivals

Share = Annotated[float, Field(strict=True, ge=0.0, le=1.0)]


class Prefixes(Strict):
    """Prompts that begin alike. A prompt has a prefix with probability `share`, of one of num_groups groups.

    Group g (from 0) is chosen with a probability proportional to 1 / (g + 1)^zipf; 0 makes all equally likely. `length`
    is drawn once for a group; the request's own tokens follow.
    """

    num_groups: int = Field(strict=True, ge=1, le=MOST_REQUESTS)
    length: Lengths
    zipf: Number = 1.0
    share: Share = 1.0


class Sessions(Strict):
    """Conversations: each arrival is a session of `turns` requests.

    The prompt of a turn is everything before it, the engine's own output included, and new tokens of the stream's
    `prompt`. It arrives think_s after the turn before it ended.
    """

    turns: Lengths
    think_s: Amount


class Deadlines(Strict):
    """With probability `share` a request must have ended after_s seconds after its arrival."""

    after_s: Amount
    share: Share = 1.0


class Cancellations(Strict):
    """With probability `share` the caller goes away after_s seconds after the arrival, if the request still runs."""

    after_s: Amount
    share: Share


class Stream(Strict):
    """Requests of one kind. name: begins their ids. num_arrivals: how many come, sessions where there are any.

    tenants, priorities: name or level -> weight; a session keeps its own. salt_by_tenant: requests of different
    tenants share no cached KV.
    """

    name: Name = Field(default="request", min_length=1)
    num_arrivals: int | None = Field(default=None, strict=True, ge=1, le=MOST_REQUESTS)
    arrivals: Arrivals
    prompt: Lengths
    output: Lengths
    prefixes: Prefixes | None = None
    sessions: Sessions | None = None
    tenants: dict[Name, Positive] = Field(default={"": 1.0}, min_length=1)
    priorities: dict[int, Positive] = Field(default={0: 1.0}, min_length=1)
    deadlines: Deadlines | None = None
    cancellations: Cancellations | None = None
    salt_by_tenant: bool = False

    @model_validator(mode="after")
    def _counted_once(self) -> Self:
        if (self.num_arrivals is None) == (self.arrivals.times is None):
            raise ValueError("give num_arrivals, or arrivals.times with one time for each, not both or none")
        return self


class Workload(Strict):
    """Independent streams of requests, merged by arrival. The seed fixes everything that is drawn."""

    seed: int = Field(default=0, strict=True, ge=0)
    streams: Annotated[tuple[Stream, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [stream.name for stream in self.streams]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two streams are called {repeated[0]!r}; give each a name of its own")
        return self


def read_workload(path: Path) -> Workload:
    """From a YAML file. ConfigError of one line names file, key path and fix."""
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except UnreadableYamlError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the top level must be a mapping with the key `streams`")
    return validate(Workload, data, str(path))
