"""The trace tests' modules import one another by name, as they do when run as scripts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
