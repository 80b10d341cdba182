"""Renders chat messages to a prompt with the model's Jinja template, in a sandbox. Knows no token ids.

Templates come with checkpoints and are untrusted code: see pluglm.text.template_budget for what bounds them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from pluglm.kernel.errors import RequestError, TokenizerError
from pluglm.text.messages import one_line
from pluglm.text.template_budget import BudgetedEnvironment, render_within_budget
from pluglm.text.tokenizer import Tokenizer

MAX_DEPTH = 100


class ChatTemplate:
    """One compiled template. Raises TokenizerError when its syntax is wrong; `source` names it in messages."""

    def __init__(self, template: str, *, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(template)
        except (TemplateError, RecursionError) as error:
            raise self._failure("does not compile", error) from error

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The tokenizer's own template. Raises TokenizerError when it has none."""
        if tokenizer.chat_template is None:
            raise TokenizerError(
                f"{tokenizer.source}: has no chat template; send a plain prompt, or add chat_template.jinja beside it"
            )
        return cls(tokenizer.chat_template, source=tokenizer.source, special_tokens=tokenizer.special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool, **variables: Any) -> str:
        """The prompt's text; the same as transformers' apply_chat_template gives with tokenize=False.

        messages: each with `role` and `content` strings; content may be left out beside `tool_calls`. Further keys
            and `variables` (tools, enable_thinking ...) reach the template as plain JSON values.
        Raises RequestError for wrong messages or variables, TokenizerError when the template fails or refuses them.
        """
        if "messages" in variables:
            raise RequestError("template variable 'messages' is the list of messages itself; choose another name")
        context: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        context.update({name: _plain(value, f"template variable {name!r}") for name, value in variables.items()})
        checked = checked_messages(messages)
        try:
            context.update(messages=checked, add_generation_prompt=add_generation_prompt)
            return render_within_budget(self._template, context)
        except Exception as error:  # a template can raise anything that an expression in it can
            raise self._failure("failed on these messages", error) from error

    def _failure(self, what: str, error: BaseException) -> TokenizerError:
        line = getattr(error, "lineno", None)
        place = f" at line {line}" if line is not None else ""
        return TokenizerError(f"{self._source}: the chat template {what}{place}: {one_line(error)}")


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool, **variables: Any
) -> str:
    """The tokenizer's chat template over `messages`; see ChatTemplate.render. Compiles the template on every call.

    The text already holds the control tokens: encode it with add_special_tokens=False.
    """
    return ChatTemplate.of(tokenizer).render(messages, add_generation_prompt=add_generation_prompt, **variables)


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages rebuilt from plain JSON values, without None entries. Raises RequestError naming the message."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list of at least one message with 'role' and 'content'")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is a {type(message).__name__}; it must be an object with 'role' and 'content'")
    checked = {str(key): _plain(value, f"{where}.{key}") for key, value in message.items() if value is not None}
    if not isinstance(checked.get("role"), str) or not checked["role"]:
        raise RequestError(f"{where}.role is {message.get('role')!r}; it must be a string such as 'user'")
    missing_allowed = "content" not in checked and checked.get("tool_calls")
    if not missing_allowed and "content" not in message:
        raise RequestError(f"{where} has no 'content'; it has {', '.join(map(str, message))}")
    if not missing_allowed and not isinstance(checked.get("content"), str):
        raise RequestError(f"{where}.content is a {type(message.get('content')).__name__}; it must be a string")
    return checked


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """The value rebuilt from exact JSON types, so that a template meets no method of a caller's object."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if depth == MAX_DEPTH:
        raise RequestError(f"{where[:80]}... is nested deeper than {MAX_DEPTH} levels; flatten it")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise RequestError(f"{where} is a {type(value).__name__}; only JSON values can reach a chat template")


def _environment() -> BudgetedEnvironment:
    environment = BudgetedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = GuardedNamespace
    return environment


class GenerationBlock(Extension):
    """`{% generation %}`, which templates put around the assistant's text for training, renders its body alone."""

    tags = {"generation"}  # noqa: RUF012 - the name and form that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class GuardedNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, which could reach Python's internals."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, *given = args
        merged = dict(*given, **attributes)
        for name in merged:
            _check_attribute(name)
        Namespace.__init__(self, merged)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not hold the name {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
