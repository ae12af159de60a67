"""What deploys would change, heard from their own operations: this machine is the node."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support import warm_command
from tests.support.checkout import ROOT

INVENTORY = """\
from gpufleet import inventory
globals().update(inventory.load(__file__, groups={"here": ["@local"]}))
"""

# In a process of its own: what gevent patches stays patched.
ASK = """\
import json, sys
from dataclasses import asdict
from gpufleet.cli.fleet_inputs import use_gevent
use_gevent()
from gpufleet.fleet.dry_run import dry_run
inventory, seconds, *deploys = sys.argv[1:]
found = dry_run(inventory, {"@local": deploys}, (), float(seconds))
json.dump({"node": asdict(found.nodes["@local"]), "refused": found.refused}, sys.stdout)
"""

DEPLOY = """\
from pathlib import Path
from pyinfra.api import deploy
from gpufleet.converge.desired import Absent, DesiredState, Directory, File, Line, Link
from gpufleet.converge.desired import NoOtherFiles
from gpufleet.operations.converge import Converge

@deploy("ground")
def ground(folder):
    node = Converge(DesiredState(
        Directory(folder),
        Directory(f"{folder}/d", mode=0o755),
        File(f"{folder}/file", b"wanted\\n", mode=0o640),
        File(f"{folder}/other", b"wanted too\\n"),
        File(f"{folder}/third", b"wanted as well\\n"),
        Link(f"{folder}/link", "file"),
        Absent(f"{folder}/gone"),
        NoOtherFiles(f"{folder}/d/*"),
        Line(f"{folder}/lines", "one line"),
    ))
    node.files(name="files")
    node.lines(name="lines")

ground(FOLDER)
"""

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as the deploy wants it; an earlier run of it has made it."""
    made = tmp_path / "node"
    (made / "d").mkdir(parents=True, mode=0o755)
    (made / "file").write_text("wanted\n")
    (made / "file").chmod(0o640)
    (made / "other").write_text("wanted too\n")
    (made / "third").write_text("wanted as well\n")
    (made / "link").symlink_to("file")
    (made / "lines").write_text("one line\n")
    return made


@pytest.fixture
def ask(tmp_path: Path, folder: Path) -> Ask:
    """`ask(deploy, ..., seconds=)`: what these deploy files would change on this machine."""

    def asked(*deploys: str, seconds: float = 60, status: int = 0) -> dict[str, Any]:
        inventory = tmp_path / "project/inventories/here.py"
        inventory.parent.mkdir(parents=True, exist_ok=True)
        inventory.write_text(INVENTORY)
        files = []
        for number, text in enumerate(deploys):
            file = tmp_path / f"deploy{number}.py"
            file.write_text(text.replace("FOLDER", repr(str(folder))))
            files.append(str(file))
        done = warm_command.run_program(ASK, [inventory, seconds, *files], cwd=ROOT)
        assert done.returncode == status, done.stderr
        return json.loads(done.stdout) if status == 0 else {"said": done.stderr}

    return asked


def whats(found: dict[str, Any]) -> list[str]:
    return [each["what"] for each in found["node"]["moved"]]


def test_a_node_that_is_as_wanted_has_moved_in_nothing(ask: Ask) -> None:
    assert ask(DEPLOY) == {"node": {"moved": [], "unread": []}, "refused": []}


PLANTED: dict[str, Callable[[Path], object]] = {
    "file": lambda at: (at / "file").write_text("wanted\nand more\n"),
    "other": lambda at: (at / "other").chmod(0o666),
    "third": lambda at: (at / "third").unlink(),
    "link": lambda at: ((at / "link").unlink(), (at / "link").symlink_to("x")),
    "d": lambda at: (at / "d").chmod(0o700),
    "d/stray": lambda at: (at / "d/stray").touch(),
    "gone": lambda at: (at / "gone").touch(),
    "lines": lambda at: (at / "lines").write_text("another\n"),
}


def test_each_thing_that_somebody_moved_is_named_once_and_not_mended(
    ask: Ask, folder: Path
) -> None:
    """By the operation of the deploy that would mend it, with that deploy as the remedy."""
    for plant in PLANTED.values():
        plant(folder)

    first, second = ask(DEPLOY), ask(DEPLOY)

    assert first == second
    assert first["node"]["unread"] == []
    by_path = {
        path: [
            each
            for each in first["node"]["moved"]
            if re.search(rf"{folder}/{path}\b(?!/)", each["what"])
        ]
        for path in PLANTED
    }
    assert {path: len(found) for path, found in by_path.items()} == dict.fromkeys(PLANTED, 1)
    assert len(first["node"]["moved"]) == len(PLANTED)
    for path, (moved,) in by_path.items():
        operation = "lines" if path == "lines" else "files"
        assert moved["source"].endswith(f"deploy0.py: ground | {operation}")
        assert moved["remedy"].startswith("gpufleet deploy ")


def test_a_gateway_whose_files_are_not_there_has_moved(ask: Ask, tmp_path: Path) -> None:
    """Drift executes the gateway's own deploy, as it does vLLM's."""
    variables = tmp_path / "project/group_vars/here.yml"
    variables.parent.mkdir(parents=True)
    variables.write_text("gateway: {allow_unauthenticated: true, allow_plain_http: true}\n")

    found = ask((ROOT / "deploys/gateway.py").read_text())

    assert found["refused"] == []
    said = whats(found)
    assert any("/etc/gpufleet/gateway/haproxy.cfg" in each for each in said), found
    assert any("gpufleet-gateway.service" in each for each in said)


def test_an_operation_that_says_nothing_is_named(ask: Ask) -> None:
    """Some only run a command when it is needed: that they would is what there is to say."""
    found = ask(
        "from pyinfra.operations import server\nserver.shell(name='build it', commands=['false'])\n"
    )
    assert whats(found) == ["build it"]


REFUSES = """\
from pyinfra.api import operation
from gpufleet.operations.converge import refuse

@operation()
def asked():
    yield from refuse(("the disk did not answer",))

asked(name="look")
"""


def test_what_could_not_be_read_is_unknown_and_the_rest_is_asked(ask: Ask, folder: Path) -> None:
    """Also where the only node of a run fails, which ends an ordinary run."""
    (folder / "other").unlink()

    found = ask(REFUSES + DEPLOY)

    (unread,) = found["node"]["unread"]
    assert unread["why"] == "the disk did not answer"
    assert unread["source"].endswith("deploy0.py: look")
    (what,) = whats(found)
    assert "/other" in what


@pytest.mark.parametrize(
    ("deploy", "seconds", "why"),
    [
        pytest.param(
            "from gpufleet.errors import FleetError\nraise FleetError('no', 'and no')\n",
            60,
            ["no", "and no"],
            id="a-refusal",
        ),
        pytest.param(
            "print(no_such_name)\n",
            60,
            ["the comparison fails with NameError: name 'no_such_name'"],
            id="a-mistake",
        ),
        pytest.param(
            "import gevent\ngevent.sleep(60)\n",
            10,  # on a busy machine, the deploy before it takes seconds of these
            ["the comparison did not finish within 10 s"],
            id="a-node-that-hangs",
        ),
    ],
)
def test_a_deploy_that_ends_early_leaves_the_rest_unknown(
    ask: Ask, folder: Path, deploy: str, seconds: int, why: list[str]
) -> None:
    (folder / "other").unlink()

    found = ask(DEPLOY, deploy, seconds=seconds)

    assert [
        each["why"][: len(said)] for each, said in zip(found["node"]["unread"], why, strict=True)
    ] == why
    (what,) = whats(found)
    assert "/other" in what


def test_nothing_is_executed(ask: Ask, folder: Path) -> None:
    before = sorted((each, each.lstat().st_mtime_ns) for each in folder.rglob("*"))
    (found,) = whats(
        ask(
            "from pyinfra.operations import server\n"
            "server.shell(name='touch', commands=['touch ' + FOLDER + '/touched'])\n"
        )
    )
    assert found == "touch"
    assert sorted((each, each.lstat().st_mtime_ns) for each in folder.rglob("*")) == before


AWAY = """\
from gpufleet import inventory
away = ("away", {"ssh_hostname": "127.0.0.1", "ssh_port": 1})
globals().update(inventory.load(__file__, groups={"all_here": ["@local", away]}))
"""


def test_a_node_that_gives_no_answer_leaves_unknown_what_needs_the_plan(tmp_path: Path) -> None:
    """A plan without it would be another one, so what the others are to serve is not known."""
    inventory = tmp_path / "inventories/away.py"
    inventory.parent.mkdir()
    inventory.write_text(AWAY)

    done = warm_command.run(["drift", inventory, "--json"], cwd=ROOT, connects=True)

    found = json.loads(done.stdout)
    jsonschema.validate(found, json.loads((ROOT / "docs/reference/drift.schema.json").read_text()))
    assert found["nodes"]["away"]["drift"] == "unknown"
    assert "cannot be reached" in found["nodes"]["away"]["unread"][0]["why"]
    here = [
        each["why"]
        for each in found["nodes"]["@local"]["unread"]
        if each["source"] == "deploys/vllm.py"
    ]
    assert "away: cannot be reached" in here[0]
    assert done.returncode != 0
