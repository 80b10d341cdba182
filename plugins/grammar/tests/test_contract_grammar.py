"""The contract kit of grammars on llguidance: a regex with and without the narrowing to usual tokens, a JSON Schema."""

from __future__ import annotations

import pytest

from pluglm.kernel.sampling_params import GrammarSpec
from pluglm.testing.check import Check, cases
from pluglm.testing.grammar import Language, grammar_checks
from pluglm_grammar.llguidance import LlguidanceConfig, LlguidanceGrammar

SCHEMA = Language(
    spec=GrammarSpec(kind="json_schema", value={"enum": ["yes then", "no", 7]}),
    matches=('"yes then"', '"no"', "7"),
    others=("yes then", '"yes"', "8", '"no'),
    bad_specs=(GrammarSpec(kind="json_schema", value={"type": "no such type"}),),
)


@pytest.mark.parametrize("check", **cases(grammar_checks(LlguidanceGrammar)))
def test_regex(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(grammar_checks(LlguidanceGrammar, LlguidanceConfig(canonical=False))))
def test_regex_in_any_spelling(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(grammar_checks(LlguidanceGrammar, language=SCHEMA)))
def test_json_schema(check: Check) -> None:
    check.run()
