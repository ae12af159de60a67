"""What draining a node is about: whole replicas, and who serves their models meanwhile."""

from __future__ import annotations

from gpufleet.fleet.draining import find_drain, refusal
from gpufleet.planning.stage import Running
from tests.support import warm_command

SERVE = ("/opt/vllm/releases/0.32.0-1a2b3c4d5e/bin/vllm serve",)


def alone(model, replica, node, port=8000):
    return Running(model, replica, node, ("GPU-1",), port, arguments=SERVE)


def over(model, replica, *nodes):
    """A replica over nodes; only its first rank has a server."""
    members = tuple(f"--node {node}=10.0.0.1" for node in nodes)
    return [
        Running(
            model,
            replica,
            node,
            ("GPU-1",),
            8000,
            rank=rank,
            arguments=(*members, *SERVE, *(("--headless",) if rank else ())),
        )
        for rank, node in enumerate(nodes)
    ]


def test_of_a_replica_over_nodes_all_of_it_is_drained():
    """Its server may be on another node than the one that is taken out."""
    found = find_drain("b", [*over("big", 0, "a", "b"), *over("big", 1, "c", "d")])

    assert found.replicas == ("big-0",)
    assert found.every_node == ("a", "b")
    assert found.replicas_on("a") == found.replicas_on("b") == ("big-0",)
    assert [each["name"] for each in found.servers] == ["big/a.big-0"]
    assert found.last == ()


def test_a_model_that_nothing_else_serves_is_not_drained_unasked():
    found = find_drain(
        "a", [alone("tiny", 0, "a"), alone("tiny", 1, "b"), alone("only", 0, "a", 8001)]
    )

    assert found.last == ("only",)
    assert "no other node serves only, so requests for this model would fail" in refusal(found)
    assert "--force" in refusal(found)


def test_a_replica_that_is_drained_already_serves_nobody():
    running = [alone("tiny", 0, "a"), alone("tiny", 1, "b")]

    assert refusal(find_drain("a", running)) is None
    assert find_drain("a", running, {("b", "tiny-1")}).last == ("tiny",)


def test_a_node_on_which_nothing_runs_has_nothing_to_drain():
    found = find_drain("a", [alone("tiny", 0, "b")])

    assert (found.replicas, found.servers, found.every_node) == ((), (), ("a",))
    assert refusal(found) is None


def test_a_node_that_is_not_there_is_named_and_nobody_is_asked(tmp_path):
    (tmp_path / "fleet.py").write_text(
        "from gpufleet import inventory\n"
        'globals().update(inventory.load(__file__, groups={"gpu_nodes": ["gpu-01"]}))\n'
    )
    done = warm_command.run(["cordon", "fleet.py", "gpu-1", "--why", "x"], cwd=tmp_path)
    assert done.returncode == 2
    assert "fleet.py has no GPU node 'gpu-1'" in done.stderr
    assert "Traceback" not in done.stderr
