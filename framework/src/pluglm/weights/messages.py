"""How messages about weight files are worded: one line, the file first, and text from a file never raw."""

from __future__ import annotations

from pathlib import Path

from pluglm.kernel.errors import CheckpointError

_LONGEST = 100


def quoted(text: object) -> str:
    """`text` on one line, in quotes, cut to 100 characters: names out of a damaged file can hold anything."""
    shown = repr(str(text))
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."


def refusal(path: Path, what: str) -> CheckpointError:
    """The error to raise about the file or folder `path`; `what` is a clause that says what is wrong and the fix."""
    return CheckpointError(f"{' '.join(str(path).split())}: {' '.join(what.split())}")


def damaged(path: Path, what: str) -> CheckpointError:
    """As `refusal`, for a file whose bytes contradict themselves: the fix is always to fetch or convert it anew."""
    return refusal(path, f"damaged file: {what}; download or convert it again")
