"""For every test of the workspace: property tests run the same examples each time, so that CI fails for a change only.

`pytest --hypothesis-profile=explore` draws new ones.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")
