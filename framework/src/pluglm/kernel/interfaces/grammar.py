"""The contract of constrained decoding: compile a specification once, then follow one sequence with a matcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, ConfigDict, model_validator

from pluglm.kernel.interfaces.component import Component

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

GRAMMAR_VERSION = 1


class GrammarSpec(BaseModel):
    """What the output must match. `kind` is a name that the configured grammar component knows."""

    model_config = ConfigDict(frozen=True, extra="forbid", revalidate_instances="always")  # a copy may hold anything

    kind: str
    value: Any

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        """Accept {json_schema: {...}} and {regex: "..."} beside {kind: ..., value: ...}."""
        if isinstance(data, dict) and len(data) == 1 and "kind" not in data:
            ((kind, value),) = data.items()
            return {"kind": kind, "value": value}
        return data


class Matcher(Protocol):
    """The state of one sequence. EOS is a token like any other: accepting it terminates, undoing that un-terminates."""

    @property
    def terminated(self) -> bool: ...

    def fill_mask(self, mask_W: npt.NDArray[np.int32]) -> None:
        """Set bit t % 32 of word t // 32 for every token id that may come next, clear the others.

        int32 [ceil(V / 32)], V as in the logits; unknown ids stay clear. Nothing changes in the matcher, and a
        terminated one allows nothing.
        """
        ...

    def accept(self, token_id: int) -> bool:
        """Advance. False, and unchanged, when the token is not allowed here."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last num_tokens accepted tokens. ValueError when fewer were accepted."""
        ...

    def forced(self) -> list[int]:
        """Token ids that are certain to come next, possibly none. The matcher does not change."""
        ...


class Grammar(Component, Protocol):
    """Knows one or more kinds of specification; every matcher that it makes is one sequence's own."""

    def compile(self, spec: GrammarSpec) -> Matcher:
        """A fresh matcher; equal specs share no state. Raises RequestError naming what is wrong in the spec."""
        ...
