"""`gpufleet deploy` as operators run it: pyinfra, with gpufleet's deploys where there are none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpufleet.paths import PROJECT
from tests.support import warm_command
from tests.support.checkout import ROOT

BIN = Path(sys.executable).parent
# A deploy that changes nothing, and one that fails on every node.
HOLDS = 'from pyinfra import host\nprint(host.name, host.data.get("greeting"))\n'
FAILS = 'from pyinfra.operations import server\nserver.shell(name="fails", commands="false")\n'
INVENTORY = """\
from gpufleet import inventory
globals().update(inventory.load(__file__, groups={"gpu": ["@local"]}))
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """A directory with an inventory of this machine, and two deploys of its own."""
    for name, text in (
        ("inventories/fleet.py", INVENTORY),
        ("deploys/holds.py", HOLDS),
        ("deploys/fails.py", FAILS),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture(autouse=True)
def _no_inventory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUFLEET_INVENTORY", raising=False)


def typed(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Return what `gpufleet WORDS` does, without a start of Python."""
    return warm_command.run(words, cwd=cwd)


def run(cwd: Path, *command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_output_and_status_are_those_of_pyinfra(fleet: Path) -> None:
    config = ("--config", PROJECT / "config.py")
    for deploy, options in (("fails", ("-y",)), ("fails", ("--dry",))):
        words = (*config, *options, "inventories/fleet.py", f"deploys/{deploy}.py")
        direct = warm_command.run_pyinfra(words, cwd=fleet)
        ours = run(fleet, BIN / "gpufleet", "deploy", deploy, "inventories/fleet.py", *options)

        assert (ours.returncode, ours.stdout) == (direct.returncode, direct.stdout)
        assert ours.returncode == (1 if "-y" in options else 0), ours.stderr
        assert ours.stderr.splitlines()[-3:] == direct.stderr.splitlines()[-3:]


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ((), "inventories/fleet.py"),
        (("--dry", "--diff"), "inventories/fleet.py --dry --diff"),
        (("inventories/other.py", "-y"), "inventories/other.py -y"),
        # The word after --limit is that option's.
        (("--limit", "gpu-01"), "inventories/fleet.py --limit gpu-01"),
        (("--limit", "gpu-01", "inventories/other.py"), "--limit gpu-01 inventories/other.py"),
    ],
)
def test_the_only_inventory_is_taken_where_no_word_is_one(
    fleet: Path, words: tuple[str, ...], given: str
) -> None:
    shown = typed(fleet, "deploy", "holds", "--show", *words)

    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip().endswith(f"config.py {given} deploys/holds.py")


def test_an_option_that_pyinfra_refuses_is_refused_by_pyinfra(fleet: Path) -> None:
    refused = run(fleet, BIN / "gpufleet", "deploy", "holds", "-y", "--dry")

    assert refused.returncode == 1
    assert "--dry with -y" in refused.stderr


def test_an_unknown_deploy_is_one_line_and_status_2(fleet: Path) -> None:
    refused = typed(fleet, "deploy", "hold")

    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith(
        "error: there is no deploy 'hold'; the deploys are absent, check, fails, "
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "error: NAME is missing: write the name of a deploy: absent, check, "),
        (("nodes",), "error: there is no deploy 'nodes'; the deploys are absent, check, "),
    ],
)
def test_without_a_deploys_name_they_are_listed_before_an_inventory_is_missed(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    refused = run(tmp_path, BIN / "gpufleet", "deploy", *words)

    assert refused.returncode == 2
    assert refused.stderr.startswith(says)


def test_commands_take_the_only_inventory_also_where_other_words_follow(fleet: Path) -> None:
    whole = typed(fleet, "inventory", "--json")
    one = typed(fleet, "inventory", "@local", "--json")
    named = typed(fleet, "inventory", "inventories/fleet.py", "--json")

    assert whole.returncode == 0, whole.stderr
    assert whole.stdout == one.stdout == named.stdout
    assert '"inventories/fleet.py"' in whole.stdout


def test_in_a_checkout_with_several_inventories_a_command_without_one_names_them() -> None:
    refused = typed(ROOT, "status")

    assert refused.returncode == 2
    assert "inventories/lab.py, inventories/local.py" in refused.stderr
