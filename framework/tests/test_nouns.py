"""Nouns with a quick `__init__` are the frozen dataclasses that they are declared as."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any

import pytest

from pluglm.kernel.core import Event, RequestView, SampleRow, Segment
from pluglm.kernel.quick_init import quick_init


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    number: int
    name: str = "none"

    @property
    def twice(self) -> int:
        return 2 * self.number


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Quick:
    number: int
    name: str = "none"

    @property
    def twice(self) -> int:
        return 2 * self.number


def test_an_object_is_as_dataclasses_makes_it() -> None:
    plain, quick = Plain(number=3), Quick(number=3)
    assert repr(quick) == repr(plain).replace("Plain", "Quick")
    assert (quick.twice, hash(quick), quick) == (6, hash(plain), Quick(number=3, name="none"))
    assert type(quick) is Quick
    assert replace(quick, name="x") == Quick(number=3, name="x") != quick
    assert copy.deepcopy(quick) == pickle.loads(pickle.dumps(quick)) == quick  # noqa: S301


@pytest.mark.parametrize("make", [lambda made: made(3), lambda made: made(), lambda made: made(number=1, other=2)])
def test_wrong_arguments_are_refused_as_by_dataclasses(make: Any) -> None:
    with pytest.raises(TypeError) as plain:
        make(Plain)
    with pytest.raises(TypeError) as quick:
        make(Quick)
    assert str(quick.value) == str(plain.value).replace("Plain.", "")


@pytest.mark.parametrize("noun", [Event, RequestView, SampleRow, Segment, Quick])
def test_nothing_can_be_changed_or_added(noun: Any) -> None:
    names = [one.name for one in fields(noun)]
    made = noun(**dict.fromkeys(names, 1))
    assert [getattr(made, name) for name in names] == [1] * len(names)
    for name in (names[0], "extra"):
        with pytest.raises((FrozenInstanceError, TypeError, AttributeError)):
            setattr(made, name, 2)
    with pytest.raises(FrozenInstanceError):
        delattr(made, names[0])
    assert getattr(made, names[0]) == 1
