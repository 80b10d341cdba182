"""Prints the size of the kernel's mechanism against its budget, in lines of code; exits 1 when over.

A line of code has a token other than a comment or a docstring. The contracts in kernel/interfaces/ are declarations,
which grow with the seams, and are counted beside it.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

BUDGET = 2000
KERNEL = Path(__file__).parents[1] / "framework/src/pluglm/kernel"
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def kernel_lines(folder: Path) -> int:
    return sum(len(code_lines(file.read_text(encoding="utf-8"))) for file in folder.glob("*.py"))


if __name__ == "__main__":
    count = kernel_lines(KERNEL)
    print(f"kernel: {count} lines of {BUDGET}, and {kernel_lines(KERNEL / 'interfaces')} of contracts")
    sys.exit(count > BUDGET)
