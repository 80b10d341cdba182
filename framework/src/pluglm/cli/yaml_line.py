"""Any JSON-like value as YAML on one line."""

from __future__ import annotations

import json
from typing import Any

import yaml


def one_line_yaml(value: Any) -> str:
    """The value in YAML's flow style; text that YAML would break over lines is written as JSON, which is YAML too."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    text = text.removesuffix("\n").removesuffix("\n...")
    return json.dumps(value) if "\n" in text else text
