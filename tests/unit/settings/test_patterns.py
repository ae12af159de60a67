"""A setting's pattern refuses what pydantic's own refuses, in its words."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, ValidationError

from gpufleet.settings.base import Matches

NAME = r"^[\w.@-]{1,15}$"


class Ours(BaseModel):
    """With a pattern that is compiled when it is needed."""

    one: Annotated[str, Matches(NAME), Field(description="told")] = "x"
    maybe: Annotated[str | None, Matches(NAME)] = None
    by_name: dict[Annotated[str, Matches(NAME)], int] = {}
    some: tuple[Annotated[str, Matches(NAME)], ...] = ()


class Theirs(BaseModel):
    """With pydantic's."""

    one: Annotated[str, Field(pattern=NAME, description="told")] = "x"
    maybe: Annotated[str | None, Field(pattern=NAME)] = None
    by_name: dict[Annotated[str, Field(pattern=NAME)], int] = {}
    some: tuple[Annotated[str, Field(pattern=NAME)], ...] = ()


def said(model: type[BaseModel], data: dict[str, Any]) -> Any:
    """Return what a model makes of data, or everything it says against it."""
    try:
        return model.model_validate(data).model_dump()
    except ValidationError as error:
        return error.errors(include_url=False)


@pytest.mark.parametrize(
    "value", ["eth0", "", "a b", "eth0\n", "ä", "é\u0301", "\uff11", "x" * 16, None, 7, True, ["x"]]
)
def test_it_judges_as_pydantic_does(value: Any) -> None:
    of_it = [{"one": value}, {"maybe": value}, {"some": [value, "fine"]}]
    of_it += [] if isinstance(value, list) else [{"by_name": {value: 1}}]
    for data in of_it:
        assert said(Ours, data) == said(Theirs, data)


def test_it_leaves_the_description() -> None:
    assert Ours.model_fields["one"].description == "told"
