"""Models that do not complete text, on nodes: deployed, asked by plain HTTP, upgraded and back.

Tests run in the order in which they stand: each takes the fleet as the one before left it.
"""

from __future__ import annotations

import json
import math
import operator
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from lab import fake_hub, package_mirror, tiny_kinds
from tests.lab.upgrade_fleet import FLAGS, NEW, UpgradeFleet, upgrade_fleet
from tests.support.checkout import own_lab

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

NODES = ("gpu-01", "gpu-02")
REPLICAS: dict[tiny_kinds.Kind, int] = {"embed": 2, "rerank": 1, "classify": 1}
SEQUENCES = "max-num-seqs"


@dataclass
class KindsFleet(UpgradeFleet):
    """Two nodes of two GPUs each, and a model of each kind."""

    first: str = NEW

    def lay_out(self) -> None:
        super().lay_out()
        tiny = self.wanted["serving"].pop("tiny")
        flags = {**FLAGS, "max-model-len": 256}
        hub = self.state.dir / package_mirror.MODELS
        for kind, replicas in REPLICAS.items():
            name = f"lab/tiny-{kind}"
            revision = fake_hub.revision_of(tiny_kinds.write(hub / name, kind))
            own = {"model": name, "revision": revision, "replicas": replicas, "flags": flags}
            self.wanted["serving"][kind] = {**tiny, **own}
        self.declare(gpus={"reserved": []})

    def set_flag(self, model: str, name: str, value: Any) -> None:
        """Declare a flag of a model."""
        served = self.wanted["serving"][model]
        flags = {**served["flags"], name: value}
        self.declare(serving={model: {**served, "flags": flags}})

    def urls(self, model: str) -> list[str]:
        """Return where a model's replicas answer, as their units on the nodes say."""
        find = f"grep -h ^Port= /etc/systemd/system/vllm-{model}-*.service 2>/dev/null; :"
        return [
            f"http://{self.address(node)}:{line.partition('=')[2]}"
            for node in NODES
            for line in self.ssh(node, find).split()
        ]

    def ask(self, model: str, path: str, **body: Any) -> list[Any]:
        """Return what each replica of a model answers to a request of plain HTTP."""
        head = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        found = []
        for url in self.urls(model):
            data = json.dumps({"model": model, **body}).encode()
            request = urllib.request.Request(url + path, data, head)
            with urllib.request.urlopen(request, timeout=60) as answer:
                found.append(json.load(answer))
        return found

    def deployed(self) -> str:
        """Run the main deploy to its end and return what it changed."""
        run = self.pyinfra("-y", "--json", seconds=1800)
        assert run.status == 0, run.output
        return json.dumps(run.changed)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KindsFleet]:
    project = tmp_path_factory.mktemp("kinds")
    with upgrade_fleet(own_lab("gfmk"), project, NODES, also=(), kind=KindsFleet) as found:
        yield found


def test_a_deploy_ends_when_a_model_of_each_kind_answers(kinds: KindsFleet) -> None:
    run = kinds.pyinfra("-y", seconds=1800)
    assert run.status == 0, run.output

    vectors = [each["data"][0]["embedding"] for each in kinds.ask(
        "embed", "/v1/embeddings", input="Hello")]  # fmt: skip
    assert len(vectors) == REPLICAS["embed"]
    for vector in vectors:
        assert len(vector) == tiny_kinds.HIDDEN
        assert math.dist(vector, [0] * len(vector)) == pytest.approx(1, abs=1e-3)
    [ranked] = kinds.ask("rerank", "/rerank", query="Hello", documents=["Hello", "Goodbye"])
    assert {row["index"] for row in ranked["results"]} == {0, 1}
    [said] = kinds.ask("classify", "/classify", input="Where is my parcel?")
    assert said["data"][0]["label"] in tiny_kinds.LABELS["classify"]


def test_their_units_say_what_they_are(kinds: KindsFleet) -> None:
    cat = "cat /etc/systemd/system/vllm-*.service"
    lines = [line.strip(" \\") for node in NODES for line in kinds.ssh(node, cat).splitlines()]
    assert lines.count("--runner pooling") == sum(REPLICAS.values())
    for kind, replicas in REPLICAS.items():
        assert lines.count(f"Kind={kind}") == replicas


def test_a_second_run_changes_nothing(kinds: KindsFleet) -> None:
    before = kinds.pids()
    assert kinds.deployed() == "{}"
    assert kinds.pids() == before


def test_status_and_verify_ask_each_by_its_kind(kinds: KindsFleet) -> None:
    status = kinds.gpufleet("status", kinds.inventory, "--completion", "--json", seconds=200)
    assert status.status == 0, status.output
    said = {each["replica"]: each for each in json.loads(status.stdout)["replicas"]}
    assert {name: each["state"] for name, each in said.items()} == dict.fromkeys(said, "serves")
    assert {name.rpartition("-")[0] for name in said} == set(REPLICAS)

    run = kinds.pyinfra("-y", deploy="deploys/verify.py", seconds=600)
    # Each problem of a stage begins with its unit; there may be some of exporters.
    assert not re.search(r"vllm-\w+-\d+\.service: ", run.output), run.output


def test_a_vector_that_is_not_the_models_is_refused(kinds: KindsFleet) -> None:
    """What a server answers is compared with what the model's files on its node say."""
    node = NODES[0]
    unit = kinds.ssh(node, "ls /etc/systemd/system/ | grep 'vllm-embed.*service$'").split()[0]
    named = "sed -n 's/^RequiresMountsFor=//p' /etc/systemd/system/" + unit
    pooling = kinds.ssh(node, named).strip() + "/1_Pooling/config.json"
    right = kinds.ssh(node, f"cat {pooling}")
    wrong = right.replace(str(tiny_kinds.HIDDEN), "96")
    kinds.ssh(node, f"cat > {pooling}", stdin=wrong)
    try:
        status = kinds.gpufleet("status", kinds.inventory, "--completion", seconds=200)
    finally:
        kinds.ssh(node, f"cat > {pooling}", stdin=right)
    assert status.status != 0
    assert "an embedding fails" in status.output, status.output
    assert "128 numbers, and the model's files say 96" in " ".join(status.output.split())


def test_an_upgrade_of_an_embedder_compares_vectors_and_is_rolled_back(kinds: KindsFleet) -> None:
    for deploy in ("deploys/gateway.py", "deploys/monitoring.py"):
        run = kinds.pyinfra("-y", deploy=deploy, seconds=900)
        assert run.status == 0, run.output
    first = kinds.ask("embed", "/v1/embeddings", input="Hello")
    kinds.set_flag("embed", SEQUENCES, 4)
    done = kinds.upgrade()
    assert done.returncode == 0, done.stdout
    judged = [entry["said"] for entry in kinds.noted("judged")]
    golden = [said for said in judged if said["gate"] == "golden"]
    assert len(golden) == REPLICAS["embed"]
    assert all(said["passed"] for said in golden), golden
    assert seqs(kinds) == ["4"] * REPLICAS["embed"]

    process = kinds.begin("rollback")
    assert process.wait(timeout=1500) == 0, kinds.said()
    assert seqs(kinds) == [str(FLAGS[SEQUENCES])] * REPLICAS["embed"]
    last = kinds.ask("embed", "/v1/embeddings", input="Hello")
    for one, other in zip(first, last, strict=True):
        pair = one["data"][0]["embedding"], other["data"][0]["embedding"]
        assert sum(map(operator.mul, *pair)) >= 0.999


def seqs(fleet: KindsFleet) -> list[str]:
    """Return the flag's value in the units of the embedder."""
    find = f"grep -h -- --{SEQUENCES} /etc/systemd/system/vllm-embed-*.service; :"
    return [
        line.split()[1] for node in NODES for line in fleet.ssh(node, find).splitlines() if line
    ]
