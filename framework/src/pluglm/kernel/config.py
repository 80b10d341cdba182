"""How a config names a component."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Slot(BaseModel):
    """One filled slot: `{use: NAME, ...the component's own keys}`, or just NAME. The component validates its keys."""

    model_config = ConfigDict(frozen=True, extra="allow")

    use: str = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _name_only(cls, data: Any) -> Any:
        if not isinstance(data, str | dict | Slot):
            raise ValueError("write a component's name, or {use: NAME, ...its keys}")
        return {"use": data} if isinstance(data, str) else data

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})
