"""Distributions of lengths and times, as a workload file writes them. Knows a numpy generator, nothing of requests."""

from __future__ import annotations

from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_TOKENS = 10_000_000  # of one length: more than any model takes, and small enough to hold
MOST_REQUESTS = 1_000_000  # of one stream
MOST = 1e12  # of any other number: seconds far beyond it would leave the clock no parts of one

Number = Annotated[float, Field(strict=True, ge=0.0, le=MOST, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0.0, le=MOST, allow_inf_nan=False)]
Name = Annotated[str, Field(max_length=1000)]  # a bound makes pydantic refuse what is no valid Unicode


class Strict(BaseModel):
    """Base of everything in a workload file: frozen, and no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Uniform(Strict):
    """All values from min to max, both included, with equal probability."""

    min: Number
    max: Number

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        return self


class Lognormal(Strict):
    """exp(N(ln median, sigma^2)), clipped to min..max. max None: not clipped above."""

    median: Positive
    sigma: Number
    min: Number = 0.0
    max: Number | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        return self


class Amount(Strict):
    """One distribution of numbers that are not negative: a plain number, or exactly one of the keys below.

    exponential is the mean; values are drawn with equal probability, so that a repeated one is more likely.
    """

    constant: Number | None = None
    uniform: Uniform | None = None
    lognormal: Lognormal | None = None
    exponential: Positive | None = None
    values: Annotated[tuple[Number, ...], Field(min_length=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain_number(cls, data: Any) -> Any:
        is_number = isinstance(data, int | float) and not isinstance(data, bool)
        return {"constant": data} if is_number else data

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        require_one(self)
        return self

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """float64 [count], independent, none above MOST."""
        return np.asarray(np.minimum(self._drawn(generator, count), MOST))

    def _drawn(self, generator: np.random.Generator, count: int) -> np.ndarray:
        if self.uniform is not None:
            return generator.uniform(self.uniform.min, self.uniform.max, count)
        if self.lognormal is not None:
            drawn = generator.lognormal(np.log(self.lognormal.median), self.lognormal.sigma, count)
            return np.asarray(np.clip(drawn, self.lognormal.min, self.lognormal.max))
        if self.exponential is not None:
            return generator.exponential(self.exponential, count)
        if self.values is not None:
            return generator.choice(np.array(self.values), count)
        return np.full(count, self.constant, dtype=np.float64)


class Lengths(Amount):
    """A distribution of token counts: whole numbers from 1 to MOST_TOKENS; what is drawn in between is rounded."""

    @model_validator(mode="after")
    def _whole_and_positive(self) -> Self:
        bounds = () if self.uniform is None else (self.uniform.min, self.uniform.max)
        for number in (*bounds, *(self.values or ()), *(() if self.constant is None else (self.constant,))):
            if number < 1 or number != int(number):
                raise ValueError(f"a length is a whole number, 1 or more, not {number:g}")
            if number > MOST_TOKENS:
                raise ValueError(f"a length is {MOST_TOKENS:,} tokens at most, not {number:g}")
        return self

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """int64 [count]."""
        drawn: np.ndarray
        if self.uniform is not None:
            drawn = generator.integers(int(self.uniform.min), int(self.uniform.max), count, endpoint=True)
        else:
            drawn = np.clip(np.rint(super().draw(generator, count)), 1, MOST_TOKENS).astype(np.int64)
        return drawn


def require_one(model: BaseModel) -> None:
    """ValueError unless exactly one field of the model is given."""
    names = list(type(model).model_fields)
    given = [name for name in names if getattr(model, name) is not None]
    if len(given) != 1:
        raise ValueError(f"give exactly one of {', '.join(names)}, not {' and '.join(given) or 'none'}")
