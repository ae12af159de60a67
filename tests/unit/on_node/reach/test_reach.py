"""
The nodes of a replica prove that they reach each other: the real programs, on loopback addresses.

A network namespace of a test's own, where one can be made, has the faults: rules of nftables that
drop one direction, or what is large.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufleet.node.cluster_network import Network
from gpufleet.planning.multinode.reachability import (
    Member,
    ReachabilityResult,
    Replica,
    compare,
    exchange_parameters,
    preflight_parameters,
)
from gpufleet.remote import payload
from gpufleet.remote.facts import document

pytestmark = pytest.mark.slow

NODE_PYTHON = os.environ.get("GPUFLEET_NODE_PYTHON", sys.executable)
SUBNETS = itertools.count(1)


class Fleet:
    """Nodes on one machine: an address each, a release and a model each."""

    def __init__(
        self, folder: Path, nodes: int = 2, *, netns: str = "", user: str = "root"
    ) -> None:
        self.netns = netns
        self.seconds = 3.5
        subnet = f"127.{70 + next(SUBNETS)}.{os.getpid() % 250}"
        self.replica = Replica(
            id="llama-0",
            members=tuple(
                Member(
                    node=f"gpu-0{number}",
                    network=Network("lo", f"{subnet}.{number}"),
                    release="0.33.0-1f2e3d4c5b",
                    release_directory=str(folder / f"release{number}"),
                    vllm="0.33.0",
                    revision="9d1f62ac",
                    model_directory=str(folder / f"model{number}"),
                    user=user,
                )
                for number in range(1, nodes + 1)
            ),
            port=21500,
            ray=False,
        )
        for member in self.replica.members:
            install(Path(member.release_directory), "0.33.0")
            model = Path(member.model_directory)
            model.mkdir()
            (model / "config.json").write_text("{}")
            (model / "model.safetensors").write_bytes(b"w" * 1000)
        self.disguise: dict[str, str] = {}

    def address(self, node: str) -> str:
        return next(m.network.address for m in self.replica.members if m.node == node)

    def ask(self, name: str, given: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Run a program on all nodes at once, as `query.query` does over SSH."""
        within = ["ip", "netns", "exec", self.netns] if self.netns else []
        running = {}
        for node, parameters in given.items():
            started = subprocess.Popen(
                [*within, NODE_PYTHON, "-I", "-"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert started.stdin is not None
            text = payload.program(name, **parameters)
            started.stdin.write(self.disguise.get(node, "") + "".join(text))
            started.stdin.close()
            started.stdin = None
            running[node] = started
        answers = {}
        for node, started in running.items():
            printed, _ = started.communicate(timeout=60)
            answers[node] = document(printed.splitlines(), name)
        return answers

    def prove(self) -> ReachabilityResult:
        began = time.monotonic()
        seen = self.ask("reach/preflight", preflight_parameters(self.replica))
        given = exchange_parameters(self.replica, seen, "token", self.seconds)
        exchanged = self.ask("reach/reach", given)
        return compare(self.replica, seen, exchanged, time.monotonic() - began)


def install(release: Path, vllm: str, ray: str = "") -> None:
    """Make what a release looks like from outside."""
    packages = release / "lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    (packages / f"vllm-{vllm}.dist-info").mkdir()
    if ray:
        (packages / f"ray-{ray}.dist-info").mkdir()
    (release / ".complete").touch()


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


@pytest.fixture
def netns() -> Iterator[str]:
    """A network of its own, in which packets can be lost, and whose packets are not endless."""
    if os.geteuid() != 0:
        pytest.skip("a network namespace needs root")
    name = f"gf-reach-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up", "mtu", "9000"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.fixture
def cuttable(tmp_path: Path, netns: str) -> Fleet:
    return Fleet(tmp_path, netns=netns)


def drop(fleet: Fleet, rule: str) -> None:
    """Lose what a rule of nftables matches."""
    rules = f"table ip f {{ chain c {{ type filter hook input priority 0; {rule}; }}; }}"
    subprocess.run(
        ["ip", "netns", "exec", fleet.netns, "nft", "-f", "-"],
        input=rules,
        text=True,
        check=True,
    )


def test_nodes_that_reach_each_other_have_nothing_to_say(fleet: Fleet) -> None:
    """All ports both ways, full packets both ways, clocks compared; and it ends when it is done."""
    fleet.seconds = 20
    found = fleet.prove()

    assert found.problems == ()
    assert found.remarks == ()
    assert {(way.start, way.end) for way in found.ways} == {
        ("gpu-01", "gpu-02"),
        ("gpu-02", "gpu-01"),
    }
    for way in found.ways:
        assert way.is_good
        assert way.ports == 17
        assert way.bytes == way.wanted == 65535
        assert way.ahead is not None
        assert abs(way.ahead) < 0.5
    assert found.seconds < fleet.seconds


def test_eighteen_nodes_prove_it_to_each_other(tmp_path: Path, netns: str) -> None:
    fleet = Fleet(tmp_path, nodes=18, netns=netns)
    fleet.seconds = 30  # eighteen Pythons on a machine's two cores

    found = fleet.prove()

    assert found.problems == ()
    assert len(found.ways) == 18 * 17


def test_a_cut_in_one_direction_is_named_with_that_direction(cuttable: Fleet) -> None:
    here, there = (cuttable.address(node) for node in cuttable.replica.nodes)
    drop(cuttable, f"ip saddr {here} ip daddr {there} drop")

    (problem,) = cuttable.prove().problems

    assert problem.startswith(
        f"llama-0: no packet from gpu-01 ({here}, lo) arrives at gpu-02 ({there}, lo), while the "
        "other direction works"
    )


def test_a_cut_in_both_directions_is_one_sentence(cuttable: Fleet) -> None:
    here, there = (cuttable.address(node) for node in cuttable.replica.nodes)
    drop(cuttable, f"ip saddr {here} ip daddr {there} drop; ip saddr {there} ip daddr {here} drop")

    (problem,) = cuttable.prove().problems

    assert f"gpu-01 ({here}, lo) and gpu-02 ({there}, lo) do not reach each other" in problem


def test_a_path_that_passes_less_than_the_interfaces_is_named_with_what_passes(
    cuttable: Fleet,
) -> None:
    """Lost without a word, as switches do it; connections come about all the same."""
    drop(cuttable, f"ip saddr {cuttable.address('gpu-02')} meta length > 1500 drop")

    (problem,) = cuttable.prove().problems

    assert "packets of 9000 bytes" in problem
    assert "from gpu-02" in problem
    assert "at gpu-01" in problem
    assert "packets of 1500 bytes arrive" in problem


def test_a_firewall_that_rejects_some_ports_is_named_with_them(cuttable: Fleet) -> None:
    drop(
        cuttable,
        f"ip daddr {cuttable.address('gpu-02')} tcp dport 21503-21505 reject with tcp reset",
    )

    (problem,) = cuttable.prove().problems

    assert "gpu-01" in problem.partition("cannot connect to")[0]
    assert "ports 21503-21505 (Connection refused)" in problem


def test_a_line_that_loses_half_is_said_to_lose_it(cuttable: Fleet) -> None:
    """Some connections come about, others not in time: no port is closed."""
    drop(cuttable, "numgen random mod 100 < 50 drop")
    cuttable.seconds = 5

    problems = cuttable.prove().problems

    assert problems
    assert any("% are lost" in each for each in problems)
    assert not any("open them" in each for each in problems)


def test_datagrams_that_are_blocked_are_named_though_connections_pass(cuttable: Fleet) -> None:
    """Ranks beat by both, and a line that loses much is told from a dead one by datagrams."""
    drop(cuttable, f"ip daddr {cuttable.address('gpu-01')} meta l4proto udp drop")

    (problem,) = cuttable.prove().problems

    assert "no datagram from gpu-02" in problem
    assert "also open UDP for ports 21500-21515" in problem


def test_a_firewall_that_knows_the_replicas_ports_only_is_not_enough(cuttable: Fleet) -> None:
    """vLLM, NCCL and Ray take others that nobody knows beforehand: one stands for all."""
    drop(cuttable, "tcp dport 21500-21515 accept; tcp flags & (syn | ack) == syn drop")

    problems = cuttable.prove().problems

    assert len(problems) == 2
    assert all(
        "ephemeral ports of the system (no answer): open the ports" in each for each in problems
    )


def test_what_many_nodes_miss_of_one_is_one_sentence(tmp_path: Path, netns: str) -> None:
    fleet = Fleet(tmp_path, nodes=4, netns=netns)
    fleet.seconds = 6
    alone = fleet.address("gpu-03")
    drop(fleet, f"ip saddr {alone} ip daddr != {alone} drop; ip daddr {alone} drop")

    (problem,) = fleet.prove().problems

    assert problem == (
        f"llama-0: gpu-03 ({alone}, lo) and gpu-01, gpu-02, gpu-04 do not reach each other: no "
        "packet arrives in either direction"
    )


def test_a_port_of_what_runs_is_left_alone_and_said(fleet: Fleet) -> None:
    """A process that outlived its unit is not killed for a proof, nor is it spoken to."""
    with socket.create_server((fleet.address("gpu-02"), 21502)) as server:
        found = fleet.prove()
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()

    assert {way.ports for way in found.ways if way.end == "gpu-02"} == {16}
    assert found.problems == ()


def test_a_stranger_on_the_port_where_ranks_meet_is_named(fleet: Fleet) -> None:
    with socket.create_server((fleet.address("gpu-02"), 21500)):
        (problem,) = fleet.prove().problems

    assert "gpu-02" in problem
    assert "the ranks of the replica meet at port 21500, but" in problem
    assert f"PID {os.getpid()}" in problem


def test_a_stranger_that_takes_datagrams_there_is_named_too(fleet: Fleet) -> None:
    """What remains is proven by another port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind((fleet.address("gpu-02"), 21500))
        found = fleet.prove()

    (problem,) = found.problems
    assert "the ranks of the replica meet at UDP port 21500, but" in problem
    assert all(way.is_good for way in found.ways)


def test_an_address_that_no_interface_has_any_more_is_named(fleet: Fleet) -> None:
    here, there = fleet.replica.members
    gone = Member(**{**vars(there), "network": Network("lo", "192.0.2.7")})
    fleet.replica = Replica("llama-0", (here, gone), port=21500, ray=False)

    problems = fleet.prove().problems

    assert any(
        "gpu-02 (192.0.2.7, lo): no program can listen on this address: no interface has" in each
        for each in problems
    )


def test_a_clock_that_is_off_is_named_with_both_sides(fleet: Fleet) -> None:
    """The node's whole Python has another time; a millisecond of difference is none."""
    fleet.disguise["gpu-02"] = "import time\nreal = time.time\ntime.time = lambda: real() + 5\n"

    (problem,) = fleet.prove().problems

    assert problem.startswith("llama-0: gpu-02's clock is 5.0 s ahead of gpu-01's")


def test_another_release_is_named_with_both_sides(tmp_path: Path, fleet: Fleet) -> None:
    there = Path(fleet.replica.members[1].release_directory)
    (there / "lib/python3.12/site-packages/vllm-0.33.0.dist-info").rename(
        there / "lib/python3.12/site-packages/vllm-0.32.0.dist-info"
    )

    (problem,) = fleet.prove().problems

    assert "versions of vLLM differ: gpu-01 has 0.33.0, gpu-02 has 0.32.0" in problem


def test_a_release_that_is_not_whole_is_named(fleet: Fleet) -> None:
    Path(fleet.replica.members[1].release_directory, ".complete").unlink()

    (problem,) = fleet.prove().problems

    assert "gpu-02 has no complete release 0.33.0-1f2e3d4c5b" in problem


def test_ray_is_compared_where_ray_joins_the_nodes(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.replica = Replica("llama-0", fleet.replica.members, port=21500, ray=True)
    here, there = (Path(each.release_directory) for each in fleet.replica.members)
    packages = "lib/python3.12/site-packages"
    (here / packages / "ray-2.52.1.dist-info").mkdir()

    problems = fleet.prove().problems

    assert any("gpu-02 has no Ray in" in each for each in problems)
    (there / packages / "ray-2.53.0.dist-info").mkdir()
    (problem,) = fleet.prove().problems
    assert "versions of Ray differ: gpu-01 has 2.52.1, gpu-02 has 2.53.0" in problem


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", b"{ }", "config.json is 2 bytes"),
        ("model.safetensors", b"x" * 1000, "model.safetensors is 1000 bytes"),
        ("tokenizer.json", b"{}", "tokenizer.json is missing on gpu-01 and 2 bytes"),
    ],
)
def test_another_model_is_named_with_the_file_and_both_sides(
    fleet: Fleet, file: str, content: bytes, said: str
) -> None:
    Path(fleet.replica.members[1].model_directory, file).write_bytes(content)

    (problem,) = fleet.prove().problems

    assert problem.startswith("llama-0: gpu-01 and gpu-02 have different models in ")
    assert said in problem


def test_weights_that_were_cut_off_and_filled_up_are_found_by_their_ends(fleet: Fleet) -> None:
    """Too large to be read as a whole, and of the same size."""
    for member, last in zip(fleet.replica.members, (b"w", b"\0"), strict=True):
        with Path(member.model_directory, "model.safetensors").open("wb") as file:
            file.truncate(20 << 20)
            file.seek(-1, os.SEEK_END)
            file.write(last)

    (problem,) = fleet.prove().problems

    assert "model.safetensors is 20971520 bytes" in problem


def test_what_is_beside_a_model_does_not_count(fleet: Fleet) -> None:
    """A reader's notes and a download's leftovers are not loaded."""
    folder = Path(fleet.replica.members[1].model_directory)
    (folder / "README.md").write_text("mine")
    (folder / ".cache").mkdir()
    (folder / ".cache/lock.json").write_text("{}")

    assert fleet.prove().problems == ()


def test_a_model_that_its_account_may_not_read_is_named() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are root's alone
        Path(folder).chmod(0o755)
        fleet = Fleet(Path(folder), user="nobody")
        Path(fleet.replica.members[1].model_directory, "model.safetensors").chmod(0o600)

        (problem,) = fleet.prove().problems

    assert "gpu-02: the model in" in problem
    assert "cannot be read as nobody: no permission" in problem


def test_a_missing_model_is_named(fleet: Fleet) -> None:
    folder = Path(fleet.replica.members[1].model_directory)
    folder.rename(folder.with_name("elsewhere"))

    (problem,) = fleet.prove().problems

    assert f"gpu-02: the model in {folder} cannot be read as root: absent" in problem


def test_whoever_does_not_know_the_token_is_not_answered(fleet: Fleet) -> None:
    """Ports are open for seconds only, and say nothing to strangers."""
    seen = fleet.ask("reach/preflight", preflight_parameters(fleet.replica))
    given = exchange_parameters(fleet.replica, seen, "token", 3)
    stranger = {**given["gpu-02"], "token": "another"}

    found = fleet.ask("reach/reach", {"gpu-01": given["gpu-01"], "gpu-02": stranger})

    assert all(found["gpu-01"]["connected"]["gpu-02"].values())
    assert found["gpu-01"]["heard"] == {}


def test_a_node_that_does_not_answer_is_named_and_the_others_are_still_proven(
    tmp_path: Path,
) -> None:
    fleet = Fleet(tmp_path, nodes=3)
    seen: dict[str, Any] = fleet.ask("reach/preflight", preflight_parameters(fleet.replica))
    seen["gpu-03"] = "no answer within 8 s"
    given = exchange_parameters(fleet.replica, seen, "token", fleet.seconds)

    found = compare(fleet.replica, seen, fleet.ask("reach/reach", given))

    assert found.problems == ("llama-0: gpu-03: no answer within 8 s",)
    assert len(found.ways) == 2
