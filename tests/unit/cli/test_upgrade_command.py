"""`gpufleet upgrade` and `rollback` refuse in a sentence, before any node is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpufleet.settings import engine_flags
from gpufleet.upgrade.run.upgrade_journal import FOLDER, Journal
from tests.support import warm_command

UPGRADE = "20261122T134708Z-ab12"
INVENTORY = """\
from gpufleet import inventory
from tests.support import warm_command

_node = ("gpu-01", {"ssh_hostname": "192.0.2.1"})
globals().update(inventory.load(__file__, groups={"gpu": [_node]}))
"""


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    for folder in ("inventories", "group_vars"):
        (tmp_path / folder).mkdir()
    path = tmp_path / "inventories/prod.py"
    path.write_text(INVENTORY)
    return path


def gpufleet(verb: str, inventory: Path, *arguments: str) -> tuple[int, str]:
    """Run a command without a terminal; return its status and what it said."""
    done = warm_command.run([verb, inventory, *arguments])
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("verb", ["upgrade", "rollback"])
def test_without_a_person_and_without_yes_nothing_is_begun(inventory: Path, verb: str) -> None:
    """Not even a journal."""
    if (
        verb == "rollback"
    ):  # it has to ask nodes what they keep, before it is known what it is about
        (inventory.parents[1] / FOLDER).mkdir(parents=True)
    status, said = gpufleet(verb, inventory)

    assert status == 2
    assert "there is no terminal on which you can confirm: add --yes, or add --dry" in said
    assert not list(inventory.parents[1].rglob("*.jsonl"))


def test_one_that_is_not_at_its_end_is_named(inventory: Path) -> None:
    """A new one is not begun beside it; taking over is deliberate."""
    with Journal.create(inventory.parents[1] / FOLDER, UPGRADE) as journal:
        journal.append("started", id=UPGRADE, inventory=str(inventory))
        journal.append("owner", by="ann@laptop")
        journal.append("locking", nodes=["gpu-01"])
    status, said = gpufleet("upgrade", inventory, "--yes")

    assert status == 2
    assert f"upgrade {UPGRADE} of ann@laptop has not finished" in said
    assert "--resume" in said
    assert "--abort" in said


def test_options_that_exclude_each_other_are_said(inventory: Path) -> None:
    """What is resumed has said already what it is about."""
    for engine in engine_flags.NAMES:
        status, said = gpufleet("upgrade", inventory, "--resume", f"--{engine}", "0.32.0")
        assert status == 2
        assert "--vllm and --sglang start an upgrade" in said


@pytest.mark.parametrize("engine", engine_flags.NAMES)
def test_each_engine_has_an_option_for_its_version(inventory: Path, engine: str) -> None:
    status, said = gpufleet("upgrade", inventory, f"--{engine}", "1.0.0", "--dry")
    assert status == 2
    assert f"--{engine} 1.0.0: none of the nodes has `{engine}` in its group_vars" in said


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"versions": {"sglang": "1.0.0"}}, "--sglang 1.0.0: none of the nodes"),
        # Release 0.2.
        ({"version": "1.0.0"}, "--vllm 1.0.0: none of the nodes"),
    ],
)
def test_a_resumed_upgrade_declares_the_versions_that_it_was_begun_with(
    inventory: Path, written: dict[str, Any], says: str
) -> None:
    with Journal.create(inventory.parents[1] / FOLDER, UPGRADE) as journal:
        journal.append("started", id=UPGRADE, inventory=str(inventory), **written)
        journal.append("owner", by="ann@laptop")
        journal.append("locking", nodes=["gpu-01"])
    status, said = gpufleet("upgrade", inventory, "--resume", "--yes")

    assert status == 2
    assert says in said


def test_a_report_needs_an_upgrade(inventory: Path) -> None:
    """And says where it looked."""
    status, said = gpufleet("upgrade", inventory, "--report", "last")

    assert status == 2
    assert ".gpufleet/upgrades: contains no record of an upgrade" in said


def test_the_last_report_is_that_of_the_same_inventory(inventory: Path) -> None:
    """A project has several: the newest journal may be of another fleet."""
    newer = UPGRADE.replace("2026", "2027")
    for upgrade, about in ((UPGRADE, "prod.py"), (newer, "test.py")):
        with Journal.create(inventory.parents[1] / FOLDER, upgrade) as journal:
            journal.append("started", id=upgrade, inventory=str(inventory.with_name(about)))
    (inventory.with_name("lab.py")).write_text(INVENTORY)

    assert UPGRADE in gpufleet("upgrade", inventory, "--report", "last", "--json")[1]
    status, said = gpufleet("upgrade", inventory.with_name("lab.py"), "--report", "last")
    assert status == 2
    assert "lab.py. There are records for other inventories" in said
    assert f"{UPGRADE}, {newer}: choose one with --report ID" in said
