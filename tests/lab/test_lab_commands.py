"""`gpufleet lab ...` as typed: one lab from `up` to `clean`, in this order.

It is run from a copy of the checkout, for `clean` takes away every lab of the checkout that it is
run from, and those of other tests are of this one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.nodes import Lab
from tests.support.checkout import ROOT, own_lab

LAB_ID = own_lab("gflc")
FOLDER = Path("/var/lib/gpufleet-lab") / LAB_ID
# Of the checkout, what no command of the lab reads.
LEFT_OUT = ("tests", "docs", "benchmarks", ".git", ".venv*", ".*cache", "__pycache__")
NODES = ("gpu-01=t4x1", "mon-02=none")


@dataclass(frozen=True)
class Checkout:
    """A copy of the checkout, and its `gpufleet lab`."""

    folder: Path

    def lab(self, *words: str, seconds: int = 300) -> subprocess.CompletedProcess[str]:
        main = "from gpufleet.cli.main import main; main()"
        paths = f"{self.folder / 'src'}{os.pathsep}{self.folder}"
        return subprocess.run(
            [sys.executable, "-c", main, "lab", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": paths, "GPUFLEET_LAB": LAB_ID, "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def does(self, *words: str, seconds: int = 300) -> str:
        """Run a command that has to succeed; return what it prints on standard output."""
        done = self.lab(*words, seconds=seconds)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def states(self) -> dict[str, str]:
        """Return {node: "power ssh"} as `status` shows them."""
        rows = [line.split() for line in self.does("status").splitlines()[1:]]
        return {row[0]: f"{row[3]} {row[4]}" for row in rows}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    folder = tmp_path_factory.mktemp("checkout") / "gpufleet"
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    Lab.open(LAB_ID, print).purge()  # what a killed run left
    yield Checkout(folder)
    Lab.open(LAB_ID, print).purge()


def test_up_brings_exactly_these_nodes(checkout: Checkout) -> None:
    assert "ssh -F" in checkout.does("up", "--bare", *NODES)
    assert checkout.states() == {"gpu-01": "on answers", "mon-02": "on answers"}


def test_ssh_runs_a_command_on_a_node(checkout: Checkout) -> None:
    assert checkout.does("ssh", "gpu-01", "hostname") == "gpu-01\n"


def test_power_pulls_a_nodes_plug_and_puts_it_back(checkout: Checkout) -> None:
    checkout.does("power", "gpu-01", "off")
    assert checkout.states() == {"gpu-01": "off silent", "mon-02": "on answers"}
    checkout.does("power", "gpu-01", "on")
    assert checkout.states()["gpu-01"] == "on answers"


def test_net_cuts_a_nodes_link_and_heals_it(checkout: Checkout) -> None:
    checkout.does("net", "gpu-01", "cut")
    assert checkout.states() == {"gpu-01": "on silent", "mon-02": "on answers"}
    checkout.does("net", "gpu-01", "heal")
    assert checkout.states()["gpu-01"] == "on answers"


def test_down_switches_all_off_and_keeps_what_was_written(checkout: Checkout) -> None:
    checkout.does("ssh", "gpu-01", "touch /root/kept && sync")
    checkout.does("down")
    assert set(checkout.states().values()) == {"off silent"}
    checkout.does("up", "--bare")
    checkout.does("ssh", "gpu-01", "test -e /root/kept")


def test_purge_forgets_the_lab(checkout: Checkout) -> None:
    checkout.does("purge")
    assert not FOLDER.exists()


def test_clean_takes_the_checkouts_own_labs_and_no_other(checkout: Checkout) -> None:
    checkout.does("up", "--bare", NODES[1])
    done = checkout.lab("clean")

    assert done.returncode == 0, done.stderr
    assert not FOLDER.exists()
    purged = [line for line in done.stderr.splitlines() if "purge lab" in line]
    assert purged
    assert all(LAB_ID in line for line in purged), purged


def test_require_root_is_satisfied_here(checkout: Checkout) -> None:
    """These tests are root's; the Makefile asks before it boots a node."""
    assert checkout.does("require-root", "make test") == ""


@pytest.mark.long
def test_demo_ends_with_completions_of_a_deployed_fleet(checkout: Checkout) -> None:
    said = checkout.does("demo", seconds=1700)

    assert "gpu-01" in said
    assert "done." in said
    assert checkout.does("ssh", "gpu-01", "systemctl is-active vllm-tiny-0.service") == "active\n"
