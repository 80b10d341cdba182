"""Rule 8 for drafters, samplers and grammars: one that misbehaves fails only what it touched."""

from __future__ import annotations

import time
from typing import Any

import pytest
from engine_cases import GREEDY, ids, require_idle
from fault_cases import BAD, NAMED

from pluglm import Engine, PluglmError, SamplingParams
from pluglm.kernel.errors import ComponentFailure, RequestError


@pytest.mark.parametrize(
    ("body", "says", "mates_live"),
    [
        ("def one(self, request): raise ValueError('bad\\ndraft')", "raised ValueError: bad draft", None),
        ("def one(self, request): raise RequestError('not mine')", "raised not mine", None),
        ("def one(self, request): raise KVExhausted('no room')", "raised no room", None),
        ("def one(self, request): raise ComponentFailure('my part', 'two\\nlines')", "two lines", None),
        ("def one(self, request): raise SystemExit(3)", "raised SystemExit: 3", None),
        ("def one(self, request): return (1, 2)", "proposed tuple", True),
        ("def one(self, request): return None", "proposed NoneType", True),
        ("def one(self, request): return [1] * (request.max_tokens + 1)", "where", True),
        ("def one(self, request): return [10**6]", "token id 1000000, outside 0..", True),
        ("def one(self, request): return [-1]", "token id -1", True),
        ("def one(self, request): return [1.5]", "token id 1.5", True),
        ("def one(self, request): return ['1']", "token id '1'", True),
        ("def propose(self, requests): return []", "one Proposal for each of", None),
        ("def propose(self, requests): return None", "one Proposal for each of", None),
    ],
)
def test_drafter_proposals(case: Any, body: str, says: str, mates_live: bool | None) -> None:
    """One wrong draft fails its own request; a call that fails as a whole fails all that it was asked about."""
    made = case("drafter", body)
    if "def propose" in body:
        made.require_bad(made.run(("bad", [BAD], GREEDY))["bad"], f"drafter {NAMED}", says)
        require_idle(made.engine)
    else:
        made.check(says, "my part" if "my part" in body else f"drafter {NAMED}", mates_live=mates_live)


ROW = "row = torch.full((1, 320), 1 / 320); "


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (ROW + "row[0, 5] = torch.nan", "gave rows that are not probabilities of sum 1"),
        (ROW + "row[0, 5] = torch.inf", "gave rows that are not probabilities of sum 1"),
        (ROW + "row[0, 5], row[0, 6] = -1 / 320, 3 / 320", "gave rows that are not probabilities of sum 1"),
        (ROW + "row *= 1.0001", "gave rows that are not probabilities of sum 1"),
        (ROW + "row[0, 1], row[0, 2] = 0, 2 / 320", "proposed a token to which its own row gives no probability"),
        (ROW + "row = row.repeat(2, 1)", "gave rows of (2, 320) torch.float32 on cpu, expected (1, 320)"),
        (ROW + "row = row[:, :262] * 320 / 262", "gave rows of (1, 262) torch.float32 on cpu, expected (1, 320)"),
        (ROW + "row = row[0]", "gave rows of (320,) torch.float32 on cpu, expected (1, 320)"),
        (ROW + "row = row.double()", "gave rows of (1, 320) torch.float64 on cpu, expected (1, 320) torch.float32"),
        (ROW + "row = row.to('meta')", "gave rows of (1, 320) torch.float32 on meta, expected"),
        (ROW + "row = row.tolist()", "gave rows that are list, not a tensor"),
        (ROW + "row = row.to_sparse()", "gave rows of a tensor of layout torch.sparse_coo, expected a dense one"),
    ],
)
def test_drafter_rows(case: Any, body: str, says: str) -> None:
    """Whatever the rule is: rows that cannot be what drafts were drawn from fail their own request."""
    made = case("drafter", f"def proposal(self, request):\n    {body}\n    return Proposal([1], row)")
    made.check(says, f"drafter {NAMED}", mates_live=True)


def test_a_truth_value_is_no_token_id(case: Any) -> None:
    made = case("drafter", f"def proposal(self, request):\n    {ROW}\n    return Proposal([True], row)")
    made.check("proposed token id True", f"drafter {NAMED}", mates_live=True)


def test_sound_rows_fail_nobody(case: Any) -> None:
    made = case("drafter", f"def proposal(self, request):\n    {ROW}\n    return Proposal([1], row)")
    made.require_good(made.run(("bad", [BAD], GREEDY))["bad"], [BAD])
    require_idle(made.engine)


PROCESSED = GREEDY.model_copy(update={"logprobs": 1, "logprobs_mode": "processed"})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return probs * torch.nan", "gave final rows that are not probabilities of sum 1"),
        ("return probs * 1.0001", "gave final rows that are not probabilities of sum 1"),
        ("return -probs", "gave final rows that are not probabilities of sum 1"),
        ("return probs[:, :-1]", "gave final rows of (1, 319) torch.float32 on cpu, expected (1, 320)"),
        ("return probs.double()", "torch.float64 on cpu, expected (1, 320) torch.float32"),
        ("return probs.tolist()", "gave final rows that are list, not a tensor"),
        ("return None", "gave final rows that are NoneType, not a tensor"),
        ("raise ValueError('no rows')", "raised ValueError: no rows"),
        ("return probs * 0", "drew a token to which its final row gives no probability"),
        ("return probs.roll(1, 1)", "drew a token to which its final row gives no probability"),
    ],
)
def test_sampler_final_rows(case: Any, body: str, says: str) -> None:
    made = case(
        "sampler", f"def final_rows(self, logits, rows):\n    probs = super().final_rows(logits, rows)\n    {body}"
    )
    made.require_bad(made.run(("bad", [BAD], PROCESSED))["bad"], f"sampler {NAMED}", says)
    require_idle(made.engine)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])


def test_sampler_that_gives_a_masked_token_a_probability(case: Any) -> None:
    made = case(
        "sampler", "def final_rows(self, logits, rows): return torch.full_like(logits, 1 / 320)", grammar="llguidance"
    )
    params = PROCESSED.model_copy(update={"grammar": SamplingParams(grammar={"regex": "[a-z]+"}).grammar})
    made.require_bad(made.run(("bad", [BAD], params))["bad"], f"sampler {NAMED}", "gave a masked token a probability")
    require_idle(made.engine)


def test_drafter_that_keeps_its_list_cannot_change_a_draft_later(case: Any) -> None:
    body = """
    kept = []
    def propose(self, requests):
        for one in self.kept: one.clear()
        return [Proposal(self.kept.append([1]) or self.kept[-1]) for _ in requests]
    def observe(self, *args):
        for one in self.kept: one.extend([5] * 400)
    """
    made = case("drafter", body)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)


@pytest.mark.parametrize("act", ["raise ValueError('lost')", "time.sleep(1.2)"], ids=["raises", "hangs"])
def test_drafter_observe(case: Any, act: str) -> None:
    made = case("drafter", f"def observe(self, i, n, t):\n    if i in self.bad: {act}", timeout_s=0.3)
    results = made.run(("bad", [BAD], GREEDY))
    made.require_bad(results["bad"], f"drafter {NAMED}", "lost" if "lost" in act else "gave no answer within 0.3 s")
    assert results["bad"][0]
    wait_for_idle(made.engine)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])


def test_drafter_release_that_raises_costs_nobody_anything(case: Any) -> None:
    made = case("drafter", "def release(self, sequence_id): raise ValueError('lost')")
    results = made.run(("bad", [BAD], GREEDY), ("good", [1, 2], GREEDY))
    made.require_good(results["good"], [1, 2])
    made.require_good(results["bad"], [BAD])
    require_idle(made.engine)


def wait_for_idle(engine: Engine) -> None:
    """Steps until the abandoned call has come back and the KV that it could write to is free."""
    for _ in range(300):
        if not engine._core.memory.held_back:
            break
        time.sleep(0.02)
        engine._core.step()
    require_idle(engine)


@pytest.mark.parametrize(
    ("slot", "body"),
    [
        ("drafter", "def one(self, request): time.sleep(1.0); return [1]"),
        ("sampler", "def spoil(self, drawn, at): time.sleep(1.0); return drawn"),
        ("scheduler", "def spoil(self, view, plan, kv, bad): time.sleep(1.0); return plan"),
        ("backend", "def spoil(self, logits, bad): time.sleep(1.0); return logits"),
    ],
    ids=lambda value: value if " " not in value else "",
)
def test_a_hang_is_named_and_its_kv_is_kept_out_of_use_until_it_ends(case: Any, slot: str, body: str) -> None:
    """The scheduler hangs with its KV transaction open and uses it when it wakes: it must find it closed."""
    made = case(slot, body, timeout_s=0.3, kv={"use": "paged", "block_size": 2, "num_blocks": 64})
    results = made.run(("bad", [BAD, 2, 3], GREEDY))
    made.require_bad(results["bad"], f"{slot} {NAMED}", "gave no answer within 0.3 s")
    core = made.core
    assert not core.parts.guard.settled
    assert core.kv.capacity().held_blocks == (0 if slot == "scheduler" else 2)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    wait_for_idle(made.engine)
    assert core.parts.guard.settled
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])


@pytest.mark.parametrize(("hang_s", "comes_back"), [(0.9, True), (3.0, False)])
def test_a_request_waits_for_kv_that_an_abandoned_call_holds(case: Any, hang_s: float, comes_back: bool) -> None:
    """The pool is too small for both. It is given as long as the hanging call was, and then the reason is told."""
    body = f"def spoil(self, logits, bad): time.sleep({hang_s}); return logits"
    pool = {"use": "paged", "block_size": 4, "num_blocks": 4}
    made = case("backend", body, timeout_s=0.6 if comes_back else 0.3, kv=pool)
    made.require_bad(made.run(("bad", [BAD, 2, 3, 4, 5], GREEDY))["bad"], "gave no answer")
    result = made.run(("good", [1, 2, 3, 4, 5], GREEDY))["good"]
    if comes_back:
        made.require_good(result, [1, 2, 3, 4, 5])
    else:
        made.require_bad(result, "planned nothing in 100 steps while an abandoned call holds KV")
    wait_for_idle(made.engine)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def spoil(self, drawn, at): raise ValueError('bad row')", "raised ValueError: bad row"),
        ("def spoil(self, drawn, at): raise RequestError('bad params')", "raised bad params"),
        ("def spoil(self, drawn, at): return drawn[:-1]", "tokens for"),
        ("def spoil(self, drawn, at): return [*drawn, 1]", "tokens for"),
        ("def spoil(self, drawn, at): return None", "NoneType"),
        ("def spoil(self, drawn, at): return [10**6 for _ in drawn]", "token id 1000000, outside 0..319"),
        ("def spoil(self, drawn, at): return [-2 for _ in drawn]", "token id -2, outside"),
        ("def spoil(self, drawn, at): return [-1 for _ in drawn]", "no token is left to draw"),
        ("def spoil(self, drawn, at): return [2.5 for _ in drawn]", "TypeError"),
        ("def spoil(self, drawn, at): return ['a' for _ in drawn]", "TypeError"),
    ],
)
def test_sampler(case: Any, body: str, says: str) -> None:
    """One call draws for all rows, so what it breaks is everyone in that step."""
    case("sampler", body).check(f"sampler {NAMED}", says, mates_live=False)


def test_sampler_that_draws_a_masked_token(case: Any) -> None:
    made = case("sampler", "def spoil(self, drawn, at): return [0 for _ in drawn]", grammar="llguidance")
    params = GREEDY.model_copy(update={"grammar": SamplingParams(grammar={"regex": "[a-z]+"}).grammar})
    result = made.run(("bad", [BAD], params))["bad"]
    made.require_bad(result, f"sampler {NAMED}", "probability zero")
    require_idle(made.engine)


def test_sampler_check_that_raises_ends_the_request_at_the_door(case: Any) -> None:
    made = case("sampler", "def check(self, params): raise ValueError('cannot read')")
    with pytest.raises(ComponentFailure, match="sampler 'plugin:Faulty' raised ValueError: cannot read"):
        made.core.add("bad", [1], GREEDY)
    require_idle(made.engine)


def with_grammar(value: str) -> SamplingParams:
    return SamplingParams.model_validate(
        {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "grammar": {"kind": "any", "value": value}}
    )


@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def fill_mask(self, m):\n    m[:] = 0 if self.bad else -1", "the grammar allows no token here"),
        ("def fill_mask(self, m):\n    if self.bad: raise ValueError('no mask')\n    m[:] = -1", "no mask"),
        ("def fill_mask(self, m):\n    m[:] = -1\n    if self.bad: time.sleep(0.6)", "gave no answer within"),
        ("def accept(self, t): return not self.bad", "which its mask allowed"),
        ("def accept(self, t):\n    if self.bad: raise ValueError('no way')\n    return True", "no way"),
        ("@property\ndef terminated(self):\n    if self.bad: raise ValueError('no end')\n    return False", "no end"),
        ("def rollback(self, n):\n    if self.bad: raise ValueError('no return')", "no return"),
    ],
)
def test_a_lying_matcher_fails_its_own_request_only(case: Any, drafter: str | None, body: str, says: str) -> None:
    made = case("grammar", body, timeout_s=0.3 if "sleep" in body else 30.0, drafter=drafter)
    if "rollback" in body and drafter is None:
        body, says = body, "no return"  # a rollback of nothing is asked for after every mask
    good, bad = with_grammar("good"), with_grammar("bad")
    both = made.run(("good", [1, 2], good), ("plain", [4], GREEDY), ("bad", [BAD, BAD, BAD], bad))
    made.require_bad(both["bad"], says, "" if "allows no token" in says else f"grammar {NAMED}")
    made.require_good(both["good"], [1, 2])
    made.require_good(both["plain"], [4])
    wait_for_idle(made.engine)
    made.require_good(made.run(("good", [1, 2], good))["good"], [1, 2])
    require_idle(made.engine)


def raise_this(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("kind", [ValueError, RequestError])
def test_grammar_compile_that_raises_ends_the_request_at_the_door(case: Any, kind: type[Exception]) -> None:
    use = case("grammar", "")
    inner: Any = use.core.parts.grammar
    inner.compile = lambda spec: raise_this(kind("odd\ngrammar" if kind is ValueError else "odd grammar"))
    with pytest.raises(PluglmError, match="odd grammar") as error:
        use.core.add("bad", [1], with_grammar("bad"))
    assert "\n" not in str(error.value)
    output = use.engine.generate(ids(1), with_grammar("bad"))[0]
    assert output.finish_reason == ("error" if kind is ValueError else "refused")
    use.require_good(use.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(use.engine)
