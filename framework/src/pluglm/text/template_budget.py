"""A sandbox for templates that also bounds how long they run and how much they write. Knows no messages.

jinja2's own bounds what a template reaches. Here every turn of a loop and every call takes one step of a budget, a
product or power of unreasonable size is refused, and so is a text that grows past a limit while it is written. No
clock is read, so what is refused does not depend on the machine. One filter call can still build a large text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_STEPS = 1_000_000  # a long chat takes some thousands
MOST_CHARACTERS = 16_000_000
_MOST_BITS = 10_000  # of a power of integers
_steps_left: ContextVar[int] = ContextVar("steps that the template being rendered may still take", default=MOST_STEPS)


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """The immutable sandbox with a budget. Its templates are rendered with `render_within_budget`."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        del self.globals["lipsum"]  # random text of any length

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            counter = nodes.EnvironmentAttribute("counted", lineno=loop.lineno)
            loop.iter = nodes.Call(counter, [loop.iter], [], None, None, lineno=loop.lineno)
        tree.set_environment(self)
        return tree

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """The values of a loop, each of which takes a step."""
        for value in values:
            _step()
            yield value

    def call(self, context: Context, function: Any, /, *arguments: Any, **options: Any) -> Any:
        _step()
        return super().call(context, function, *arguments, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_power(left, right)
        return super().call_binop(context, operator, left, right)


def render_within_budget(template: Template, variables: Mapping[str, Any]) -> str:
    """The template's text. Raises SecurityError when it takes too many steps or writes too much."""
    token = _steps_left.set(MOST_STEPS)
    parts: list[str] = []
    length = 0
    try:
        for part in template.generate(**variables):
            length += len(part)
            if length > MOST_CHARACTERS:
                raise SecurityError(f"it writes more than {MOST_CHARACTERS} characters")
            parts.append(part)
    finally:
        _steps_left.reset(token)
    return "".join(parts)


def _step() -> None:
    left = _steps_left.get() - 1
    if left < 0:
        raise SecurityError(f"it takes more than {MOST_STEPS} loop turns and calls")
    _steps_left.set(left)


def _check_product(left: Any, right: Any) -> None:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(times, int) and len(many) * times > MOST_CHARACTERS:
            raise SecurityError(f"a product of {len(many)} and {times} is too long")


def _check_power(left: int, right: int) -> None:
    if right > 0 and left.bit_length() * right > _MOST_BITS:
        raise SecurityError(f"the power {right} is too large")
