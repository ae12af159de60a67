"""
Nothing of a replica over nodes restarts unless its nodes reach each other: real units on two nodes.

Only vLLM is not there: a program listens in its place.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpufleet.artifacts.release import Release, release
from gpufleet.settings.serving_settings import Vllm
from lab.nodes import Lab
from lab.state import LabState
from tests.lab.conftest import ROOT, Fleet, Run
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfre")
NODES = {"gpu-01": "t4x1", "gpu-02": "t4x1"}
DEPLOY = str(Path(__file__).with_name("reach_alone.py"))
UNIT = "vllm-tiny-0.service"
PACKAGES = "lib/python3.12/site-packages"
PROOF = "nodes of a replica reach each other"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    lab = Lab.open(LAB_ID, print)
    lab.purge()  # what a killed run left
    lab.up(NODES)
    project = tmp_path_factory.mktemp("reachability")
    shutil.copytree(ROOT / "inventories", project / "inventories")
    (project / "group_vars").mkdir()
    fleet = Fleet(Lab.open(LAB_ID, print), project)
    write(fleet)
    for node in NODES:
        install(fleet, node)
    yield fleet
    lab.purge()


def write(fleet: Fleet, **tiny: Any) -> Release:
    secrets = LabState.load(LAB_ID).dir / "secrets"
    vllm = {
        "version": "0.32.0",
        "device": "cpu",
        "lock": str(ROOT / "locks/vllm-0.32.0.txt"),
        "uv_lock": str(ROOT / "locks/uv.txt"),
        "api_key_file": str(secrets / "api-key"),
        "cluster_key_file": str(secrets / "cluster-key"),
        "allow_unguarded_ports": True,
    }
    own = {
        "model": "/srv/tiny",
        "tensor_parallel": 1,
        "pipeline_parallel": 2,
        "span_nodes": True,
        "drain_seconds": 1,
        **tiny,
    }
    path = fleet.project / "group_vars/lab.yml"
    path.write_text(yaml.safe_dump({"vllm": vllm, "serving": {"tiny": own}}))
    wanted = Vllm.model_validate(vllm)
    return release(wanted, Path(wanted.lock).read_bytes(), Path(wanted.uv_lock).read_bytes())


def weights(data: str) -> str:
    """Return the command that prints a safetensors file without tensors, and some data."""
    return f"printf '\\2\\0\\0\\0\\0\\0\\0\\0{{}}{data}'"


def install(fleet: Fleet, node: str) -> None:
    """Put what looks like a release and a model on a node."""
    directory = write(fleet).directory
    program = f"{directory}/bin/vllm"
    fleet.ssh(
        node,
        f"mkdir -p {directory}/bin {directory}/{PACKAGES}/vllm-0.32.0.dist-info /srv/tiny && "
        f"cat > {program} && chmod 755 {program} && touch {directory}/.complete && "
        f"{weights('weights')} > /srv/tiny/model.safetensors && "
        f"echo '{json.dumps(CONFIG)}' > /srv/tiny/config.json",
        stdin=Path(__file__).with_name("stand_in.py").read_text(),
    )


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def deploy(fleet: Fleet, *arguments: str) -> Run:
    return fleet.pyinfra(*(arguments or ("-y", "--json")), deploy=DEPLOY, seconds=300)


def reach(fleet: Fleet) -> tuple[int, dict[str, Any]]:
    """Return the status of `gpufleet reach` and what it says of the replica."""
    command = [str(Path(sys.executable).with_name("gpufleet")), "reach", fleet.inventory, "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env=fleet.env(), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout, done.stderr
    (found,) = json.loads(done.stdout)
    return done.returncode, found


def rules(fleet: Fleet, node: str, rule: str) -> None:
    """Lose on a node what a rule matches; "" loses nothing any more."""
    lost = f"table ip lost {{ chain c {{ type filter hook input priority 0; {rule}; }}; }}"
    text = f"table ip lost\ndelete table ip lost\n{lost if rule else ''}\n"
    namespace = LabState.load(LAB_ID).netns(node)
    subprocess.run(
        ["ip", "netns", "exec", namespace, "nft", "-f", "-"], input=text, text=True, check=True
    )


def files(fleet: Fleet) -> list[str]:
    return [fleet.ssh(node, f"cat /etc/systemd/system/{UNIT}") for node in NODES]


def test_a_replica_starts_once_its_nodes_have_proven_that_they_reach_each_other(
    pair: Fleet,
) -> None:
    """Foretold by a dry run; and no proof is asked for when nothing is to start."""
    foretold = deploy(pair, "--dry", "--json")
    assert any(PROOF in name for name in foretold.changed), foretold.output
    assert "would first test for tiny-0 whether gpu-01 and gpu-02" in foretold.output
    status, found = reach(pair)
    assert (status, found["problems"]) == (0, [])
    assert {(way["from"], way["to"]) for way in found["ways"]} == {
        ("gpu-01", "gpu-02"),
        ("gpu-02", "gpu-01"),
    }
    assert {way["packet_bytes"] for way in found["ways"]} == {1500}

    run = deploy(pair)
    assert run.status == 0, run.output
    assert "tiny-0: 2 nodes reach each other" in run.output
    assert set(pair.pids()) == {f"{node} {UNIT}" for node in NODES}

    again = deploy(pair)
    assert again.changed == {}


def test_what_runs_is_asked_for_the_ports_that_it_does_not_use(pair: Fleet) -> None:
    """The ports of the ranks that run are left alone, and nothing of theirs ends."""
    before = pair.pids()

    status, found = reach(pair)

    assert (status, found["problems"]) == (0, [])
    assert any("because running programs use these ports" in each for each in found["remarks"])
    assert pair.pids() == before


@pytest.mark.parametrize("fault", ["one direction", "MTU", "clock", "model"])
def test_a_restart_is_refused_on_both_nodes_and_what_runs_runs_on(pair: Fleet, fault: str) -> None:
    """The sentence names both sides; no unit's file is another afterwards, either."""
    state = LabState.load(LAB_ID)
    here, there = (pair.address(node) for node in NODES)
    port = state.port(state.node("gpu-02"))
    clock = "/usr/lib/python3/dist-packages/ahead.pth"
    if fault == "one direction":
        # Not all ports: those of the group that runs would end it.
        rules(pair, "gpu-02", f"ip saddr {here} tcp dport 29515 drop")
        said = f"gpu-01 ({here}, "
        more = "port 29515 (no answer)"
    elif fault == "MTU":
        subprocess.run(["ip", "link", "set", port, "mtu", "1400"], check=True)
        said = f"arrive from gpu-02 ({there}, "
        more = "packets of 1500 bytes"
    elif fault == "model":
        pair.ssh("gpu-02", f"{weights('others')} > /srv/tiny/model.safetensors")
        said = "gpu-01 and gpu-02 have different models in /srv/tiny: model.safetensors"
        more = "copy the same files to both"
    else:
        # Nodes share this machine's clock: this one's Pythons are told another time.
        ahead = "import time; time.time = (lambda real: lambda: real() + 5)(time.time)"
        pair.ssh("gpu-02", f"echo '{ahead}' > {clock}")
        said = "gpu-02's clock is 5.0 s ahead of gpu-01's"
        more = "the same time servers"
    pids, units = pair.pids(), files(pair)
    write(pair, flags={"seed": 7})
    try:
        run = deploy(pair)
        assert run.status != 0
        assert said in run.output
        assert more in run.output
        assert run.output.count("tiny-0 stays unchanged on all its nodes") == 2
        assert pair.pids() == pids
        assert files(pair) == units
    finally:
        rules(pair, "gpu-02", "")
        subprocess.run(["ip", "link", "set", port, "mtu", "1500"], check=True)
        pair.ssh("gpu-02", f"rm -f {clock}; {weights('weights')} > /srv/tiny/model.safetensors")


def test_nothing_restarts_beside_a_node_that_failed_before(pair: Fleet) -> None:
    """Its rank would go on with what the others have no more."""
    folder = "/usr/local/libexec/gpufleet"
    pair.ssh("gpu-02", f"cd {folder} && mv vllm-serve kept && mkdir vllm-serve")
    pids = pair.pids()
    write(pair, flags={"seed": 7})
    try:
        run = deploy(pair)
        assert run.status != 0
        assert "tiny-0: gpu-02 failed earlier in this run" in run.output
        assert pair.pids() == pids
    finally:
        pair.ssh("gpu-02", f"cd {folder} && rmdir vllm-serve && mv kept vllm-serve")


def test_once_it_is_put_right_the_same_deploy_goes_through(pair: Fleet) -> None:
    """And the new argument is what both ranks run with."""
    pids = pair.pids()
    write(pair, flags={"seed": 7})

    run = deploy(pair)

    assert run.status == 0, run.output
    assert set(pair.pids().values()).isdisjoint(pids.values())
    assert all("--seed 7" in each for each in files(pair))
    assert deploy(pair).changed == {}
