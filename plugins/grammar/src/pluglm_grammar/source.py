"""Turns a GrammarSpec into the text of an llguidance grammar, one function per kind. Compiles nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from pluglm.kernel.errors import RequestError
from pluglm_grammar.messages import one_line, schema_reason
from pluglm_grammar.schema_limits import check_schema, read_schema, schema_text

if TYPE_CHECKING:
    from pluglm.kernel.sampling_params import GrammarSpec
    from pluglm_grammar.llguidance import LlguidanceConfig

_ANY_TOKENS = '%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True, slots=True)
class Source:
    """What was asked for, read and within the limits. Equal sources compile to the same grammar.

    text: the regex, or the schema as JSON.
    """

    kind: str
    text: str


def read_source(spec: GrammarSpec, config: LlguidanceConfig) -> Source:
    """Raises RequestError: unknown kind, wrong type, not JSON, too large, nested too deeply."""
    if spec.kind not in _BUILDERS:
        raise RequestError(f"grammar: unknown kind '{spec.kind}'; 'llguidance' knows {', '.join(sorted(_BUILDERS))}")
    text = spec.value
    if isinstance(text, str):
        _check_size(spec.kind, text, config)  # before anything is parsed
    if spec.kind == "json_schema":
        text = schema_text(read_schema(spec.value, config.max_nesting))
    elif not isinstance(text, str):
        raise RequestError(f"grammar {spec.kind}: expected a string, not {type(text).__name__}")
    elif any("\ud800" <= character <= "\udfff" for character in text):
        raise RequestError(f"grammar {spec.kind}: a lone surrogate is no character; no text can match it")
    _check_size(spec.kind, text, config)
    return Source(kind=spec.kind, text=text)


def build_grammar(source: Source, config: LlguidanceConfig) -> str:
    """The grammar's text in llguidance's own form. Raises RequestError for what must not reach the compiler."""
    return _BUILDERS[source.kind](source.text, config)


def refusal(source: Source, error: str) -> RequestError:
    """The error of this request for a message of the library."""
    reason = schema_reason(error, json.loads(source.text)) if source.kind == "json_schema" else one_line(error)
    return RequestError(f"grammar {source.kind}: {reason}")


def _check_size(kind: str, text: str, config: LlguidanceConfig) -> None:
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    if num_bytes > config.max_source_bytes:
        raise RequestError(
            f"grammar {kind}: {num_bytes} bytes are over the limit of {config.max_source_bytes}; "
            "raise grammar.max_source_bytes"
        )


def _json_schema(text: str, config: LlguidanceConfig) -> str:
    schema = json.loads(text)
    check_schema(schema)
    # `x-guidance` lets a schema change the compiler's options, `lenient` included: the options are ours alone.
    schema.pop("x-guidance", None)
    options = _json_options(config)
    if config.canonical:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
    rule = f"start: %json {json.dumps({**schema, 'x-guidance': options})}"
    return str(LLMatcher.grammar_from_lark(_ANY_TOKENS + rule))


def _json_options(config: LlguidanceConfig) -> dict[str, Any]:
    layout: dict[str, Any] = {"whitespace_flexible": False}
    if config.max_whitespace:
        layout = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{config.max_whitespace}}}"}
    return {**layout, "lenient": config.lenient, "coerce_one_of": False, "json_allow_general_unicode_escapes": True}


def _regex(text: str, config: LlguidanceConfig) -> str:
    grammar = str(LLMatcher.grammar_from_regex(text))
    if config.canonical:
        return grammar
    return str(LLMatcher.grammar_from_lark(_ANY_TOKENS + json.loads(grammar)["grammars"][0]["lark_grammar"]))


_BUILDERS: Mapping[str, Callable[[str, LlguidanceConfig], str]] = {"json_schema": _json_schema, "regex": _regex}
