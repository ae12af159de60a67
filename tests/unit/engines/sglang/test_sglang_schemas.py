"""The packaged releases of SGLang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpufleet.engines.sglang import sglang_schemas
from gpufleet.errors import FleetError
from gpufleet.flags.schema import sort_key

# What the parser of 0.5.23 has, as an installed release's argparse shows it (real_sglang.py).
RECORDED = Path(__file__).with_name("options-0.5.23.json")


def test_releases_are_in_their_order():
    found = sglang_schemas.versions()

    assert list(found) == sorted(found, key=sort_key)
    assert found[-1] == "0.5.23"


@pytest.mark.parametrize("version", sglang_schemas.versions())
def test_every_packaged_release_can_be_loaded(version):
    found = sglang_schemas.load(version)

    assert found.version == version
    assert found.by_option["--model-path"].required
    assert not found.unresolved


def test_a_build_of_a_release_is_that_release():
    assert sglang_schemas.load("v0.5.23+cpu").version == "0.5.23"


def test_an_unknown_release_is_refused_with_its_neighbours():
    with pytest.raises(
        FleetError, match=r"SGLang 0\.5\.11: unknown release.*0\.5\.10 and 0\.5\.15"
    ):
        sglang_schemas.load("0.5.11")


def test_flags_are_those_of_the_installed_release():
    """The extractor runs parts of a release's code; an installed one runs all of it."""
    real = json.loads(RECORDED.read_text())
    found = {
        option: [flag.dest, flag.takes_value, flag.nargs, flag.required]
        for option, flag in sglang_schemas.load("0.5.23").by_option.items()
        if option != "--model-type"  # of `sglang serve`, before that parser
    }

    assert found == real
