"""One replica over two nodes, by the main deploy, with only group_vars changed; real vLLM on CPU.

Each node has one GPU that is not reserved, so two of anything span both. Whatever is cut between
them, and whatever joins them, answers what one node alone answers by greedy decoding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import yaml

from tests.lab.conftest import Fleet, standing
from tests.lab.group_faults import Client, Replica, killed, suffer
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfr")
NODES = ("gpu-01", "gpu-02")
UNIT = "vllm-tiny-0.service"
PROMPTS = ("Hello", "The quick brown fox", "0123456789", "\n\n{")
TOKENS = 16
# CPU's eager mode skips the warm-up that a pipeline needs (measured with 0.32.0).
COMPILATION = {"mode": 2, "backend": "eager"}


@dataclass(frozen=True)
class Shape:
    """How one replica is cut, and what joins the parts."""

    backend: str
    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    def __str__(self) -> str:
        cut = {"TP": self.tensor, "PP": self.pipeline, "DP": self.data}
        spoken = " ".join(f"{name}{size}" for name, size in cut.items() if size > 1)
        return f"{spoken} {self.backend}"


QUICK = (Shape("mp", pipeline=2), Shape("ray", tensor=2), Shape("mp", data=2))
FURTHER = (Shape("ray", pipeline=2), Shape("mp", tensor=2), Shape("ray", data=2))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with standing(LAB_ID, dict.fromkeys(NODES, "h100x8"), tmp_path_factory.mktemp("pair")) as found:
        yield found


@pytest.fixture(scope="module")
def alone(pair: Fleet) -> list[str]:
    """What one process on one node answers."""
    declare(pair)
    deploy(pair)
    assert set(pair.pids()) == {f"gpu-01 {UNIT}"}
    return answers(pair)


def declare(fleet: Fleet, shape: Shape | None = None) -> None:
    """Write group_vars: one replica on one node, or of a shape that takes both."""
    fleet.reset()
    path = fleet.project / "group_vars/lab.yml"
    data = yaml.safe_load(path.read_text())
    del data["dcgm"]  # which other tests deploy
    data["gpus"] = {"reserved": list(range(1, 8))}
    tiny = data["serving"]["tiny"]
    del tiny["flags"]["enforce-eager"]
    tiny["flags"]["compilation-config"] = COMPILATION
    tiny |= {"replicas": 1, "tensor_parallel": 1}
    if shape:
        tiny |= {
            "span_nodes": True,
            "distributed_executor_backend": shape.backend,
            "tensor_parallel": shape.tensor,
            "pipeline_parallel": shape.pipeline,
            "data_parallel": shape.data,
        }
    path.write_text(yaml.safe_dump(data))


def deploy(fleet: Fleet) -> None:
    run = fleet.pyinfra("-y", seconds=1200)
    assert run.status == 0, run.output


def answers(fleet: Fleet) -> list[str]:
    client = openai.OpenAI(
        base_url=f"http://{fleet.address('gpu-01')}:8000/v1", api_key=fleet.key, timeout=60
    )
    return [
        client.completions.create(model="tiny", prompt=prompt, max_tokens=TOKENS, temperature=0)
        .choices[0]
        .text
        for prompt in PROMPTS
    ]


def rank(fleet: Fleet, node: str) -> dict[str, Any]:
    """Return what the rank's program of a node says of itself."""
    found: dict[str, Any] = json.loads(fleet.ssh(node, "cat /run/vllm/tiny-0/rank.json"))
    return found


def answers_as_one_node_does(pair: Fleet, alone: list[str], shape: Shape) -> None:
    declare(pair, shape)
    deploy(pair)
    before = pair.pids()
    assert set(before) == {f"{node} {UNIT}" for node in NODES}
    head, worker = (rank(pair, node) for node in NODES)
    assert head["phase"] == worker["phase"] == "running"
    # Each node notes by its own clock when it took part.
    ours, theirs = ({**each["incarnation"], "since": 0} for each in (head, worker))
    assert ours == theirs

    assert answers(pair) == alone
    stood = pair.gpufleet("status", pair.inventory, "--json")
    assert stood.status == 0, stood.output
    (replica,) = json.loads(stood.stdout)["replicas"]
    assert [each["state"] for each in replica["ranks"]] == ["serves", "runs"]
    if shape.data > 1:
        assert engines_that_served(pair) == {"0", "1"}

    again = pair.pyinfra("-y", "--json")
    assert again.status == 0, again.output
    assert again.changed == {}
    assert pair.pids() == before
    assert rank(pair, "gpu-01")["incarnation"] == head["incarnation"]


@pytest.mark.long
@pytest.mark.parametrize("shape", QUICK, ids=str)
def test_a_replica_over_two_nodes_answers_as_one_node_does(
    pair: Fleet, alone: list[str], shape: Shape
) -> None:
    answers_as_one_node_does(pair, alone, shape)
    if shape.pipeline > 1:
        all_ranks_end_with_one_and_serve_again(pair, shape)
    if shape.data > 1:
        assert engines_that_served(pair) == {"0", "1"}
    if shape.backend == "ray":
        strangers_get_nothing_of_ray(pair)


@pytest.mark.long
@pytest.mark.parametrize("shape", FURTHER, ids=str)
def test_further_replicas_over_two_nodes_answer_as_one_node_does(
    pair: Fleet, alone: list[str], shape: Shape
) -> None:
    answers_as_one_node_does(pair, alone, shape)


def all_ranks_end_with_one_and_serve_again(fleet: Fleet, shape: Shape) -> None:
    """One of the faults of test_group_faults.py, which takes them all."""
    killing = killed("the worker's `vllm serve`", "gpu-02", "vllm serve")
    with Client(fleet.address("gpu-01"), fleet.key) as client:
        suffer(Replica(fleet, shape.backend), client, killing)


def engines_that_served(fleet: Fleet) -> set[str]:
    metrics = fleet.ssh("gpu-01", "curl -sS http://127.0.0.1:8000/metrics")
    counted = re.findall(
        r'^vllm:generation_tokens_total\{engine="(\d+)".*\} ([0-9.e+]+)$', metrics, re.MULTILINE
    )
    return {engine for engine, tokens in counted if float(tokens) > 0}


def strangers_get_nothing_of_ray(fleet: Fleet) -> None:
    """Ray runs what it is told: without the token nobody tells it, and nobody looks in."""
    address, ports = fleet.address("gpu-01"), rank(fleet, "gpu-01")["incarnation"]
    listening = re.findall(
        r"^LISTEN +\d+ +\d+ +(\S+):(\d+) ", fleet.ssh("gpu-01", "ss -Hltn"), re.MULTILINE
    )
    heard = {(local, int(port)) for local, port in listening}
    # The client server is where we put it, on the cluster's address, and there is no dashboard
    # and nobody who tells figures.
    client = {local for local, port in heard if port == ports["rpc_port"]}
    assert client == {f"[::ffff:{address}]", "[::ffff:127.0.0.1]"}
    assert not {8265, 10001, 44217} & {port for _, port in heard}

    head = f"{address}:{ports['master_port']}"
    assert not healthy(fleet, head, "RAY_AUTH_MODE=disabled")
    assert not healthy(fleet, head, f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN={'0' * 64}")
    token = "/etc/vllm/credentials/ray-token"
    assert healthy(fleet, head, f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={token}")


def healthy(fleet: Fleet, head: str, variables: str) -> bool:
    """Say whether Ray's head answers the other node, as root and with these variables."""
    program = f"$(grep -om1 '/opt/vllm/releases/[^/]*/bin/ray' /etc/systemd/system/{UNIT})"
    asked = f"cd / && {variables} {program} health-check --address {head}"
    said = fleet.ssh("gpu-02", f"{{ {asked}; }} 2>&1; echo status $?", seconds=120)
    refused = "InvalidAuthToken" in said
    assert refused != said.endswith("status 0\n"), said
    return not refused
