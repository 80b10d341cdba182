"""Every public report that scheduler and KV memory were designed against has a test that names it, or a reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPORTS = (
    ("vllm #39734",),
    ("vllm PR #52530",),
    ("vllm #45388", "vllm #45387"),
    ("vllm #45414",),
    ("vllm #25538", "vllm PR #21793"),
    ("vllm #54644", "vllm #41951"),
    ("vllm #23347",),
    ("vllm #40004",),
    ("sglang PR #34623", "sglang #8764", "vllm #10774", "vllm #57413"),
    ("vllm #31731",),
    ("vllm #30320", "vllm #53706", "vllm PR #11186"),
    ("lablup/mlxcel #1760",),
    ("vllm #44701",),
    ("vllm #30931",),
    ("vllm #20261", "LMCache #4086"),
    ("vllm #3251", "vllm #3914", "vllm #8268"),
    ("vllm #37076", "vllm #39146", "vllm #38606"),
    ("vllm #42571",),
    ("vllm PR #44237", "kvcached #362"),
    ("kekzl/imp #1115",),
    ("vllm #46283", "vllm-ascend #16662"),
    ("sglang #40360",),
    ("vllm-ascend #16315", "vllm PR #49675"),
    ("vllm PR #48245", "vllm #26385", "vllm #28787", "vllm #38624"),
    ("vllm #16832",),
    ("vllm PR #14512", "vllm #43509"),
    ("nano-vllm #274", "nano-vllm PR #211", "nano-vllm #233"),
    ("sglang #26265", "sglang PR #19881", "sglang #30743", "sglang #34676"),
    ("sglang #36855",),
    ("vllm PR #31857",),
    ("vllm #54947", "llama.cpp #24496", "litellm #37140", "ATOM PR #1441"),
)
WITHOUT_COUNTERPART = {
    ("vllm #20261", "LMCache #4086"): "prompts hold text alone, so no image can be missing from a key"
}


def test_every_report_is_named_by_a_test_or_has_no_counterpart() -> None:
    named = set()
    for file in Path(__file__).parent.glob("test_rows_*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                named |= set(re.findall(r"[\w./-]+ (?:PR )?#\d+", ast.get_docstring(node) or ""))
    missing = [row for row in REPORTS if not named.issuperset(row)]
    assert missing == list(WITHOUT_COUNTERPART)
    assert named <= {report for row in REPORTS for report in row}
