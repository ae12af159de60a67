"""What is read of pyinfra's command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click
import pytest

from gpufleet.inventory import invocation
from gpufleet.inventory.refusal import Refusal
from tests.support.checkout import ROOT


def main() -> None:
    """The function behind the command; pyinfra's own is told by its module."""


main.__module__ = "pyinfra_cli.cli"


@contextmanager
def typed(*left_out: str) -> Iterator[None]:
    """Be within a command that has gpufleet's options but some."""
    names = invocation.Invocation.__dataclass_fields__.keys() - set(left_out)
    with click.Context(click.Command("pyinfra", callback=main)) as context:
        context.params = dict.fromkeys(names, ())
        yield


def test_the_options_of_this_pyinfra_are_read() -> None:
    with typed():
        found = invocation.current()

    assert found is not None
    assert found.limit == ()


def test_a_pyinfra_without_an_option_is_refused_by_name() -> None:
    """Before 3.10 there was no --exclude; pyinfra looks at the version it needs later."""
    with typed("exclude"), pytest.raises(Refusal) as refused:
        invocation.current()

    (problem,) = refused.value.problems
    assert "has no --exclude" in problem
    assert f"pyinfra {invocation.SERIES}" in problem


def test_the_series_is_the_one_that_is_installed() -> None:
    assert f'"pyinfra{invocation.SERIES}",' in (ROOT / "pyproject.toml").read_text()


def test_an_interruption_names_four_nodes_of_each_operation_that_may_still_run() -> None:
    four = ["n1", "n2", "n3", "n4"]
    said = invocation.interruption_message({"server.shell": four, "apt.update": [*four, "n5"]})
    assert "nodes: n1, n2, n3, n4: server.shell; n1, n2, n3, n4 and more: apt.update. " in said
