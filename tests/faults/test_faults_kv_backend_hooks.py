"""Rule 8 for KV managers, backends, attention and hooks: one that misbehaves fails only what it touched."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from engine_cases import GREEDY, fake_config, fake_tokens, ids, real_config, require_idle, write_plugin
from fault_cases import BAD, BASES, HEADER, NAMED, faulty

from pluglm import Engine
from pluglm.kernel.errors import PluginError
from pluglm.kernel.interfaces.drafter import Proposal


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("def extend(self, i, n, evict=True): raise ValueError('torn page')", "raised ValueError: torn page"),
        ("def commit(self): raise ValueError('torn book')", "raised ValueError: torn book"),
        ("def acquire(self, i, key=None): raise OSError('torn cover')", "raised OSError: torn cover"),
    ],
)
def test_kv_changes_that_raise(case: Any, method: str, says: str) -> None:
    made = case("kv", method)
    inner: Any = made.core.parts.runner.kv._target
    inner.armed = True
    made.require_bad(made.run(("bad", [BAD], GREEDY))["bad"], f"kv {NAMED}", says)
    inner.armed = False
    made.core.step()
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)


@pytest.mark.parametrize("method", ["commit", "trim", "release"])
def test_kv_that_breaks_in_the_middle_of_a_request_is_tried_again(case: Any, method: str) -> None:
    """Giving back is where a failure could leave a transaction open or lose blocks."""
    made = case("kv", f"def {method}(self, *args): raise ValueError('torn page')", drafter="ngram")
    inner: Any = made.core.parts.runner.kv._target
    made.core.parts.drafter.propose = lambda asked: [Proposal([1]) for _ in asked]  # there is something to trim
    made.core.add("bad", [1, 2, 1, 2, 1, 2], GREEDY)
    made.core.step()
    inner.armed = True
    made.core.cancel("bad") if method == "release" else None
    ends = [event for _ in range(30) for event in made.core.step() if event.finish_reason]
    assert len(ends) == 1
    if method != "release":
        made.require_bad(([], ends[0]), f"kv {NAMED}", "torn page")
    inner.armed = False
    made.core.step()
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    if method != "release":  # ValueError of release means that there is nothing to release, so nothing is left to do
        require_idle(made.engine)


@pytest.mark.parametrize("method", ["commit", "trim"])
def test_a_manager_may_keep_tensors_that_it_writes_to(case: Any, method: str) -> None:
    """Its changes do not run in inference mode: what it made there could not be written to anywhere else."""
    source = f"""def {method}(self, *args):
        import torch
        if torch.is_inference_mode_enabled():
            raise ValueError("made for inference")
        return self.inner.{method}(*args)"""
    made = case("kv", source, drafter="ngram")
    inner: Any = made.core.parts.runner.kv._target
    made.core.parts.drafter.propose = lambda asked: [Proposal([1]) for _ in asked]
    inner.armed = True
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)


def test_kv_tables_that_cannot_be_read(case: Any) -> None:
    made = case("kv", "")
    inner: Any = made.core.parts.runner.kv._target
    table, inner.block_table = inner.block_table, lambda i: (_ for _ in ()).throw(OSError("torn index"))
    made.core.parts.runner.kv.__dict__.pop("block_table", None)
    made.require_bad(made.run(("bad", [BAD], GREEDY))["bad"], f"kv {NAMED} raised OSError: torn index")
    inner.block_table = table
    made.core.parts.runner.kv.__dict__.pop("block_table", None)
    made.require_good(made.run(("good", [1, 2], GREEDY))["good"], [1, 2])
    require_idle(made.engine)


STEP = "model 'llama' with backend 'plugin:Faulty'"


@pytest.mark.parametrize(
    ("body", "says", "mates_live"),
    [
        (
            "def spoil(self, logits, bad): raise RuntimeError('no device')",
            f"backend {NAMED} raised RuntimeError",
            False,
        ),
        ("def spoil(self, logits, bad): logits[bad] = float('nan'); return logits", f"{STEP}", True),
        ("def spoil(self, logits, bad): logits[bad, 7] = float('nan'); return logits", f"{STEP}", True),
        ("def spoil(self, logits, bad): logits[bad, 7] = float('inf'); return logits", f"{STEP}", True),
        ("def spoil(self, logits, bad): logits[bad] = float('-inf'); return logits", f"{STEP}", True),
        ("def spoil(self, logits, bad): return logits[:-1]", f"{STEP}", False),
        ("def spoil(self, logits, bad): return logits[:, :-1]", f"{STEP}", False),
        ("def spoil(self, logits, bad): return logits.double()", f"{STEP}", False),
        ("def spoil(self, logits, bad): return None", f"{STEP}", False),
        ("def spoil(self, logits, bad): return [[0.0]]", f"{STEP}", False),
    ],
)
def test_backend(case: Any, body: str, says: str, mates_live: bool) -> None:
    case("backend", body).check(says, mates_live=mates_live)


def test_a_row_that_verification_never_reaches_may_be_broken(case: Any, folder: Path) -> None:
    """The rows behind a refused draft belong to a text that never was; without a drafter nobody would compute them."""
    body = """
    def spoil(self, logits, bad):
        logits[bad[1:]] = float('nan')
        return logits
    """
    write_plugin(folder, HEADER + BASES["drafter"], "drafts")
    made = case("backend", body, drafter="drafts:Faulty")
    result = made.run(("bad", [BAD, 2], GREEDY))["bad"]
    made.require_good(result, [BAD, 2])
    assert result[1].metrics.num_drafted > 0
    require_idle(made.engine)


HOOKS = ("run_started", "request_admitted", "step_planned", "event_emitted", "step_done", "run_finished")
ARGUMENTS = dict(zip(HOOKS, ("plan", "request", "view, plan", "event", "step, seconds, num_tokens", ""), strict=True))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_is_dropped(tiny_model: Path, folder: Path, hook: str) -> None:
    arguments = f"self, {ARGUMENTS[hook]}".rstrip(", ")
    source = HEADER + (
        "class Faulty(Hook):\n    Config = ComponentConfig\n    interface_version = 1\n"
        "    def __init__(self, config): pass\n"
        f"    @hookimpl\n    def {hook}({arguments}): raise ValueError('lost\\nlog')\n"
    )
    write_plugin(folder, source)
    engine = Engine.from_config(fake_config(tiny_model, folder, hooks=["plugin:Faulty"]))
    output = engine.generate(ids(1, 2), GREEDY)[0]
    engine.close()
    assert output.token_ids == fake_tokens([1, 2], 8, 320)
    failures = engine._core.parts.hooks.failures  # type: ignore[attr-defined]
    assert failures == {"plugin:Faulty": f"{hook}: hook 'plugin:Faulty' raised ValueError: lost log"}
    require_idle(engine)


def test_a_hook_that_hangs_is_dropped(tiny_model: Path, folder: Path) -> None:
    source = HEADER + (
        "class Faulty(Hook):\n    Config = ComponentConfig\n    interface_version = 1\n    go_on = threading.Event()\n"
        "    def __init__(self, config): pass\n"
        "    @hookimpl\n    def step_planned(self, view): self.go_on.wait(10)\n"
    )
    write_plugin(folder, source)
    config = fake_config(tiny_model, folder, hooks=["plugin:Faulty"], engine={"plugin_timeout_s": 0.3})
    with Engine.from_config(config) as engine:
        output = engine.generate(ids(1, 2), GREEDY)[0]
        assert output.token_ids == fake_tokens([1, 2], 8, 320)
        failures = engine._core.parts.hooks.failures  # type: ignore[attr-defined]
        assert "gave no answer within 0.3 s" in failures["plugin:Faulty"]
        engine.run.hooks["plugin:Faulty"].cls.go_on.set()


def test_a_hook_wrapper_is_refused_since_its_body_would_not_run(tiny_model: Path, folder: Path) -> None:
    source = HEADER + (
        "class Faulty(Hook):\n    Config = ComponentConfig\n    interface_version = 1\n"
        "    def __init__(self, config): pass\n"
        "    @hookimpl(wrapper=True)\n    def run_finished(self):\n        yield\n"
    )
    write_plugin(folder, source)
    with pytest.raises(PluginError, match="run_finished is a wrapper"):
        Engine.from_config(fake_config(tiny_model, folder, hooks=["plugin:Faulty"]))


def test_a_hanging_attention_writes_late_into_blocks_that_nobody_else_got(tiny_model: Path, folder: Path) -> None:
    """The pool has just enough blocks for two requests; the late write lands while the second one runs."""
    source = HEADER + (
        "class Faulty(NaiveAttention):\n"
        "    late = threading.Event()\n"
        "    def run(self, layer, q_TNH, k_TKH, v_TKH, plan, kv):\n"
        "        out = super().run(layer, q_TNH, k_TKH, v_TKH, plan, kv)\n"
        "        if len(q_TNH) == 3:\n"
        "            self.late.wait(10)\n"
        "            out = super().run(layer, q_TNH, k_TKH + 9, v_TKH + 9, plan, kv)\n"
        "        return out\n"
    )
    write_plugin(folder, source)
    config = real_config(
        tiny_model,
        folder,
        attention="plugin:Faulty",
        kv={"use": "paged", "block_size": 4, "num_blocks": 4},
        engine={"plugin_timeout_s": 0.5, "deterministic": False},
    )
    good = ids(5, 6, 7, 8)
    with Engine.from_config(config) as engine:
        core = engine._core
        expected = engine.generate(good, GREEDY)[0]
        bad = engine.generate(ids(5, 6, 7), GREEDY)[0]
        assert bad.error is not None
        assert "attention 'plugin:Faulty' gave no answer within 0.5 s and was abandoned" in bad.error
        assert core.kv.capacity().held_blocks == 1
        name = engine.submit(good, GREEDY)
        for _ in range(3):
            engine.step()
        assert core.kv.capacity().held_blocks == 3
        core.parts.runner.attention._target._attention.late.set()
        for _ in range(200):
            if core.parts.guard.settled:
                break
            time.sleep(0.02)
        assert core.parts.guard.settled
        events = list(engine.events(name))
        assert [token for event in events for token in event.token_ids] == expected.token_ids
        assert engine.generate(good, GREEDY)[0].token_ids == expected.token_ids
        require_idle(engine)


def test_a_component_failure_while_building_is_a_plugin_error(tiny_model: Path, folder: Path) -> None:
    use = faulty(folder, "drafter", "def __init__(self, config, context): raise ComponentFailure('my part', 'is bad')")
    with pytest.raises(PluginError, match="cannot be built: my part is bad"):
        Engine.from_config(fake_config(tiny_model, folder, drafter=use))
