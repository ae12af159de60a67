"""The five operations against a real node: systemd, sshd, dpkg and file system are Linux's own.

What they did is checked over plain ssh, never with the snapshot under test. The node is this
file's own, in a lab of its own.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpufleet.converge.desired import (
    Absent,
    DesiredState,
    Directory,
    File,
    Group,
    Line,
    Link,
    NoOtherFiles,
    NoOtherUnits,
    Package,
    Unit,
    UnitGone,
    User,
    Value,
    started_line,
)
from lab.nodes import Lab
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfc")
NODE = "gpu-01"
UNIT = "gfc-serve.service"
UNIT_PATH = f"/etc/systemd/system/{UNIT}"
SECRET = b"canary-6f1e93d2"

INVENTORY = """\
from gpufleet.remote.ssh import nodelay_transport
nodes = [({node!r}, {{
    "ssh_hostname": {address!r}, "ssh_user": {user!r}, "ssh_key": {key!r},
    "ssh_known_hosts_file": {known_hosts!r}, "ssh_strict_host_key_checking": "yes",
    "ssh_paramiko_connect_kwargs": {{"transport_factory": nodelay_transport}},
    "_sudo": {sudo!r},
}})]
"""

DEPLOY = """\
import pickle
from pathlib import Path
from gpufleet.operations.converge import Converge

node = Converge(pickle.loads(Path("wanted.pickle").read_bytes()))
node.packages()
node.accounts()
node.files()
node.lines()
node.units()
"""


# Stands where the restart would: long enough for the run to be killed there.
WAIT = """\
import time
from pyinfra.operations import python
python.call(name="wait", function=lambda: time.sleep(60))
"""

# Counts how often the node is read, and tells whether what a probe found may have changed.
ASKING = """\
from pathlib import Path

from pyinfra import host
from pyinfra.api import StringCommand, operation

from gpufleet.converge.desired import File, DesiredState
from gpufleet.operations import converge
from gpufleet.operations.converge import Converge, probed_changes

reads = []
read = converge._read
converge._read = lambda asked: (reads.append(asked), read(asked))[1]

@operation()
def asked(node):
    node.mark_read_only()
    yield StringCommand("true")

@operation()
def told():
    with Path("told").open("a") as file:
        file.write(f"{len(reads)} {probed_changes()}\\n")
    host.noop("told")
    yield from ()

unseen = Converge(DesiredState(File("/etc/gfc/unseen", b"1")), probed=False)
seen = Converge(DesiredState(File("/etc/gfc/seen", b"1")))
asked(unseen, name="asked")
unseen.files(name="unseen")
told(name="told")
unseen.lines(name="no lines")
asked(unseen, name="asked again")
seen.lines(name="no lines either")
told(name="told again")
seen.files(name="seen")
told(name="told at last")
"""


@dataclass
class Run:
    """One run of the pyinfra command."""

    status: int
    out: str
    err: str

    def changed(self) -> set[str]:
        """Return the operations that changed the node, or would."""
        document = json.loads(self.out)
        if document.get("results"):
            return {each["name"] for each in document["results"]["operations"] if each["success"]}
        return {each["name"] for each in document["plan"] if each["hosts_with_change"]}


@dataclass
class Node:
    """A lab node, and a directory from which pyinfra is run against it."""

    lab: Lab
    project: Path

    def inventory(self, **changes: Any) -> None:
        state = self.lab.state
        facts = {
            "node": NODE,
            "address": str(self.lab.facts.node(NODE).address),
            "user": "root",
            "sudo": False,
            "key": str(state / "id_ed25519"),
            "known_hosts": str(state / "known_hosts"),
        }
        (self.project / "inventory.py").write_text(INVENTORY.format(**{**facts, **changes}))

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "pyinfra", *arguments, "inventory.py", "deploy.py"]

    def write(self, *values: Value) -> None:
        (self.project / "wanted.pickle").write_bytes(pickle.dumps(DesiredState(*values)))

    def run(self, *values: Value, flags: tuple[str, ...] = ("--json", "--yes")) -> Run:
        self.write(*values)
        done = subprocess.run(
            self.command(*flags),
            cwd=self.project,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return Run(done.returncode, done.stdout, done.stderr)

    def converge(self, *values: Value) -> set[str]:
        """Run, expect success, return the operations that changed something."""
        run = self.run(*values)
        assert run.status == 0, run.err
        return run.changed()

    def dry(self, *values: Value) -> Run:
        run = self.run(*values, flags=("--dry", "--json"))
        assert run.status == 0, run.err
        return run

    def ssh(self, command: str, *, fails: bool = False) -> str:
        done = subprocess.run(
            ["ssh", "-F", str(self.lab.state / "ssh_config"), NODE, command],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert fails or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def pid(self, unit: str = UNIT) -> str:
        return self.ssh(f"systemctl show -P MainPID {unit}")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One node without a GPU worth mentioning."""
    if os.geteuid() != 0:
        pytest.fail("these tests boot a node, which needs root; `make test-unit` does not")
    lab = Lab.open(LAB_ID, print)
    lab.purge()
    lab.up({NODE: "t4x1"})
    project = tmp_path_factory.mktemp("converge")
    (project / "deploy.py").write_text(DEPLOY)
    made = Node(Lab.open(LAB_ID, print), project)
    made.inventory()
    yield made
    if not os.environ.get("GPUFLEET_KEEP_LAB"):
        lab.purge()


def served(fingerprint: str, *, stop: str = "") -> tuple[Value, ...]:
    """A unit that runs for ever and records what it was started with."""
    text = (
        f"[Service]\n{started_line(fingerprint)}\nExecStart=/bin/sleep infinity\n{stop}"
        "Type=exec\n[Install]\nWantedBy=multi-user.target\n"
    )
    return (File(UNIT_PATH, text.encode()), Unit(UNIT, fingerprint=fingerprint, stop_seconds=5))


@pytest.fixture
def clean(node: Node) -> Node:
    """The node without anything that an earlier test has put there."""
    node.ssh(
        "systemctl stop 'gfc-*.service'; rm -rf /etc/systemd/system/gfc-* /etc/gfc /run/gpufleet; "
        "rm -f /etc/systemd/system/multi-user.target.wants/gfc-*; systemctl daemon-reload; "
        "systemctl reset-failed 'gfc-*'; userdel gfc; groupdel gfc; "
        "rm -f /var/lib/gpufleet/placing",
        fails=True,
    )
    return node


EVERYTHING: tuple[Value, ...] = (
    Group("gfc"),
    User("gfc", group="gfc", home="/var/lib/gfc", groups=("games",)),
    Directory("/etc/gfc", mode=0o755),
    Directory("/etc/gfc/private", user="gfc", group="gfc", mode=0o700),
    File("/etc/gfc/plain", b"plain\n"),
    File("/etc/gfc/token", SECRET, user="root", group="gfc", mode=0o640, secret=True),
    Link("/etc/gfc/link", "plain"),
    Absent("/etc/gfc/old"),
    Line("/etc/gfc/lines", "first line"),
    Line("/etc/gfc/lines", "second 'line' with $HOME \\ and %n"),
    *served("1a2b"),
)


def test_a_second_run_changes_nothing_and_restarts_nothing(clean: Node) -> None:
    """Everything is made as wanted, with real accounts and units; then it costs one command."""
    clean.ssh("mkdir -p /etc/gfc && echo stale > /etc/gfc/old")
    assert clean.converge(*EVERYTHING) == {"accounts", "files", "lines", "units"}
    stat = "stat -c '%A %U:%G' /etc/gfc /etc/gfc/private /etc/gfc/plain /etc/gfc/token"
    assert clean.ssh(stat).splitlines() == [
        "drwxr-xr-x root:root",
        "drwx------ gfc:gfc",
        "-rw-r--r-- root:root",
        "-rw-r----- root:gfc",
    ]
    assert clean.ssh("cat /etc/gfc/token") == SECRET.decode()
    assert (
        clean.ssh("readlink /etc/gfc/link; ls /etc/gfc")
        == "plain\nlines\nlink\nplain\nprivate\ntoken"
    )
    assert clean.ssh("cat /etc/gfc/lines").splitlines() == [
        "first line",
        "second 'line' with $HOME \\ and %n",
    ]
    assert clean.ssh("getent passwd gfc").endswith(":/var/lib/gfc:/usr/sbin/nologin")
    assert "games" in clean.ssh("id -nG gfc").split()
    assert (
        clean.ssh(f"systemctl is-active {UNIT}; systemctl is-enabled {UNIT}") == "active\nenabled"
    )
    pid = clean.pid()

    assert clean.converge(*EVERYTHING) == set()
    assert clean.pid() == pid
    run = clean.run(*EVERYTHING, flags=("-y", "-vvv"))
    assert run.status == 0
    assert run.err.count(">>> ") == 1, "a run with nothing to do is one remote command"


@pytest.mark.parametrize(
    ("drift", "operation", "said"),
    [
        ("echo more >> /etc/gfc/plain", "files", "write /etc/gfc/plain: its content differs"),
        ("chmod 0666 /etc/gfc/token", "files", "its mode is 0666, declared 0640"),
        ("chown games /etc/gfc/private", "files", "its owner is games:gfc, declared gfc:gfc"),
        ("ln -sfn other /etc/gfc/link", "files", "it points to other"),
        ("rm /etc/gfc/plain && mkfifo /etc/gfc/plain", "files", "a special file exists there"),
        ("touch /etc/gfc/old", "files", "remove /etc/gfc/old"),
        ("echo other > /etc/gfc/lines", "lines", "append to /etc/gfc/lines: first line"),
        ("usermod -s /bin/sh gfc", "accounts", "shell is /bin/sh, declared /usr/sbin/nologin"),
        (f"systemctl stop {UNIT}", "units", f"start {UNIT}: it is inactive (dead)"),
        (f"systemctl disable {UNIT}", "units", f"enable {UNIT}"),
        (
            f"rm /run/gpufleet/started/{UNIT}",
            "units",
            "started with an unknown fingerprint",
        ),
    ],
)
def test_drift_is_foretold_named_and_repaired(
    clean: Node, drift: str, operation: str, said: str
) -> None:
    """A dry run lists exactly the operation that then changes, and says what differs."""
    clean.converge(*EVERYTHING)
    clean.ssh(drift)

    foretold = clean.dry(*EVERYTHING)
    assert foretold.changed() == {operation}
    assert said in foretold.err
    assert clean.converge(*EVERYTHING) == {operation}
    assert clean.dry(*EVERYTHING).changed() == set()


def test_what_only_asks_or_is_not_probed_has_nothing_looked_at_anew(clean: Node) -> None:
    """A command that asks costs no snapshot, and a file that no probe looks at no probe."""
    deploy = clean.project / "asking.py"
    deploy.write_text(ASKING)
    said = clean.project / "told"
    for wanted in (["1 False", "2 False", "2 True"], ["1 False", "1 False", "1 False"]):
        said.unlink(missing_ok=True)
        command = [*clean.command("--yes")[:-1], deploy.name]
        subprocess.run(command, cwd=clean.project, check=True, capture_output=True, timeout=120)
        assert said.read_text().splitlines() == wanted


def test_a_changed_unit_restarts_it_and_the_dry_run_foretells_that(clean: Node) -> None:
    """Files and units are both foretold although only the first has changed nothing yet."""
    clean.converge(*served("1a2b"))
    before = clean.pid()

    foretold = clean.dry(*served("3c4d"))
    assert foretold.changed() == {"files", "units"}
    assert f"would restart {UNIT}: started with 1a2b, declared 3c4d" in foretold.err
    assert clean.converge(*served("3c4d")) == {"files", "units"}
    assert clean.pid() != before
    assert clean.ssh(f"cat /run/gpufleet/started/{UNIT}") == "3c4d"


def test_a_restart_by_hand_or_after_a_crash_keeps_the_truth(clean: Node) -> None:
    """systemd writes the fingerprint at every start, so ours adds no second one."""
    clean.converge(*served("1a2b", stop="Restart=always\nRestartSec=0\n"))
    clean.ssh(f"systemctl restart {UNIT}")
    assert clean.converge(*served("1a2b", stop="Restart=always\nRestartSec=0\n")) == set()
    clean.ssh(f"kill -9 {clean.pid()}; sleep 1")

    assert clean.converge(*served("1a2b", stop="Restart=always\nRestartSec=0\n")) == set()


def test_a_run_killed_between_file_and_restart_is_made_good_by_the_next(clean: Node) -> None:
    """The file is already as wanted; the process is not, and that is what counts."""
    clean.converge(*served("1a2b"))
    before = clean.pid()
    deploy = clean.project / "deploy.py"
    deploy.write_text(DEPLOY.replace("node.units()", WAIT))
    try:
        clean.write(*served("3c4d"))
        process = subprocess.Popen(
            clean.command("-y"),
            cwd=clean.project,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(lambda: "3c4d" in clean.ssh(f"cat {UNIT_PATH}"))
        process.kill()
        process.wait()
    finally:
        deploy.write_text(DEPLOY)
    assert clean.pid() == before

    assert clean.converge(*served("3c4d")) == {"units"}
    assert clean.pid() != before
    assert clean.ssh(f"cat /run/gpufleet/started/{UNIT}") == "3c4d"


def until(true: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_unit_that_gave_up_is_started_again(clean: Node) -> None:
    """The start limit is no reason for a repaired unit to stay down."""
    broken = "StartLimitIntervalSec=1000\nStartLimitBurst=2"
    text = "[Unit]\n" + broken + "\n[Service]\nType=exec\nRestart=always\nRestartSec=0\n"
    bad = File(UNIT_PATH, (text + "ExecStart=/bin/false\n").encode())
    good = File(UNIT_PATH, (text + "ExecStart=/bin/sleep infinity\n").encode())
    unit = Unit(UNIT, enabled=None)
    clean.run(bad, unit)
    until(lambda: clean.ssh(f"systemctl is-active {UNIT}", fails=True) == "failed")

    assert clean.converge(good, unit) == {"files", "units"}
    assert clean.ssh(f"systemctl is-active {UNIT}") == "active"


def test_units_that_nothing_wants_are_removed_loaded_or_not(clean: Node) -> None:
    """
    A stray that runs, one that was only written, and one whose file is gone.

    An operator's own unit of a name that matches runs on.
    """
    operators = "gfc-router.service"
    service = "ExecStart=/bin/sleep infinity\n[Install]\nWantedBy=multi-user.target"
    for name, first in (
        ("gfc-a.service", started_line("0a")),
        ("gfc-b.service", started_line("0b")),
        ("gfc-c.service", started_line("0c")),
        (operators, "Type=exec"),
    ):
        path = f"/etc/systemd/system/{name}"
        clean.ssh(f"cat > {path} <<'END'\n[Service]\n{first}\n{service}\nEND")
    clean.ssh(
        f"systemctl enable --now gfc-a {operators} && systemctl start gfc-c && "
        "rm /etc/systemd/system/gfc-c.service && mkdir /etc/systemd/system/gfc-b.service.d"
    )
    pid = clean.pid(operators)
    wanted = (*served("1a2b"), NoOtherUnits("gfc-*.service", stop_seconds=5))

    foretold = clean.dry(*wanted)
    for stray in ("gfc-a", "gfc-b", "gfc-c"):
        assert f"would remove {stray}.service" in foretold.err
    assert operators not in foretold.err
    assert clean.converge(*wanted) == {"files", "units"}
    both = [operators, UNIT]
    there = clean.ssh("cd /etc/systemd/system && ls -d gfc-*")
    assert there.splitlines() == both
    enabled = clean.ssh("ls /etc/systemd/system/multi-user.target.wants | grep gfc")
    assert enabled.splitlines() == both
    active = "systemctl list-units --plain --no-legend 'gfc-*' | cut -d' ' -f1"
    assert clean.ssh(active).splitlines() == both
    assert clean.pid(operators) == pid
    assert clean.converge(*wanted) == set()
    assert clean.converge(UnitGone(UNIT)) == {"units"}
    assert clean.converge(UnitGone(UNIT)) == set()
    assert clean.ssh(active) == operators


def test_files_that_nothing_wants_are_removed(clean: Node) -> None:
    """Only files and links that match go; directories and other names stay."""
    clean.ssh("mkdir -p /etc/gfc/dir.env && touch /etc/gfc/old.env /etc/gfc/old.txt")
    wanted = (File("/etc/gfc/new.env", b"A=1\n"), NoOtherFiles("/etc/gfc/*.env"))

    assert clean.converge(*wanted) == {"files"}
    assert clean.ssh("ls /etc/gfc") == "dir.env\nnew.env\nold.txt"
    assert clean.converge(*wanted) == set()


def test_a_drop_in_reaches_systemd_although_nothing_restarts(clean: Node) -> None:
    """A changed definition is read by systemd even where no fingerprint asks for a restart."""
    clean.converge(*served("1a2b"))
    pid = clean.pid()
    drop_in = File(f"{UNIT_PATH}.d/limits.conf", b"[Service]\nLimitNOFILE=4321\n")

    assert clean.dry(*served("1a2b"), drop_in).changed() == {"files", "units"}
    assert clean.converge(*served("1a2b"), drop_in) == {"files", "units"}
    assert clean.ssh(f"systemctl show -P LimitNOFILE {UNIT}") == "4321"
    assert clean.pid() == pid
    assert clean.converge(*served("1a2b"), Absent(drop_in.path)) == {"files", "units"}
    assert clean.ssh(f"systemctl show -P LimitNOFILE {UNIT}") != "4321"


def test_what_stands_in_the_way_or_cannot_be_read_is_refused(clean: Node) -> None:
    """Nothing is overwritten or guessed: the node fails, in words, and stays as it was."""
    clean.ssh("mkdir -p /etc/gfc/file && touch /etc/gfc/directory && ln -s /tmp /etc/gfc/link")
    for value, said in (
        (File("/etc/gfc/file", b""), "a directory exists there"),
        (Directory("/etc/gfc/directory"), "a file exists there"),
        (Directory("/etc/gfc/link"), "a link to /tmp exists there"),
        (Absent("/etc/gfc/file"), "a directory exists there"),
    ):
        for flags in (("--dry", "--json"), ("--json", "--yes")):
            run = clean.run(value, File("/etc/gfc/other", b""), flags=flags)
            assert said in run.err
            assert "Traceback" not in run.err
            assert run.status == 1
    assert clean.ssh("ls /etc/gfc") == "directory\nfile\nlink"
    clean.ssh(f"systemctl mask {UNIT}")
    run = clean.run(Unit(UNIT))
    clean.ssh(f"systemctl unmask {UNIT}")
    assert run.status == 1
    assert f"systemctl unmask {UNIT}" in run.err


def test_a_problem_on_the_node_is_one_sentence(clean: Node) -> None:
    """An owner who does not exist ends the operation, without a traceback and without leftovers."""
    run = clean.run(File("/etc/gfc/file", b"x", user="nobody-such"), flags=("-y",))

    assert run.status == 1
    assert "/etc/gfc/file: there is no user nobody-such" in run.err
    assert "Traceback" not in run.err
    assert clean.ssh("ls -A /etc/gfc /var/lib/gpufleet") == "/etc/gfc:\n\n/var/lib/gpufleet:\nlock"


WATCH = """
import os, sys, time
seen = set()
end = time.monotonic() + 120
while time.monotonic() < end and not os.path.exists("/run/gfc-written"):
    for name in os.listdir("/etc/gfc"):
        try:
            path = "/etc/gfc/" + name
            status = os.lstat(path)
            seen.add((status.st_mode & 0o777, status.st_uid))
        except OSError:
            pass
print(sorted(seen))
"""


@pytest.mark.parametrize("user", ["root", "gfcssh"])
def test_a_secret_is_nobody_elses_at_any_instant_and_in_no_log(clean: Node, user: str) -> None:
    """Watched on the node while it is written, 8 MB long; as root and through sudo."""
    clean.ssh(
        "rm -f /run/gfc-written; mkdir -p -m 755 /etc/gfc; "
        "id gfcssh || useradd -m -s /bin/bash gfcssh; "
        "echo 'gfcssh ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/gfcssh; "
        "mkdir -p ~gfcssh/.ssh && cp ~/.ssh/authorized_keys ~gfcssh/.ssh/ && "
        "chown -R gfcssh ~gfcssh/.ssh; "
        "true"
    )
    content = SECRET + b"\n" * 8_000_000
    secret = File("/etc/gfc/token", content, mode=0o600, secret=True)
    clean.inventory(user=user, sudo=user != "root")
    watching = subprocess.Popen(
        [
            "ssh",
            "-F",
            str(clean.lab.state / "ssh_config"),
            NODE,
            "python3 -; find / -xdev -newer /etc/sudoers.d/gfcssh -type f "
            "-size +7M -not -path '/var/log/*' -printf '%p %m %u\\n'",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert watching.stdin
        watching.stdin.write(WATCH)
        watching.stdin.close()
        time.sleep(1)
        run = clean.run(secret, flags=("-y", "-vvv", "--debug", "--diff"))
        assert run.status == 0, run.err[-3000:]
        clean.ssh("touch /run/gfc-written")
        assert watching.stdout
        seen = watching.stdout.read()
    finally:
        watching.kill()
        clean.inventory()
    assert seen.splitlines()[0] == f"[({0o600}, 0)]"
    assert seen.splitlines()[1:] == ["/etc/gfc/token 600 root"]
    assert SECRET.decode() not in run.out + run.err
    assert secret.sha256[:12] not in run.out + run.err
    for flags in (
        ("--dry", "--json"),
        ("--dry", "--debug-operations"),
        ("--dry", "-vvv", "--debug"),
    ):
        output = clean.run(File(secret.path, SECRET, mode=0o600, secret=True), flags=flags)
        assert SECRET.decode() not in output.out + output.err


def test_what_a_killed_placing_left_is_removed_by_the_next_run(clean: Node) -> None:
    """Also beside a file that is not wanted any more: the journal names it."""
    clean.ssh(
        "mkdir -p /etc/gfc /var/lib/gpufleet; echo s > /etc/gfc/.gpufleet-0123456789abcdef; "
        "echo /etc/gfc/.gpufleet-0123456789abcdef > /var/lib/gpufleet/placing"
    )

    run = clean.dry(File("/etc/hostname2", b"x"))
    assert "clean up after a run that was interrupted" in run.err
    assert clean.converge(File("/etc/hostname2", b"x")) == {"files"}
    assert clean.ssh("ls -A /etc/gfc /var/lib/gpufleet") == "/etc/gfc:\n\n/var/lib/gpufleet:\nlock"
    assert clean.converge(Absent("/etc/hostname2")) == {"files"}


def test_a_node_that_is_being_placed_on_is_waited_for(clean: Node) -> None:
    """Two operators at once: one after the other, neither fails."""
    clean.converge(File("/etc/gfc/plain", b"1"))
    clean.ssh("setsid flock /var/lib/gpufleet/lock sleep 3 >/dev/null 2>&1 </dev/null & sleep 0.3")
    begun = time.monotonic()

    assert clean.converge(File("/etc/gfc/plain", b"2")) == {"files"}
    assert time.monotonic() - begun > 2


# Packages of our own in two versions, on the node itself: nothing is downloaded. The repository is
# not signed, which no product code allows; here apt's signatures are not what is tested.
REPOSITORY = """
set -eu
rm -rf /srv/gfc && mkdir -p /srv/gfc && cd /srv/gfc
for version in 1.0 2.0; do
  mkdir -p $version/DEBIAN
  printf 'Package: gfc-tool\\nVersion: %s\\nArchitecture: all\\nMaintainer: x\\nDescription: x\\n' \
    $version > $version/DEBIAN/control
  printf '#!/bin/sh\\n[ ! -e /srv/gfc-slow-%s ] || { echo compiles; sleep 9; }\\n' $version \
    > $version/DEBIAN/postinst
  printf '[ ! -e /srv/gfc-breaks-%s ]\\n' $version >> $version/DEBIAN/postinst
  chmod 755 $version/DEBIAN/postinst
  dpkg-deb -b $version gfc-$version.deb >/dev/null
  { cat $version/DEBIAN/control; echo "Filename: ./gfc-$version.deb"
    echo "Size: $(stat -c %s gfc-$version.deb)"
    echo "SHA256: $(sha256sum gfc-$version.deb | cut -d' ' -f1)"; echo; } >> Packages
done
rm -f /etc/apt/sources.list /etc/apt/sources.list.d/*
echo 'deb [trusted=yes] file:/srv/gfc ./' > /etc/apt/sources.list.d/gfc.list
rm -f /srv/gfc-breaks-* /srv/gfc-slow-*
dpkg --purge --force-all gfc-tool >/dev/null 2>&1 || :
"""
STATUS = "dpkg-query -W -f '${db:Status-Abbrev}${Version}' gfc-tool"


@pytest.fixture
def apt(clean: Node) -> Node:
    """The node, with the package gfc-tool 1.0 and 2.0 to be had and not installed."""
    clean.ssh(REPOSITORY)
    return clean


def test_a_package_goes_up_and_down_to_its_version_and_keeps_its_hold(apt: Node) -> None:
    """A held package that moves is held again; a second run does nothing."""
    for version in ("1.0", "2.0", "1.0"):
        wanted = Package("gfc-tool", version, hold=True)
        assert apt.dry(wanted).changed() == {"packages"}
        assert apt.converge(wanted) == {"packages"}
        assert apt.ssh(STATUS) == f"hi {version}"
        assert apt.converge(wanted) == set()
    assert apt.converge(Package("gfc-tool", "2.0")) == {"packages"}
    assert apt.ssh(STATUS) == "hi 2.0", "an operator's hold is put back"
    assert apt.converge(Package("gfc-tool", hold=False)) == {"packages"}
    assert apt.ssh(STATUS) == "ii 2.0"


def test_a_version_that_nobody_has_fails_in_apts_words(apt: Node) -> None:
    run = apt.run(Package("gfc-tool", "3.0"), flags=("-y",))

    assert run.status == 1
    assert "Version '3.0' for 'gfc-tool' was not found" in run.err + run.out


def test_an_installation_that_was_cut_off_is_finished(apt: Node) -> None:
    """dpkg has the files and never configured them: that is not installed."""
    apt.ssh("dpkg --unpack /srv/gfc/gfc-1.0.deb")
    assert apt.ssh(STATUS)[1] != "i"

    foretold = apt.dry(Package("gfc-tool", "1.0"))
    assert "would finish the interrupted run of dpkg: gfc-tool" in foretold.err
    assert apt.converge(Package("gfc-tool", "1.0")) == {"packages"}
    assert apt.ssh(STATUS) == "ii 1.0"


def test_a_package_whose_script_fails_is_put_back(apt: Node) -> None:
    """The node goes on with the version before, and says why the other would not do."""
    apt.converge(Package("gfc-tool", "1.0", hold=True))
    apt.ssh("touch /srv/gfc-breaks-2.0")
    run = apt.run(Package("gfc-tool", "2.0", hold=True), flags=("-y",))

    assert run.status == 1
    assert "Restored: every package is as it was before (gfc-tool 1.0)" in run.err + run.out
    assert apt.ssh(STATUS) == "hi 1.0"


def test_a_long_installation_says_what_it_does_and_fails_as_a_short_one(apt: Node) -> None:
    """Lines come beside the command: its status, its words and stdout stay its own."""
    apt.converge(Package("gfc-tool", "1.0"))
    apt.ssh("touch /srv/gfc-slow-2.0 /srv/gfc-breaks-2.0")

    run = apt.run(Package("gfc-tool", "2.0"))

    assert run.status == 1
    assert run.out == "", "pyinfra has no results where no node is left"
    said = re.findall(rf"\[{NODE}\] packages: (.*) \((\d+) s\)", run.err)
    assert "changes 1 package: compiles" in {text for text, _ in said}
    assert len(said) <= 1 + int(said[-1][1]) // 5, "after two seconds, then every five"
    assert "Restored: every package is as it was before (gfc-tool 1.0)" in run.err
    assert apt.ssh("ls /var/lib/gpufleet/packages/step", fails=True) == ""
    assert "packages: " not in apt.dry(Package("gfc-tool", "2.0")).err


@pytest.mark.parametrize("lock", ["/var/lib/dpkg/lock-frontend", "/var/lib/apt/lists/lock"])
def test_another_apt_is_waited_for(apt: Node, lock: str) -> None:
    """Nodes upgrade themselves in the background; that must not fail a run."""
    hold = (
        f"import fcntl, time; f = open('{lock}', 'w'); fcntl.lockf(f, fcntl.LOCK_EX); time.sleep(5)"
    )
    apt.ssh(f'setsid python3 -c "{hold}" >/dev/null 2>&1 </dev/null & sleep 0.5')

    assert apt.converge(Package("gfc-tool", "1.0")) == {"packages"}
