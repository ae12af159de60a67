"""
Every fault of a replica over two nodes: found in time, all ranks end, and it serves again.

`make test-long` writes docs/measured/group-faults.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.conftest import Fleet, standing
from tests.lab.group_faults import Client, Fault, Replica, Seen, killed, suffer
from tests.lab.test_replicas_over_nodes import Shape, declare, deploy
from tests.support.checkout import own_lab
from tests.support.measured import note

LAB_ID = own_lab("gff")
HEAD, WORKER = "gpu-01", "gpu-02"
# vLLM looks after its own processes every few seconds; this much is not ours.
VLLM_NOTICES = 15
SHAPES = (Shape("mp", pipeline=2), Shape("ray", tensor=2))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two nodes, on which the replica is to be deployed."""
    with standing(
        LAB_ID, {HEAD: "h100x8", WORKER: "h100x8"}, tmp_path_factory.mktemp("pair")
    ) as found:
        yield found


@pytest.fixture(scope="module")
def replica(pair: Fleet, request: pytest.FixtureRequest) -> Replica:
    """A replica over both nodes, with one GPU of each; its starts are never held up."""
    declare(pair, request.param)
    deploy(pair)
    found = Replica(pair, request.param.backend)
    found.unpause()
    return found


@pytest.fixture
def client(replica: Replica) -> Iterator[Client]:
    with Client(replica.fleet.address(HEAD), replica.fleet.key) as asking:
        yield asking


def off(name: str, node: str) -> Fault:
    return Fault(
        f"{name} loses power",
        lambda replica: replica.fleet.lab.power(node, "off"),
        lambda replica: replica.fleet.lab.power(node, "on"),
        silent=True,
    )


def net(name: str, *harm: tuple[str, str], lasts: float = 0) -> Fault:
    def strike(replica: Replica) -> None:
        for node, action in harm:
            replica.fleet.lab.net(node, action)

    def mend(replica: Replica) -> None:
        for node, _ in harm:
            replica.fleet.lab.net(node, "heal")

    return Fault(name, strike, mend, silent=not lasts, lasts=lasts)


PROGRAMS = [
    killed("the head's rank program", HEAD),
    killed("the worker's rank program", WORKER),
]
OF_VLLM = [
    killed("the head's `vllm serve`", HEAD, "vllm serve"),
    killed("the head's engine", HEAD, "VLLM::EngineCore", notices=VLLM_NOTICES),
    killed("the head's GPU process", HEAD, "VLLM::Worker", notices=VLLM_NOTICES),
    killed("the worker's `vllm serve`", WORKER, "vllm serve"),
    killed("the worker's GPU process", WORKER, "VLLM::Worker", notices=VLLM_NOTICES),
]
OF_RAY = [
    killed("the head's `vllm serve`", HEAD, "vllm serve"),
    killed("Ray's head (`ray start`)", HEAD, "ray start"),
    killed("Ray's head (its GCS)", HEAD, "gcs_server", notices=VLLM_NOTICES),
    killed("Ray's worker (`ray start`)", WORKER, "ray start"),
    killed("Ray's worker (its raylet)", WORKER, "raylet", notices=VLLM_NOTICES),
]
OF_NODES = [
    off("the head", HEAD),
    off("the worker", WORKER),
    net("the head's cable is pulled", (HEAD, "cut")),
    net("the worker's cable is pulled", (WORKER, "cut")),
    net("the worker hears nothing of the head", (WORKER, f"deaf {HEAD}")),
    net("the head hears nothing of the worker", (HEAD, f"deaf {WORKER}")),
    net("30 % of the worker's packets are lost", (WORKER, "loss 30"), lasts=60),
    net("200 ms delay each way to the worker", (WORKER, "delay 200"), lasts=45),
]
FAULTS = {"mp": [*PROGRAMS, *OF_VLLM, *OF_NODES], "ray": [*PROGRAMS, *OF_RAY, *OF_NODES]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("replica", "fault"),
    [
        pytest.param(shape, fault, id=f"{shape}: {fault.name}")
        for shape in SHAPES
        for fault in FAULTS[shape.backend]
    ],
    indirect=["replica"],
)
def test_whatever_breaks_all_ranks_end_in_time_and_serve_again(
    replica: Replica, client: Client, fault: Fault
) -> None:
    write(suffer(replica, client, fault))


def write(seen: Seen) -> None:
    """Write a fault's row of docs/measured/group-faults.md."""
    fault = seen.fault

    def within(seconds: float | None, bound: int) -> str:
        return "none" if seconds is None else f"{seconds:.1f} s ({bound} s)"

    note(
        "measured/group-faults.md",
        seen.backend,
        fault.name,
        within(seen.found, fault.found_within),
        within(seen.outlived, fault.ended_within),
        "never stopped" if seen.again is None else f"{seen.again:.0f} s",
        seen.clients,
        seen.why,
        key=2,
    )
