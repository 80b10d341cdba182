"""The contract kits: one module per interface, each with a generator of checks. Usable with and without pytest.

report = run_checks(kit("sampler")(MySampler))                     # anywhere; print(report) is a table
@pytest.mark.parametrize("check", **cases(kit("sampler")(MySampler)))  # one test a check: `check.run()`
"""

from __future__ import annotations

from pluglm.testing.check import Check, ContractViolation, Report, cases, run_checks
from pluglm.testing.kits import kit

__all__ = ["Check", "ContractViolation", "Report", "cases", "kit", "run_checks"]
