"""A quick dataclass is a dataclass: whatever the standard library's does, it does."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any

import pytest

from gpufleet.quick_dataclass import dataclass


def declare(make: Callable[..., Any]) -> list[Any]:
    """Return the same classes, made by a decorator."""

    @make(frozen=True)
    class Frozen:
        """What most of ours are."""

        a: int
        b: str = "b"
        seen: list[int] = field(default_factory=list, hash=False)
        secret: str = field(default="", repr=False, compare=False)
        of: Any = field(default=None, hash=False)

    @make
    class Open:
        a: int
        b: tuple[int, ...] = ()

        def __post_init__(self) -> None:
            self.b = (*self.b, self.a)

    @make(frozen=True)
    class One:
        a: float

    @make(frozen=True)
    class Empty:
        pass

    @make(frozen=True, order=True)
    class Ordered:
        a: int
        b: int = 0

    @make(frozen=True)
    class Below(Frozen):
        c: int = 1

    @make(frozen=True)
    class Named:
        a: int
        _: dataclasses.KW_ONLY
        b: int = 2

    return [Frozen, Open, One, Empty, Ordered, Below, Named]


PAIRS = list(zip(declare(dataclass), declare(dataclasses.dataclass), strict=True))
NAN = float("nan")
GIVEN: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1,), {}),
    ((1, "x"), {}),
    ((1,), {"b": "x", "seen": [2], "secret": "s"}),
    ((1, 2), {"b": 3}),
    ((NAN,), {}),
    ((), {"a": (1, 2)}),
    ((1, 2, 3, 4, 5, 6, 7), {}),
    ((1,), {"unknown": 1}),
]


def outcome(of: Callable[[], Any]) -> Any:
    """Return what a call gives, or the kind of what it raises."""
    try:
        return of()
    except Exception as error:  # noqa: BLE001
        return type(error)


def seen(cls: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
    """Return everything that can be told of an object of a class, as plain values."""
    one = outcome(lambda: cls(*args, **options))
    if isinstance(one, type):
        return [one]
    other = cls(*args, **options)
    return [
        repr(one),
        str(dataclasses.asdict(one)),
        [one == other, one != other, one == 1, outcome(lambda: one < other)],
        one == outcome(lambda: dataclasses.replace(one, a=99)),
        repr(outcome(lambda: dataclasses.replace(one, a=99))),
        outcome(lambda: hash(one) == hash(other)),
        outcome(lambda: hash(one) == hash(cls(99))),
        outcome(lambda: hash(one)),
        outcome(lambda: setattr(one, "a", 5)),
        outcome(lambda: setattr(one, "new", 5)),
        copy.deepcopy(one) == one,
        vars(one).keys() - {"new"},
        outcome(lambda: delattr(one, "a")),
        cls.__match_args__,
        cls.__init__.__annotations__.keys(),
        [(each.name, each.type, each.init, each.kw_only) for each in dataclasses.fields(cls)],
    ]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(("args", "options"), GIVEN)
def test_it_does_what_the_standard_library_does(
    ours: Any, theirs: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    assert seen(ours, args, options) == seen(theirs, args, options)


def test_a_default_that_is_made_is_made_for_each_object() -> None:
    cls: Any = PAIRS[0][0]
    assert cls(1).seen is not cls(1).seen
    with pytest.raises(ValueError, match="mutable default"):

        @dataclass
        class Shared:
            a: list[int] = []  # noqa: RUF012


def test_what_refuses_to_change_says_which_field() -> None:
    ours, theirs = (cls(1) for cls in PAIRS[0])
    said = []
    for one in (ours, theirs):
        with pytest.raises(dataclasses.FrozenInstanceError) as refused:
            one.a = 2
        said.append(str(refused.value))
        with pytest.raises(dataclasses.FrozenInstanceError) as refused:
            del one.b
        said.append(str(refused.value))
    assert said[:2] == said[2:]


def test_one_that_holds_itself_can_be_shown() -> None:
    ours, theirs = (cls(1) for cls in PAIRS[0])
    for one in (ours, theirs):
        one.seen.append(one)
    assert repr(ours) == repr(theirs)


@dataclass(frozen=True)
class Sent:
    """At the top of a module, where pickle finds it."""

    a: int
    b: tuple[int, ...] = ()


def test_it_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(Sent(1, (2,)))) == Sent(1, (2,))


def test_objects_of_classes_alike_differ() -> None:
    assert PAIRS[2][0](1.0) != PAIRS[2][1](1.0)


def test_a_class_below_it_has_its_fields_and_may_not_thaw_it() -> None:
    frozen: Any = PAIRS[0][0]
    with pytest.raises(TypeError, match="cannot inherit"):

        @dataclasses.dataclass
        class Thawed(frozen):
            pass

    @dataclasses.dataclass(frozen=True)
    class More(frozen):
        d: int = 4

    assert [each.name for each in dataclasses.fields(More)] == [
        *(each.name for each in dataclasses.fields(frozen)),
        "d",
    ]
