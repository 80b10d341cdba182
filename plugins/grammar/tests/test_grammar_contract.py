"""The grammar against the contract kit, with and without the narrowing to usual tokens."""

from __future__ import annotations

import pytest

from pluglm.testing.check import Check, cases
from pluglm.testing.grammar import grammar_checks
from pluglm_grammar.llguidance import LlguidanceConfig, LlguidanceGrammar


@pytest.mark.parametrize("check", **cases(grammar_checks(LlguidanceGrammar)))
def test_llguidance(check: Check) -> None:
    check.run()


@pytest.mark.parametrize("check", **cases(grammar_checks(LlguidanceGrammar, LlguidanceConfig(canonical=False))))
def test_llguidance_any_spelling(check: Check) -> None:
    check.run()
