"""What makes nouns quickly makes the frozen dataclasses that they are declared as."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields, replace
from typing import Any

import pytest

from pluglm.kernel.core import (
    Event,
    PlanItem,
    Request,
    RequestView,
    SampleRow,
    Segment,
    Sequence,
    new_event,
    new_item,
    new_row,
    new_segment,
    new_view,
)
from pluglm.kernel.quick_new import quick_new
from pluglm.kernel.roster import view_of
from pluglm.kernel.sampling_params import SamplingParams
from pluglm.kv.books import Table, new_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Noun:
    number: int
    name: str = "none"

    @property
    def twice(self) -> int:
        return 2 * self.number


new_noun = quick_new(Noun)
NOUNS = [
    (Noun, new_noun),
    (Event, new_event),
    (PlanItem, new_item),
    (RequestView, new_view),
    (SampleRow, new_row),
    (Segment, new_segment),
    (Table, new_table),
]


def test_an_object_is_as_dataclasses_makes_it() -> None:
    plain, quick = Noun(number=3), new_noun(number=3)
    assert type(quick) is Noun
    assert (repr(quick), hash(quick), quick, quick.twice) == (repr(plain), hash(plain), plain, 6)
    assert replace(quick, name="x") == Noun(number=3, name="x") != quick
    assert copy.deepcopy(quick) == pickle.loads(pickle.dumps(quick)) == plain  # noqa: S301


@pytest.mark.parametrize(("noun", "new"), NOUNS)
def test_fields_and_defaults_are_those_of_the_class(noun: Any, new: Callable[..., Any]) -> None:
    needed = [one.name for one in fields(noun) if one.default is MISSING]
    for names in (needed, [one.name for one in fields(noun)]):
        values = {name: number for number, name in enumerate(names)}
        assert [getattr(new(**values), one.name) for one in fields(noun)] == [
            getattr(noun(**values), one.name) for one in fields(noun)
        ]
    in_order = list(range(len(fields(noun))))
    assert [getattr(new(*in_order), one.name) for one in fields(noun)] == in_order


@pytest.mark.parametrize(("noun", "new"), NOUNS)
def test_nothing_can_be_changed_or_added(noun: Any, new: Callable[..., Any]) -> None:
    names = [one.name for one in fields(noun)]
    made = new(**dict.fromkeys(names, 1))
    assert type(made) is noun
    for name in (names[0], "extra"):
        with pytest.raises((FrozenInstanceError, TypeError, AttributeError)):
            setattr(made, name, 2)
    with pytest.raises(FrozenInstanceError):
        delattr(made, names[0])
    assert getattr(made, names[0]) == 1


@pytest.mark.parametrize("arguments", [{}, {"name": "x"}, {"number": 1, "other": 2}])
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    for make in (Noun, new_noun):
        with pytest.raises(TypeError, match="argument"):
            make(**arguments)


def test_a_field_with_a_default_factory_has_to_be_given() -> None:
    @dataclass(frozen=True, slots=True)
    class Listed:
        rows: list[int] = field(default_factory=list)

    new = quick_new(Listed)
    with pytest.raises(TypeError, match="rows"):
        new()
    assert new([1]) == Listed([1])


def test_a_view_tells_every_field_of_its_sequence() -> None:
    request = Request(
        request_id="r", prompt_token_ids=(1, 2, 3), params=SamplingParams(), seed=0, arrival_s=0.5, max_new_tokens=77,
        priority=-2, tenant="t", deadline_s=9.5,
    )  # fmt: skip
    sequence = Sequence(sequence_id=11, request=request, lane=4, token_ids=[1, 2, 3, 8, 9], output_token_ids=[8, 9])
    sequence.num_computed, sequence.drafts, sequence.num_preemptions, sequence.holds_kv = 1, [5] * 6, 13, True
    assert view_of(sequence, None) == RequestView(
        sequence_id=11, request_id="r", tenant="t", priority=-2, arrival_s=0.5, num_prompt=3, num_known=5,
        num_computed=1, num_drafts=6, num_output=2, max_new_tokens=77, num_preemptions=13, lane=4, deadline_s=9.5,
        holds_kv=True,
    )  # fmt: skip
