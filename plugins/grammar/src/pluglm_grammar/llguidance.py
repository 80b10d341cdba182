"""The `llguidance` grammar: compiles JSON Schemas and regexes with the llguidance library and keeps the latest ones.

What a compiled grammar does with tokens is matcher.py's; what a spec may contain is source.py's.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits
from pydantic import Field

from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.grammar import Grammar
from pluglm_grammar.matcher import LlguidanceMatcher
from pluglm_grammar.messages import one_line
from pluglm_grammar.source import Source, build_grammar, read_source, refusal
from pluglm_grammar.vocabulary import build_vocabulary

if TYPE_CHECKING:
    from pluglm.kernel.interfaces.component import BuildContext
    from pluglm.kernel.interfaces.grammar import Matcher
    from pluglm.kernel.sampling_params import GrammarSpec

logger = logging.getLogger("pluglm.grammar")  # below the engine's logger, whose warnings a run shows
_MAX_ITEMS_IN_ROW = 20_000  # the library's 2,000 end a schema of about 500 optional keys in the middle of a text


class LlguidanceConfig(ComponentConfig):
    """canonical: where the text is certain, only its usual tokens are open; false opens every way to spell it.

    lenient: JSON Schema keywords that llguidance lacks are dropped with a logged warning, instead of refused.
    max_whitespace: characters of white space between two JSON tokens at most; 0 is compact JSON.
    max_source_bytes, max_nesting: limits of one request's grammar. cached_grammars: compiled grammars kept for reuse.
    """

    canonical: bool = True
    lenient: bool = False
    max_whitespace: int = Field(default=8, ge=0, le=1000)
    max_source_bytes: int = Field(default=256 * 1024, ge=1)
    max_nesting: int = Field(default=100, ge=1, le=100)
    cached_grammars: int = Field(default=64, ge=0)


class LlguidanceGrammar(Grammar):
    """Constrained decoding through llguidance.

    Kinds: `json_schema` (dict, JSON text or true) and `regex` (Rust syntax, the whole text must match).

    Object keys come in the order of the schema. A keyword that llguidance cannot follow is refused; of `format`, which
    JSON Schema leaves an annotation, the usual shape is followed (a host name or a time may still be impossible).
    """

    interface_version = 1
    Config = LlguidanceConfig

    def __init__(self, config: LlguidanceConfig, context: BuildContext) -> None:
        self._config = config
        self._vocabulary = build_vocabulary(context)
        self._limits = LLParserLimits(max_items_in_row=_MAX_ITEMS_IN_ROW, verbose_errors=False)
        self._compiled: OrderedDict[Source, Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Matcher:
        source = read_source(spec, self._config)
        with self._lock:
            compiled = self._compiled.get(source)
        if compiled is None:
            compiled = self._compile(source)
        self._keep(source, compiled)
        return LlguidanceMatcher(compiled.deep_copy(), self._vocabulary)

    def _keep(self, source: Source, compiled: Any) -> None:
        with self._lock:
            self._compiled[source] = compiled
            self._compiled.move_to_end(source)
            while len(self._compiled) > self._config.cached_grammars:
                self._compiled.popitem(last=False)

    def _compile(self, source: Source) -> Any:
        grammar = build_grammar(source, self._config)
        compiled = LLMatcher(self._vocabulary.tokenizer, grammar, log_level=0, limits=self._limits)
        if compiled.is_error():
            raise refusal(source, compiled.get_error())
        for warning in compiled.get_grammar_warnings():
            logger.warning("grammar 'llguidance' weakens a schema: %s", one_line(warning))
        self._probe(source, compiled)
        return compiled

    @staticmethod
    def _probe(source: Source, compiled: Any) -> None:
        """Ask for the first mask: an empty language and too many alternatives show there, not while compiling."""
        probe = compiled.deep_copy()
        probe.compute_bitmask()
        if probe.is_error():
            raise refusal(source, probe.get_error())
