"""How a fleet is changed is said once for all of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpufleet.errors import FleetError
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.variables import load_file
from gpufleet.upgrade.plan.policy import fleet_policy


def declared(tmp_path, **texts):
    """Nodes, each with a file of variables of its own."""
    found = {}
    for name, text in texts.items():
        path = tmp_path / f"{name}.yml"
        path.write_text(text)
        variables = load_file(path, tmp_path)
        found[name] = SimpleNamespace(
            settings=NodeSettings.model_validate(
                {key: value for key, (value, _) in variables.items()}
            ),
            origins={key: origin for key, (_, origin) in variables.items()},
        )
    return found


def test_what_all_say_alike_is_returned(tmp_path):
    said = "upgrade:\n  keep: 2\n  gates:\n    soak_seconds: 5\n"
    found = fleet_policy(declared(tmp_path, a=said, b=said))
    assert (found.keep, found.gates.soak_seconds, found.canary) == (2, 5, 1)


def test_what_differs_is_named_with_key_values_nodes_and_places_all_at_once(tmp_path):
    nodes = declared(
        tmp_path,
        a="upgrade:\n  waves: [2]\n  gates:\n    soak_seconds: 5\n",
        b="upgrade:\n  waves: [1, 25%]\n",
        c="# nothing\n",
    )

    with pytest.raises(FleetError) as error:
        fleet_policy(nodes)

    waves, soak = error.value.problems
    assert waves == (
        "upgrade.waves differs between nodes of this upgrade: [2] on a (a.yml:2); "
        "[1, '25%'] on b (b.yml:2); [1] on c (default): set it once, in a group that contains "
        "all these nodes"
    )
    assert "upgrade.gates.soak_seconds" in soak
    assert "5 on a (a.yml:4)" in soak


def test_the_same_said_in_other_words_is_the_same(tmp_path):
    assert fleet_policy(declared(tmp_path, a="upgrade:\n  canary: 1\n", b="{}\n")).canary == 1
