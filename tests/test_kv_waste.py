"""How much KV memory is reserved and never used: measured on a chat-like mix, and what docs/kv-memory.md says of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_cases import fake_config, require_idle

from pluglm import Engine, SamplingParams

ROOT = Path(__file__).parents[1]
CONTEXT, SEATS, REQUESTS = 2048, 16, 64
MEAN_PROMPT, MEAN_OUTPUT = (
    161,
    338,
)  # tokens; of ShareGPT conversations in the paper on PagedAttention, arXiv:2309.06180
MANAGERS: dict[str, dict[str, Any]] = {
    "contiguous": {"use": "contiguous"},
    "paged, blocks of 64": {"use": "paged", "block_size": 64},
    "paged, blocks of 16": {"use": "paged", "block_size": 16},
    "paged, blocks of 1": {"use": "paged", "block_size": 1},
}


@dataclass
class Reservation:
    """Token slots, summed over steps and sequences. most_unused: of one sequence in one step."""

    reserved: int = 0
    used: int = 0
    most_unused: int = 0
    least_unused: int = CONTEXT

    @property
    def waste(self) -> float:
        return 1 - self.used / self.reserved

    def take(self, core: Any) -> None:
        """Before a step runs. Used are the tokens that are known: a prompt's from its admission on, like its blocks."""
        size = core.kv.layout.block_size
        pairs = [(len(core.kv.block_table(i)) * size, len(one.token_ids)) for i, one in core.roster.running.items()]
        unused = [reserved - used for reserved, used in pairs]
        self.reserved += sum(reserved for reserved, _ in pairs)
        self.used += sum(used for _, used in pairs)
        self.most_unused = max(self.most_unused, *unused)
        self.least_unused = min(self.least_unused, *unused)


def lognormal(draw: random.Random, mean: float) -> int:
    """With a standard deviation as large as the mean: sigma^2 = ln 2."""
    sigma = math.sqrt(math.log(2))
    return max(1, round(draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))


def lengths() -> list[tuple[int, int]]:
    """(prompt, output) of each request, cut to what the context holds."""
    draw = random.Random(0)
    pairs = [(min(lognormal(draw, MEAN_PROMPT), 1024), lognormal(draw, MEAN_OUTPUT)) for _ in range(REQUESTS)]
    return [(prompt, min(output, CONTEXT - prompt)) for prompt, output in pairs]


def measured(model: Path, kv: dict[str, Any]) -> Reservation:
    path = {"path": str(model), "dtype": "float32", "max_model_len": CONTEXT}
    backend = {"use": "fake", "logits": "cheap"}
    config = fake_config(model, model=path, kv=kv, backend=backend, engine={"max_num_seqs": SEATS})
    found = Reservation()
    with Engine.from_config(config) as engine:
        core: Any = engine._core
        for number, (prompt, output) in enumerate(lengths()):
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
            core.add(f"r{number}", [number] * prompt, params)
        execute = core._execute

        def watched(step: Any) -> Any:
            found.take(core)
            return execute(step)

        core._execute = watched
        while core.roster.requests:
            core.step()
        require_idle(engine)
    return found


@pytest.fixture(scope="module")
def found(make_tiny_model: Callable[..., Path]) -> dict[str, Reservation]:
    model = make_tiny_model("long_context", max_position_embeddings=CONTEXT)
    return {name: measured(model, kv) for name, kv in MANAGERS.items()}


def test_the_mix_is_what_it_is_said_to_be() -> None:
    pairs = lengths()
    assert sum(prompt for prompt, _ in pairs) / REQUESTS == pytest.approx(MEAN_PROMPT, rel=0.25)
    assert sum(output for _, output in pairs) / REQUESTS == pytest.approx(MEAN_OUTPUT, rel=0.25)
    assert 0.2 < sum(map(sum, pairs)) / REQUESTS / CONTEXT < 0.4


def test_contiguous_regions_waste_most_of_the_memory(found: dict[str, Reservation]) -> None:
    assert 0.6 <= found["contiguous"].waste <= 0.8


@pytest.mark.parametrize("block_size", [64, 16, 1])
def test_paged_tables_waste_less_than_a_block_a_sequence(found: dict[str, Reservation], block_size: int) -> None:
    """In every step, of every sequence; and nobody has less than it uses."""
    one = found[f"paged, blocks of {block_size}"]
    assert one.least_unused >= 0
    assert one.most_unused < block_size
    assert one.waste < found["contiguous"].waste / 5


def test_the_documentation_says_what_is_measured(found: dict[str, Reservation]) -> None:
    text = (ROOT / "docs/kv-memory.md").read_text(encoding="utf-8")
    section = text.partition("\n## How much is reserved in vain\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    stated = {name: (waste, most) for name, waste, most in rows[2:]}
    assert stated == {name: (f"{one.waste:.1%}", f"{one.most_unused:,}") for name, one in found.items()}
    for number in (REQUESTS, SEATS, MEAN_PROMPT, MEAN_OUTPUT, CONTEXT):
        assert f"{number}" in section.replace(",", "")
