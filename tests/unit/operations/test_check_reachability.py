"""What a proof is asked for, and how long nobody waits for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpufleet.errors import FleetError
from gpufleet.operations import check_reachability
from gpufleet.planning.multinode import reachability
from gpufleet.settings.node_settings import NodeSettings
from tests.support.checkout import ROOT
from tests.unit.serving.test_rank_units import HEAD, WORKER


def settings(**different) -> NodeSettings:
    vllm = {
        "version": "0.32.0",
        "lock": str(ROOT / "locks/vllm-0.32.0.txt"),
        "uv_lock": str(ROOT / "locks/uv.txt"),
        "listen": "127.0.0.1",
        **different.pop("vllm", {}),
    }
    serving = {"llama": {"model": "org/llama", "revision": "9d1f" * 10, **different}}
    return NodeSettings.model_validate({"vllm": vllm, "serving": serving})


@pytest.mark.parametrize("stage", [HEAD, WORKER], ids=["head", "worker"])
def test_any_rank_tells_the_whole_replica(stage):
    """Whichever node comes first asks all of them."""
    fleet = {"gpu-01": settings(), "gpu-02": settings()}

    found = check_reachability.describe_replica(stage, fleet)

    assert found == check_reachability.describe_replica(HEAD, fleet)
    assert found.nodes == ("gpu-01", "gpu-02")
    assert found.ports == range(29500, 29516)
    assert {each.model_directory for each in found.members} == {
        "/var/lib/vllm/models/org--llama/" + "9d1f" * 10
    }
    assert [str(each) for each in found.members] == [
        "gpu-01 (10.1.0.1, eth1)",
        "gpu-02 (10.1.0.2, eth2)",
    ]


def test_each_nodes_own_release_is_what_it_has_to_have():
    """Variables of groups may differ: then the sentence has both, before anything restarts."""
    fleet = {"gpu-01": settings(), "gpu-02": settings(vllm={"python": "/usr/bin/python3.12"})}
    found = check_reachability.describe_replica(HEAD, fleet)

    silent = dict.fromkeys(found.nodes, "no answer within 8 s")
    problems = reachability.compare(found, silent, {}).problems

    first, last = (each.release for each in found.members)
    assert first != last
    assert any(f"gpu-01 has {first}, gpu-02 has {last}" in each for each in problems)


def test_a_lock_that_cannot_be_read_is_a_mistake_in_words():
    fleet = {"gpu-01": settings(), "gpu-02": settings(vllm={"lock": "locks/none.txt"})}

    with pytest.raises(FleetError, match=r"locks/none.txt cannot be read in .* \(No such file"):
        check_reachability.describe_replica(HEAD, fleet)


def test_nodes_that_do_not_answer_the_look_are_not_waited_for_again():
    """What they would be asked next is how they reach others; the others prove it without them."""
    asked: list[tuple[str, list[str]]] = []
    found = check_reachability.describe_replica(HEAD, {"gpu-01": settings(), "gpu-02": settings()})

    def asking(program, seconds, what):
        nodes = [node for node in found.nodes if program(node)]
        asked.append((what, nodes))
        return dict.fromkeys(nodes, "cannot be reached: no route to host")

    reach = check_reachability.probe_reachability(found, asking)

    assert asked == [("the query of its network", ["gpu-01", "gpu-02"])]
    assert reach.problems == tuple(
        f"llama-0: {node}: cannot be reached: no route to host" for node in found.nodes
    )


def test_ray_is_asked_for_where_it_joins_the_nodes():
    fleet = dict.fromkeys(("gpu-01", "gpu-02"), settings(distributed_executor_backend="ray"))

    assert check_reachability.describe_replica(HEAD, fleet).ray
    assert not check_reachability.describe_replica(
        replace(HEAD), {name: settings() for name in fleet}
    ).ray
