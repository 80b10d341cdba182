"""The tiers of a run without any: nothing is kept, nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from pluglm.kernel.engine import EngineCore


class NoTiers:
    """Does nothing at every call; see Tiers in the kernel's parts."""

    @property
    def counts(self) -> Mapping[str, object]:
        return {}

    def before_plan(self, engine: EngineCore) -> None: ...

    def after_commit(self, engine: EngineCore) -> None: ...

    def after_step(self, engine: EngineCore, num_tokens: list[int]) -> None: ...

    def reset(self, engine: EngineCore) -> None: ...

    def close(self, engine: EngineCore) -> None: ...
