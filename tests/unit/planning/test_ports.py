"""Ports of replicas: also of those with a server an engine, which need several in a row."""

from __future__ import annotations

from gpufleet.planning.ports import Endpoint, assign_ports
from gpufleet.planning.stage import Running, Stage
from gpufleet.settings.node_settings import NodeSettings
from tests.support.rows import each_row

VLLM = {"version": "0.33.0", "lock": "locks/vllm.txt", "listen": "127.0.0.1"}


def declared(**models):
    """Settings of a node with these models; the value is the port that somebody wrote, or None."""
    serving = {
        name: {"model": "/srv/m"} | ({"port": port} if port else {})
        for name, port in models.items()
    }
    return NodeSettings.model_validate({"vllm": VLLM, "serving": serving})


def endpoint(model, *nodes, declared=8000, explicit=False, width=1, wished=None, replica=0):
    return Endpoint(model, replica, nodes, declared, explicit, wished, width=width)


def ports(endpoints, settings, others=None):
    problems, _ = assign_ports(endpoints, settings, others or {})
    assert problems == ()
    return {f"{each.model}-{each.replica}": each.port for each in endpoints}


def stage(rank=0, balancing="external", nodes=2, gpus=8, **changes):
    return Stage(
        model="m",
        replica=0,
        node=f"n{rank}",
        gpus=tuple(range(gpus)),
        gpu_uuids=tuple(f"GPU-{n}" for n in range(gpus)),
        port=8000,
        node_rank=rank,
        nodes=tuple(f"n{n}" for n in range(nodes)),
        balancing=balancing,
        **{"tensor_parallel": 1, "data_parallel": nodes * gpus} | changes,
    )


@each_row(
    ("found", "listens", "completes"),
    [
        (stage(0), range(8000, 8009), range(8000, 8008)),
        (stage(1), range(8000, 8009), range(8000, 8008)),
        (stage(1, "hybrid"), [8000], [8000]),
        (stage(0, "internal"), [8000], [8000]),
        (stage(1, "internal"), [], []),
        (stage(1, tensor_parallel=8, data_parallel=2), [8000], [8000]),
        (stage(1, nodes=4, tensor_parallel=16, data_parallel=2), [], []),
        (stage(2, nodes=4, tensor_parallel=16, data_parallel=2), [8000], [8000]),
        (stage(1, tensor_parallel=16, data_parallel=1), [], []),
    ],
    ids=[
        "an engine a port, and their supervisor",
        "on every node",
        "a server a node",
        "one server",
        "none",
        "one engine a node",
        "half an engine",
        "the next engine",
        "one engine",
    ],
)
def test_a_stage_listens_where_it_has_servers(found, listens, completes):
    assert found.ports == tuple(listens)
    assert found.servers == tuple(completes)


@each_row(
    ("rank", "arguments", "completes"),
    [
        (0, ("/opt/vllm/bin/vllm serve", "--port 8000"), [8000]),
        (0, ("ray start", "--head"), [8000]),
        (1, ("/opt/vllm/bin/vllm serve", "--port 8000"), [8000]),
        (1, ("/opt/vllm/bin/vllm serve", "--headless"), []),
        (1, ("ray start",), []),
        (
            1,
            (
                "/opt/vllm/bin/vllm serve",
                "--data-parallel-multi-port-external-lb",
                "--data-parallel-size-local 4",
            ),
            [8000, 8001, 8002, 8003],
        ),
    ],
)
def test_what_runs_completes_prompts_where_its_unit_says_so(rank, arguments, completes):
    found = Running("m", 0, "n", ("u",), 8000, rank, arguments=arguments)
    assert found.servers == tuple(completes)


def test_servers_of_one_replica_do_not_get_ports_of_another():
    """Of `a` the first and the second replica have four ports each, `b` the next one."""
    both = [
        endpoint("a", "n1", width=4),
        endpoint("a", "n1", width=4, replica=1),
        endpoint("b", "n1"),
    ]

    assert ports(both, {"n1": declared(a=None, b=None)}) == {"a-0": 8000, "a-1": 8004, "b-0": 8008}


def test_what_has_one_of_its_ports_on_one_of_its_nodes_moves_all_of_them():
    wide = endpoint("a", "n1", "n2", width=4)
    settings = {"n1": declared(a=None), "n2": declared(a=None)}

    assert ports([wide], settings, {"n2": [8002]}) == {"a-0": 8003}


def test_a_port_that_somebody_wrote_is_not_taken_for_a_further_server():
    wide, other = endpoint("a", "n1", width=4), endpoint("b", "n1", declared=8003, explicit=True)

    assert ports([wide, other], {"n1": declared(a=None, b=8003)}) == {"a-0": 8004, "b-0": 8003}


def test_a_port_that_was_written_is_not_the_watchdog_s():
    """Unless nothing is watched there; one that nobody wrote is stepped over."""
    problems, _ = assign_ports(
        [endpoint("a", "n1", declared=8406, explicit=True)], watched(8406), {}
    )
    assert problems == (
        "port 8406 is used by serving.a.port and vllm.watchdog_port on n1: set a "
        "different port for one of them",
    )
    unwatched = watched(8406, mode="off")
    assert ports([endpoint("a", "n1", declared=8406, explicit=True)], unwatched) == {"a-0": 8406}
    assert ports([endpoint("a", "n1", declared=8406)], watched(None)) == {"a-0": 8407}


def test_a_port_that_was_written_is_not_where_releases_are_handed_out():
    problems, _ = assign_ports(
        [endpoint("a", "n1", declared=8790, explicit=True)], watched(8790), {}
    )

    assert problems == (
        "port 8790 is used by serving.a.port and vllm.distribution.port on n1: set a "
        "different port for one of them",
    )


def watched(port, **watchdog):
    data = {"model": "/srv/m", "watchdog": watchdog} | ({"port": port} if port else {})
    return {"n1": NodeSettings.model_validate({"vllm": VLLM, "serving": {"a": data}})}


def test_two_that_were_written_so_that_they_overlap_are_refused_with_the_port():
    both = [
        endpoint("a", "n1", explicit=True, width=4),
        endpoint("b", "n1", declared=8003, explicit=True),
    ]

    problems, _ = assign_ports(both, {"n1": declared(a=8000, b=8003)}, {})

    assert problems == (
        "port 8003 is used by serving.a.port and serving.b.port on n1: set a different port "
        "for one of them",
    )


def test_who_runs_keeps_its_ports_only_if_all_are_free():
    runs = endpoint("a", "n1", width=4, wished=8000)
    settings = {"n1": declared(a=None)}

    assert ports([runs], settings) == {"a-0": 8000}
    assert ports([runs], settings, {"n1": [8003]}) == {"a-0": 8004}


def test_the_last_port_of_a_replica_is_one():
    wide = endpoint("a", "n1", declared=65533, explicit=True, width=4)

    problems, _ = assign_ports([wide], {"n1": declared(a=65533)}, {})

    assert problems == (
        "serving.a.port: the replicas on n1 would need port 65536, but the highest port is 65535: "
        "lower the value",
    )


def test_who_runs_at_the_end_of_all_ports_moves_to_where_there_are_enough():
    runs = endpoint("a", "n1", declared=65532, width=4, wished=65533)

    assert ports([runs], {"n1": declared(a=None)}) == {"a-0": 65532}


def test_a_second_replica_keeps_its_ports_when_the_first_one_is_gone():
    runs = endpoint("a", "n1", width=4, wished=8004, replica=1)
    runs.room = 2

    assert ports([runs], {"n1": declared(a=None)}) == {"a-1": 8004}
