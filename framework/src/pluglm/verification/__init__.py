"""Rules that turn a target's rows and a drafter's proposals into a run of tokens that follows the target's own law.

Pure functions over batches: no plugin, no model, no generator of random numbers. The plain forms are in `reference`.
"""

from __future__ import annotations

from pluglm.verification.block import block
from pluglm.verification.reproducible import reproducible
from pluglm.verification.siblings import TreeVerdict, siblings
from pluglm.verification.token_wise import token
from pluglm.verification.windows import Verdict, Windows

__all__ = ["TreeVerdict", "Verdict", "Windows", "block", "reproducible", "siblings", "token"]
