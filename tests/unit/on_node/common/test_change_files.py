"""Names that come from a controller become paths on the node only if they are plain."""

from __future__ import annotations

import pytest

from gpufleet.on_node.common import change_files


@pytest.mark.parametrize("name", ["gpufleet-tiny-0.service", "20261201-ab12", "vllm@a:1", "tiny_0"])
def test_names_of_units_upgrades_and_replicas_are_accepted(name: str) -> None:
    assert change_files.must_be_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "../etc", "a/b", "a b", "a\n", "é"])
def test_a_name_that_could_leave_its_folder_or_hide_in_it_is_refused(name: str) -> None:
    with pytest.raises(change_files.RefusedError):
        change_files.must_be_name(name)
