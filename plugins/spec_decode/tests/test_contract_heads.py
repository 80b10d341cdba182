"""The contract kits on draft heads: of drafters for eagle_head and mtp_head, of model families for their blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from pluglm.kernel.interfaces.drafter import Drafter
from pluglm.testing import drafter_rows
from pluglm.testing.check import Check, cases
from pluglm.testing.context import make_context, small_spec
from pluglm.testing.drafter import ROWS_WIDTH, drafter_checks
from pluglm.testing.model import model_checks
from pluglm.testing.target import TableTarget, ToldDrafter
from pluglm_spec_decode.heads.eagle import EagleHeadDrafter
from pluglm_spec_decode.heads.model import DraftHeadModel
from pluglm_spec_decode.heads.module import STEM, DraftHead
from pluglm_spec_decode.heads.mtp import MtpHeadDrafter
from pluglm_spec_decode.heads.settings import head_config

DRAFTERS: list[tuple[type[Any], str, int]] = [(EagleHeadDrafter, "eagle", 1), (MtpHeadDrafter, "mtp", 3)]


@pytest.mark.parametrize(("cls", "kind", "num_blocks"), DRAFTERS)
def test_drafters(make_head: Callable[..., Any], head_runner: Any, cls: Any, kind: str, num_blocks: int) -> None:
    _, folder = make_head(kind, small_spec(), num_blocks=num_blocks)
    for check in drafter_checks(cls, cls.Config(model=str(folder), num_tokens=3), head=head_runner):
        check.run()


@pytest.mark.parametrize(("cls", "kind", "num_blocks"), DRAFTERS)
def test_drafters_that_draw(
    monkeypatch: pytest.MonkeyPatch,
    make_head: Callable[..., Any],
    head_runner: Any,
    cls: Any,
    kind: str,
    num_blocks: int,
) -> None:
    """On one text, and of more than one token: before the second there is no hidden state to go on from."""
    monkeypatch.setattr(drafter_rows, "CONTEXTS", drafter_rows.CONTEXTS[1:2] * 2)
    spec = small_spec(ROWS_WIDTH)
    config = cls.Config(model=str(make_head(kind, spec, num_blocks=num_blocks)[1]), num_tokens=2, draws=True)

    def make() -> Drafter:
        target = TableTarget(spec, head_runner)
        return ToldDrafter(cls(config, replace(make_context(spec=spec), target=target)), target)

    for check in drafter_rows.row_checks(make, spec.vocab_size, 2000 if kind == "eagle" else 400):
        check.run()


class Fed(DraftHeadModel):
    """A head of one block that makes up its rows by itself, from the tokens."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        width = 2 * self.spec.hidden_size
        self.feed = lambda token_ids_T: torch.sin(token_ids_T[:, None] * torch.arange(1.0, width + 1))


BLOCK = head_config("eagle", small_spec(32))  # the kit expects as many logits as the config has vocabulary
SHAPES = {STEM + name: tuple(value.shape) for name, value in DraftHead(BLOCK).state_dict().items()}


@pytest.mark.parametrize("check", **cases(model_checks(Fed, BLOCK, SHAPES)))
def test_a_block(check: Check) -> None:
    check.run()
