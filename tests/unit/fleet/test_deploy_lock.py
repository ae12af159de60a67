"""Deploys and upgrades of one fleet exclude each other: with the nodes' program, on directories."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api import State

from gpufleet.fleet import deploy_lock
from gpufleet.on_node.change import hold
from gpufleet.on_node.common import change_marks, linux_facts
from gpufleet.remote.query import Answer
from tests.support.checkout import ROOT

NODES = ("gpu-01", "gpu-02", "gpu-03")
READS_ONLY = {"check.py", "verify.py"}
REMOVAL = "absent.py"


class Nodes:
    """Nodes as directories; a deploy's connection to each is a process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[list[str], bool]] = []
        self.dead: set[str] = set()

    def deploy(self, who: str, pid: int, upgrade: str | None = None) -> deploy_lock.Ask:
        fields = {"id": f"run-{who}", "owner": who, "origin": "/srv/fleet", "process": 4711}

        def ask(names: Iterable[str], look: bool) -> Mapping[str, Answer]:
            names = list(names)
            self.asked.append((names, look))
            return {
                name: "cannot be reached: no route to host"
                if name in self.dead
                else hold.answer(
                    {
                        **fields,
                        "what": "deploys/vllm.py",
                        "upgrade": upgrade,
                        "pid": pid,
                        "look": look,
                        "sysroot": str(self.folder / name),
                    }
                )
                for name in names
            }

        return ask

    def lock(self, name: str) -> None:
        linux_facts.ROOT = str(self.folder / name)
        change_marks.lock({"id": "u1", "owner": "cat@desk", "origin": "/", "what": "vLLM 0.33.0"})


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    monkeypatch.setattr(linux_facts, "ROOT", "")  # the program sets it; other tests need it back
    for name in NODES:
        (tmp_path / name / "var/lib").mkdir(parents=True)
    return Nodes(tmp_path)


@pytest.fixture
def ann() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_a_second_operator_is_told_all_nodes_who_since_where_and_what_to_do(
    nodes: Nodes, ann: subprocess.Popen[bytes]
) -> None:
    assert deploy_lock.take(nodes.deploy("ann@laptop", ann.pid), NODES, None) == ((), {}, ())

    (said,), silent, _ = deploy_lock.take(nodes.deploy("bob@desk", os.getpid()), NODES, None)

    assert silent == {}
    assert re.fullmatch(
        r"gpu-01, gpu-02, gpu-03: ann@laptop is running a deploy there \(deploys/vllm\.py\) since "
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC, from /srv/fleet \(process 4711 on that "
        r"machine\)\. Wait until the deploy ends, or end its process\. .*",
        said,
    )


def test_who_has_the_first_node_has_the_rest_and_a_refused_one_takes_nothing(
    nodes: Nodes, ann: subprocess.Popen[bytes]
) -> None:
    deploy_lock.take(nodes.deploy("ann@laptop", ann.pid), ["gpu-01"], None)
    nodes.asked.clear()

    problems, _, _ = deploy_lock.take(nodes.deploy("bob@desk", os.getpid()), NODES, None)

    assert len(problems) == 1
    assert nodes.asked == [(["gpu-01"], False), (["gpu-02", "gpu-03"], True)]
    for free in ("gpu-02", "gpu-03"):
        assert not (nodes.folder / free / "var/lib/gpufleet/change").exists()


def test_all_that_is_in_the_way_is_said_at_once(nodes: Nodes, ann: subprocess.Popen[bytes]) -> None:
    nodes.lock("gpu-01")
    deploy_lock.take(nodes.deploy("ann@laptop", ann.pid), ["gpu-03"], None)
    (nodes.folder / "gpu-02/var/lib/gpufleet/change").mkdir(parents=True)
    (nodes.folder / "gpu-02/var/lib/gpufleet/change/lock.json").write_text("[[[")

    problems, _, _ = deploy_lock.take(nodes.deploy("bob@desk", os.getpid()), NODES, None)

    assert [each.split(" ")[0] for each in problems] == ["upgrade", "gpu-03:", "gpu-02:"]
    assert "has locked gpu-01, because a deploy would restart" in problems[0]
    assert "ann@laptop is running a deploy there" in problems[1]
    assert (
        "gpu-02: it is not known whether a deploy is changing the node: "
        "/var/lib/gpufleet/change/lock.json is not a JSON object" in problems[2]
    )


def test_an_upgrades_own_deploys_go_on(nodes: Nodes) -> None:
    for name in NODES:
        nodes.lock(name)

    inner = nodes.deploy("cat@desk", os.getpid(), "u1")
    assert deploy_lock.take(inner, NODES, "u1") == ((), {}, ())
    assert deploy_lock.take(nodes.deploy("bob@desk", os.getpid()), NODES, None)[0]


def test_a_killed_deploy_keeps_nothing(nodes: Nodes, ann: subprocess.Popen[bytes]) -> None:
    deploy_lock.take(nodes.deploy("ann@laptop", ann.pid), NODES, None)
    ann.kill()

    assert deploy_lock.take(nodes.deploy("bob@desk", os.getpid()), NODES, None)[0] == ()


def test_a_node_that_did_not_say_and_answers_the_probe_is_not_known_to_be_free(
    nodes: Nodes,
) -> None:
    """One that does not answer that either is for the plan to name."""
    nodes.dead = {"gpu-01", "gpu-02"}
    problems, silent, _ = deploy_lock.take(nodes.deploy("bob@desk", os.getpid()), NODES, None)
    assert problems == ()
    assert set(silent) == nodes.dead

    state = State()
    deploy_lock._SILENT[state] = silent
    (said,) = deploy_lock.unknown(state, {"gpu-01": {}, "gpu-02": "no answer", "gpu-03": {}})
    assert said.startswith(
        "gpu-01: it is not known whether a deploy is changing the node: cannot be reached"
    )


def test_a_connection_that_is_no_sshds_is_remarked_on(nodes: Nodes) -> None:
    without: Any = None
    _, _, (first, *_) = deploy_lock.take(nodes.deploy("bob@desk", without), NODES, None)
    assert first.startswith("gpu-01: the node could not be locked against other deploys: ")


@pytest.mark.parametrize("path", sorted((ROOT / "deploys").glob("*.py")), ids=lambda p: p.name)
def test_every_deploy_that_changes_nodes_takes_them_before_all_else(path: Path) -> None:
    (block,) = [each for each in ast.parse(path.read_text()).body if isinstance(each, ast.With)]
    first = ast.unparse(block.body[0])
    assert first.startswith("hold_nodes(") == (path.name not in {*READS_ONLY, REMOVAL})


def test_a_removal_takes_the_nodes_that_have_something_to_remove_before_it_removes() -> None:
    """A missing file must not keep gpufleet on a node; an empty node gets no mark."""
    tree = ast.parse((ROOT / "roles/absent.py").read_text())
    (role,) = [each for each in tree.body if getattr(each, "name", "") == "absent"]
    text = ast.unparse(role)
    assert text.index("any(found.values())") < text.index("_hold(")
    assert text.index("_hold(") < text.index("remove_parts(wanted)")
