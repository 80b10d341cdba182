"""How messages about tokenizers quote another library's error. Knows no tokenizer."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """The error's own words on one line, or its type when it has none; for messages that say what failed themselves."""
    return " ".join(str(error).split()) or type(error).__name__
