"""Rule 8 for branches of drafts: a wrong one, or what breaks while one is verified, fails its own request alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, require_idle
from fault_cases import BAD, BASES, HEADER, NAMED

from pluglm import SamplingParams


@pytest.mark.parametrize(
    ("branches", "says"),
    [
        ("5", "proposed branches that are not a list of lists of token ids"),
        ("None", "proposed branches that are not a list of lists of token ids"),
        ("([1], [2])", "proposed branches that are not a list of lists of token ids"),
        ("[[2], 3]", "proposed branches that are not a list of lists of token ids"),
        ("torch.ones(2, 2)", "proposed branches that are not a list of lists of token ids"),
        ("[[2], [10**6]]", "proposed token id 1000000, outside 0..319"),
        ("[[-1]]", "proposed token id -1, outside 0..319"),
        ("[[True]]", "proposed token id True, outside 0..319"),
        ("[[1.5]]", "proposed token id 1.5, outside 0..319"),
        ("[[1] * (request.max_tokens + 1)]", "where"),
        ("[[2]] * 33", "proposed 33 branches where 32 are allowed"),
        ("[[2]], row", "gave rows and branches"),
    ],
)
def test_branches_that_cannot_be_verified(case: Any, branches: str, says: str) -> None:
    given = "row, [[2]]" if "row" in branches else f"None, {branches}"
    row = "row = torch.full((1, 320), 1 / 320)"
    made = case("drafter", f"def proposal(self, request):\n    {row}\n    return Proposal([1], {given})")
    made.check(says, f"drafter {NAMED}", mates_live=True)


@pytest.mark.parametrize(
    "branches",
    ["[[1], [1], []]", "[[2], [2], [2, 3], [2]]", "[[1, 1], [1, 1, 1]]", "[[n % 300] for n in range(32)]", "[[]] * 32"],
)
def test_branches_that_are_of_no_use_do_no_harm(case: Any, branches: str) -> None:
    within = f"[one[: request.max_tokens] for one in {branches}]"
    made = case("drafter", f"def proposal(self, request): return Proposal([1], branches={within})")
    made.require_good(made.run(("bad", [BAD, 2], GREEDY), ("good", [1, 2], GREEDY))["bad"], [BAD, 2])
    require_idle(made.engine)


def test_a_drafter_that_keeps_its_branches_cannot_change_them_later(case: Any) -> None:
    body = """
    kept = []
    def propose(self, requests):
        for one in self.kept: one.clear()
        self.kept = [[2, 3][: one.max_tokens] for one in requests]
        return [Proposal([1], branches=[kept]) for kept in self.kept]
    def observe(self, *args):
        for one in self.kept: one.extend([10**6] * 400)
    """
    made = case("drafter", body)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)


ALWAYS = """
    def propose(self, requests): return [self.proposal(one) for one in requests]
    def proposal(self, request): return Proposal([1], branches=[[number] for number in range(320)][9:40])
"""


def drafting(folder: Path, body: str = ALWAYS) -> str:
    (folder / "drafts.py").write_text(HEADER + BASES["drafter"] + body)
    return "drafts:Faulty"


@pytest.mark.parametrize("method", ["fork", "trim", "commit"])
def test_kv_that_breaks_while_branches_are_forked(case: Any, folder: Path, method: str) -> None:
    """Blocks of branches that a failed step left are given back as well."""
    made = case("kv", f"def {method}(self, *args): raise ValueError('torn page')", drafter=drafting(folder))
    inner: Any = made.core.parts.runner.kv._target
    made.core.add("bad", [1, 2, 1, 2, 1, 2], GREEDY)
    made.core.step()
    inner.armed = True
    ends = [event for _ in range(3) for event in made.core.step() if event.finish_reason]
    made.require_bad(([], ends[0]), f"kv {NAMED}", "torn page")
    inner.armed = False
    made.core.step()
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)


ORACLE = """
    def propose(self, requests): return [self.proposal(one) for one in requests]
    def proposal(self, request):
        from pluglm.backends.fake_model import hashed_logits, prefix_digest
        known = list(request.token_ids)
        for _ in range(min(3, request.max_tokens)):
            pairs = torch.stack((torch.tensor(known), torch.arange(len(known))), dim=1)
            known.append(int(hashed_logits(prefix_digest(pairs), 320).argmax()))
        right = known[len(request.token_ids):]
        return Proposal([(right[0] + 1) % 320], branches=[[(right[0] + 2) % 320], right])
"""


def test_kv_that_breaks_while_a_branch_is_taken_over(case: Any, folder: Path) -> None:
    method = "def release(self, *args): raise OSError('torn page')"
    made = case("kv", method, drafter=drafting(folder, ORACLE))
    inner: Any = made.core.parts.runner.kv._target
    made.core.add("bad", [1, 2, 3], GREEDY)
    made.core.step()
    inner.armed = True
    ends = [event for _ in range(3) for event in made.core.step() if event.finish_reason]
    made.require_bad(([], ends[0]), f"kv {NAMED}", "torn page")
    inner.armed = False
    made.core.step()
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)


@pytest.mark.parametrize("act", ["raise RuntimeError('no device')", "time.sleep(1.0)"], ids=["raises", "hangs"])
def test_a_backend_that_fails_with_branches_in_the_step(case: Any, folder: Path, act: str) -> None:
    body = f"def spoil(self, logits, bad):\n    if len(logits) > 8: {act}\n    return logits"
    made = case("backend", body, timeout_s=0.3, drafter=drafting(folder))
    bad, good = [BAD, *range(40, 60)], list(range(1, 20))  # whole blocks: who is bad is read before blocks are copied
    made.require_bad(made.run(("bad", bad, GREEDY))["bad"], "plugin:Faulty")
    while not made.core.parts.guard.settled:
        made.core.parts.guard.wait_settled(1.0)
    made.core.step()
    made.require_good(made.run(("good", good, GREEDY))["good"], good)
    require_idle(made.engine)


def test_rows_of_a_branch_that_no_run_comes_to_may_be_broken(case: Any, folder: Path) -> None:
    """Two rows of a step are the text's, and all others are of branches."""
    body = """
    def spoil(self, logits, bad):
        logits[2:] = float('nan')
        return logits
    """
    made = case("backend", body, drafter=drafting(folder, ALWAYS.replace("[9:40]", "[2:5]")))
    result = made.run(("bad", [BAD, 2], GREEDY))["bad"]
    made.require_good(result, [BAD, 2])
    assert made.core._planning.num_forked > 0
    require_idle(made.engine)


def test_a_broken_row_of_the_branch_that_was_right_fails_the_request(case: Any, folder: Path) -> None:
    body = """
    def spoil(self, logits, bad):
        logits[2:] = float('nan')
        return logits
    """
    made = case("backend", body, drafter=drafting(folder, ORACLE))
    made.require_bad(made.run(("bad", [BAD, 2], GREEDY))["bad"], "gave NaN or infinite logits")
    require_idle(made.engine)


@pytest.mark.parametrize("slot", ["sampler", "grammar"])
def test_who_fails_while_a_branch_is_drawn(case: Any, folder: Path, slot: str) -> None:
    """The branch that is right has three drafts, one of which the run gets to it by; three rows are drawn from it."""
    bodies = {
        "sampler": "def spoil(self, drawn, at):\n    if len(drawn) == 3: raise ValueError('no dice')\n    return drawn",
        "grammar": "def accept(self, token_id):\n    if self.bad and token_id > 2: raise ValueError('no dice')\n"
        "    return True",
    }
    made = case(slot, bodies[slot], drafter=drafting(folder, ORACLE))
    fields = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    bad = {**fields, "grammar": {"kind": "any", "value": "bad"}} if slot == "grammar" else fields
    made.require_bad(made.run(("bad", [BAD, 2], SamplingParams.model_validate(bad)))["bad"], "no dice", slot)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)
