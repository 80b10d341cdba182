"""When requests arrive: the arrival processes of a workload file. Knows no request."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from pluglm.lab.amounts import Number, Positive, Strict, require_one


class Poisson(Strict):
    """rate: arrivals per second; the gaps between them are exponential and independent."""

    rate: Positive


class Bursts(Strict):
    """A Poisson process of `rate` arrivals per second that runs for on_s seconds, rests for off_s, and so on."""

    rate: Positive
    on_s: Positive
    off_s: Positive


class Arrivals(Strict):
    """Exactly one of the keys. times: seconds after the begin, one for each arrival."""

    at_once: Literal[True] | None = None
    poisson: Poisson | None = None
    bursts: Bursts | None = None
    times: Annotated[tuple[Number, ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        require_one(self)
        return self

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """float64 [count] seconds after the begin, ascending. `times` ignores count: it holds them all.

        Very small rates and bursts give infinite times, or NaN.
        """
        if self.times is not None:
            return np.sort(np.array(self.times, dtype=np.float64))
        if self.poisson is not None:
            return _poisson(generator, self.poisson.rate, count)
        if self.bursts is not None:
            running_s = _poisson(generator, self.bursts.rate, count)  # on a clock that stands still between bursts
            with np.errstate(all="ignore"):
                return running_s + running_s // self.bursts.on_s * self.bursts.off_s
        return np.zeros(count)


def _poisson(generator: np.random.Generator, rate: float, count: int) -> np.ndarray:
    return np.cumsum(generator.exponential(1 / rate, count))
