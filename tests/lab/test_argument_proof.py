"""
What a release does not take never stops a server that runs: on nodes that serve all the while.

A client asks both endpoints for completions as fast as they answer, from before the deploy until
after it; it may not see one failure. The release with another parser is a real one: the wheel that
the lab serves, with one flag renamed in its source, packed again under a version that no table
knows, locked with its hash and built on the nodes like any other.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, Self

import pytest
import yaml

from gpufleet.flags import schema
from tests.lab import made_release
from tests.lab.conftest import Fleet
from tests.lab.faults import declared
from tests.lab.made_release import ON_NODE, RENAMED

NODES = ("gpu-01", "gpu-02")
OTHER = "99.0.0"  # newer than any release: what no table knows, only its own files can tell


class Client:
    """Asks every endpoint for completions until told to stop; counts what it got."""

    def __init__(self, fleet: Fleet) -> None:
        self.served = dict.fromkeys(NODES, 0)
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(node, fleet.address(node), fleet.key))
            for node in NODES
        ]

    def _ask(self, node: str, address: str, key: str) -> None:
        body = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 4}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        url = f"http://{address}:8000/v1/completions"
        while not self._stop.is_set():
            try:
                asked = urllib.request.Request(url, body, headers)
                with urllib.request.urlopen(asked, timeout=60) as answer:
                    done = json.load(answer)
                assert done["usage"]["completion_tokens"] >= 1, done
                self.served[node] += 1
            except (OSError, ValueError, KeyError, AssertionError) as error:
                self.failures.append(f"{node}: {type(error).__name__}: {error}")
            time.sleep(0.5)  # two cores hold the fleet, the deploy and this

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=90)

    def was_served(self) -> None:
        """Hold that every request was answered, and that there were some."""
        assert self.failures == []
        assert min(self.served.values()) > 0, self.served


def arguments(fleet: Fleet, **more: Any) -> None:
    """Give the model further arguments."""
    fleet.set({"tiny": {"flags": {**declared("tiny")["flags"], **more}}})


def proofs(fleet: Fleet, node: str) -> dict[str, str]:
    """Return the proofs beside every release of a node, {path: content}, as the node has them."""
    listed = fleet.ssh(node, "ls /opt/vllm/releases/*/.accepts/*.json 2>/dev/null || true")
    return {path: fleet.ssh(node, f"cat {path}") for path in listed.split()}


def test_a_flag_that_is_gone_is_refused_before_the_first_operation(fleet: Fleet) -> None:
    """It names the line that was written, the release that dropped it, and what there is now."""
    before = fleet.pids()
    arguments(fleet, **{"swap-space": 4})
    path = fleet.project / "group_vars/lab.yml"
    line = 1 + next(n for n, text in enumerate(path.read_text().splitlines()) if "swap" in text)
    with Client(fleet) as client:
        runs = [fleet.pyinfra("-y"), fleet.pyinfra("--dry")]
    for run in runs:
        assert run.status == 1, run.output
        assert f"group_vars/lab.yml:{line}: serving.tiny.flags.swap-space: " in run.output
        for said in ("0.32.0", "since 0.18.0", "remove it", "--kv-offloading-size"):
            assert said in run.output
        assert run.output.count("serving.tiny.flags.swap-space") == 1
        assert "Starting operation" not in run.output
        assert "Traceback" not in run.output
    client.was_served()
    assert fleet.pids() == before


@pytest.mark.long
def test_what_a_stage_runs_with_was_accepted_and_is_written_beside_its_release(
    fleet: Fleet,
) -> None:
    """The proof has the very command line of the process that serves, and is asked for once."""
    for name, pid in fleet.pids().items():
        node, unit = name.split()
        argv = fleet.ssh(node, f"tr '\\0' '\\n' </proc/{pid}/cmdline").rstrip("\n").split("\n")
        release = next(word for word in argv if word.endswith("/bin/vllm"))
        stage = unit.removeprefix("vllm-").removesuffix(".service")
        (found,) = proofs(fleet, node).items()
        assert found[0] == release.replace("/bin/vllm", f"/.accepts/{stage}.json")
        assert json.loads(found[1])["arguments"] == argv[argv.index("serve") + 1 :]

    before = fleet.pids()
    arguments(fleet, **{"max-num-seqs": 7})
    foretold = fleet.pyinfra("--dry", "--json")
    assert any("accepts its flags" in name for name in foretold.changed)
    assert fleet.pids() == before
    run = fleet.pyinfra("-y", "--json")
    assert run.status == 0, run.output
    assert any("accepts its flags" in name for name in run.changed)
    again = fleet.pyinfra("-y", "--json")
    assert again.changed == {}


@pytest.fixture(scope="module")
def other(deployed: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """`vllm` of group_vars for the release whose parser has another name for one flag."""
    folder = tmp_path_factory.mktemp("wheels")
    made, lock = made_release.make(folder, OTHER, RENAMED)
    config = str(deployed.state.ssh_config)
    for node in NODES:
        deployed.ssh(node, f"mkdir -p {ON_NODE}")
        command = ["scp", "-q", "-F", config, *map(str, made), f"{node}:{ON_NODE}/"]
        subprocess.run(command, check=True, timeout=300)
    written = yaml.safe_load((deployed.state.dir / "group_vars/lab.yml").read_text())
    vllm = dict(written["vllm"])
    vllm |= {"version": OTHER, "lock": str(lock)}
    vllm["find_links"] = [*vllm["find_links"], ON_NODE]
    yield vllm
    for node in NODES:
        deployed.ssh(node, f"rm -rf {ON_NODE} /opt/vllm/releases/{OTHER}-*", seconds=120)
    shutil.rmtree(folder)


@pytest.mark.long  # two nodes build a second release while they serve: minutes
def test_an_upgrade_whose_parser_lacks_a_flag_stops_before_any_restart(
    fleet: Fleet, other: dict[str, Any]
) -> None:
    """The release has to be built before it can be asked; what served goes on serving."""
    assert OTHER not in schema.versions()
    upgrade = ("--data", f"vllm={json.dumps(other)}")
    before = fleet.pids()
    units = {node: fleet.ssh(node, "cat /etc/systemd/system/vllm-*.service") for node in NODES}

    foretold = fleet.pyinfra("--dry", *upgrade)
    assert foretold.status == 0, foretold.output
    assert f"would check whether release {OTHER}-" in foretold.output
    assert f"does not know the flags of vLLM {OTHER}" in foretold.output

    with Client(fleet) as client:
        run = fleet.pyinfra("-y", *upgrade, seconds=1500)
    assert run.status == 1, run.output
    assert "serving.tiny.flags.enforce-eager: " in run.output
    assert "`--force-eager`" in run.output
    assert "Traceback" not in run.output
    client.was_served()
    assert fleet.pids() == before
    for node in NODES:
        assert fleet.ssh(node, "cat /etc/systemd/system/vllm-*.service") == units[node]
        assert not [path for path in proofs(fleet, node) if OTHER in path]

    # It is built now: a dry run asks it, and says so before any operation.
    again = fleet.pyinfra("--dry", *upgrade)
    assert again.status == 1, again.output
    assert "serving.tiny.flags.enforce-eager: " in again.output
    assert "would " not in again.output.split("enforce-eager")[-1]
    assert "Traceback" not in again.output

    one_node_refuses(fleet, upgrade, before)


def one_node_refuses(fleet: Fleet, upgrade: tuple[str, ...], before: dict[str, str]) -> None:
    """Hold that no other node is restarted either, though its release accepts everything."""
    mended = f"/opt/vllm/releases/{OTHER}-*/lib/python3*/site-packages/vllm/engine/arg_utils.py"
    fleet.ssh("gpu-02", f"sed -i s/--force-eager/--enforce-eager/ {mended}")
    with Client(fleet) as client:
        run = fleet.pyinfra("-y", *upgrade)
    assert run.status == 1, run.output
    assert "on gpu-01 the release refused" in run.output
    client.was_served()
    assert fleet.pids() == before
