"""What `pluglm run` shows of drafts, compared with a case counted by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

CONSTANT = """
from pluglm.kernel.interfaces.component import ComponentConfig
from pluglm.kernel.interfaces.drafter import Drafter, Proposal


class Constant(Drafter):
    '''Proposes the same two tokens, whatever the text.'''

    Config = ComponentConfig
    interface_version = 2

    def __init__(self, config, context):
        pass

    def propose(self, requests):
        return [Proposal([7, 8][: one.max_tokens]) for one in requests]

    def observe(self, sequence_id, num_accepted, token_ids):
        pass

    def release(self, sequence_id):
        pass
"""
PROMPT = ("--prompt", "Why is the sky blue?", "--raw")
ALLOWED = ("--set", "sampling.allowed_token_ids=[7]", "--set", "sampling.ignore_eos=true")


def write_drafter(folder: Path) -> tuple[str, str]:
    (folder / "constant.py").write_text(CONSTANT)
    return "--set", "drafter.use=constant:Constant"


def rows_of(tables: str) -> list[list[str]]:
    return [re.split(" {2,}", line) for line in tables.splitlines()]


def test_tokens_per_step_and_acceptance_by_position(pluglm, fake_config: Path, tmp_path: Path):
    """Only token 7 may come, six times: 7 | 7 7 | 7 7 | 7. The first draft is kept both times, the 8 is not."""
    outcome = pluglm("run", fake_config, *PROMPT, *ALLOWED, *write_drafter(tmp_path))
    rows = rows_of(outcome.err)
    assert ["drafts accepted", "2 of 4 (50%)"] in rows
    assert ["tokens per step", "1.50, 0.50 of them drafts"] in rows
    assert rows[-2:] == [["1", "2 of 2 (100%)"], ["2", "0 of 2 (0%)"]]


def test_json_has_counts_and_rates(pluglm, fake_config: Path, tmp_path: Path):
    outcome = pluglm("run", fake_config, *PROMPT, *ALLOWED, *write_drafter(tmp_path), "--json")
    assert json.loads(outcome.out)["metrics"]["speculation"] == {
        "num_windows": 4,
        "num_tokens": 6,
        "tokens_per_step": 1.5,
        "accepted_per_step": 0.5,
        "drafted_by_position": [2, 2],
        "accepted_by_position": [2, 0],
        "acceptance_by_position": [1.0, 0.0],
    }


def test_a_table_of_all_requests(pluglm, fake_config: Path, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_token_ids": [number] * 4}) + "\n" for number in (5, 6, 9)))
    outcome = pluglm("run", fake_config, "--prompts-file", file, *ALLOWED, *write_drafter(tmp_path))
    assert ["drafts accepted", "6 of 12 (50%)"] in rows_of(outcome.err)
    assert rows_of(outcome.err)[-2:] == [["1", "6 of 6 (100%)"], ["2", "0 of 6 (0%)"]]


def test_without_a_drafter_nothing_is_said_of_drafts(pluglm, fake_config: Path):
    outcome = pluglm("run", fake_config, *PROMPT)
    assert "draft" not in outcome.err.replace("drafter", "")
    assert "tokens per step" not in outcome.err
