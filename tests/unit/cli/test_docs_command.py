"""`gpufleet docs`: every page by the name that a message gives it."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result

from gpufleet.cli.main import gpufleet
from tests.support.checkout import ROOT

PAGE = "docs/checks/driver-loaded.md"


def docs(*arguments: str) -> Result:
    return CliRunner().invoke(gpufleet, ["docs", *arguments])


def test_without_a_page_all_are_listed() -> None:
    pages = [str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md")]

    assert sorted(docs().output.split()) == sorted(pages)


@pytest.mark.parametrize("name", [PAGE, f"{PAGE}#why", "checks/driver-loaded", "driver-loaded"])
def test_a_page_is_found_by_its_path_and_by_its_name(name: str) -> None:
    assert docs(name).output == (ROOT / PAGE).read_text()


def test_a_page_that_is_not_there_is_refused_with_the_nearest_one() -> None:
    assert "did you mean 'driver-loaded.md'?" in str(docs("driver-load").exception)
