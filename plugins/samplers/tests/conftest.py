"""Lets the tests of this folder import its two helper modules, whose names are unique in the repository."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
