"""What has to happen on a node, decided from values alone."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.converge.desired import (
    STARTED_DIRECTORY,
    Absent,
    DesiredState,
    Directory,
    File,
    Group,
    Line,
    Link,
    Lockstep,
    NoOtherFiles,
    NoOtherUnits,
    NoPackage,
    Package,
    Unit,
    UnitGone,
    User,
    Value,
)
from gpufleet.converge.diff import Command, Difference, Placement, Transaction, difference
from gpufleet.converge.package_commands import Plan
from gpufleet.converge.snapshot import (
    FileState,
    PackageState,
    Snapshot,
    UnitState,
    UserState,
    questions,
)
from gpufleet.errors import FleetError

UNIT = "vllm-tiny-0.service"
UP = UnitState("loaded", "active", "running", "enabled", has_file=True, on_disk=True)

VALUES: tuple[Value, ...] = (
    Package("gcc", "1"),
    Lockstep(("gcc", "g++")),
    NoPackage("old-gcc*"),
    Group("vllm"),
    User("vllm", "vllm", "/var/lib/vllm"),
    File("/etc/a", b"a"),
    Directory("/etc/b"),
    Link("/etc/c", "a"),
    Absent("/etc/d"),
    Line("/etc/e", "line"),
    NoOtherFiles("/etc/f/*"),
    Unit(UNIT),
    UnitGone("vllm-old-0.service"),
    NoOtherUnits("vllm-*.service"),
)


def units(unit: Unit, state: UnitState) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what is said and the words of the commands that are run for one unit."""
    part = difference(DesiredState(unit), Snapshot(units={unit.name: state})).units
    commands = [c.argv for c in part.commands if isinstance(c, Command)]
    return part.changes, tuple(word for argv in commands for word in " ".join(argv).split())


def last_command(*units: Unit) -> Command:
    """Return the command that starts these units, none of which runs."""
    snapshot = Snapshot(units=dict.fromkeys((u.name for u in units), UnitState("loaded")))
    command = difference(DesiredState(*units), snapshot).units.commands[-1]
    assert isinstance(command, Command)
    return command


def run(command: Command, path: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a real shell that finds these programs first: shell text by name."""
    for name, text in programs.items():
        (path / name).write_text(f"#!/bin/sh\n{text}")
        (path / name).chmod(0o755)
    return subprocess.run(
        command.argv,
        env={"PATH": f"{path}:{os.environ['PATH']}", "HERE": str(path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@given(st.sets(st.sampled_from(VALUES), min_size=1))
def test_what_was_not_read_is_refused_and_never_taken_for_absent(values: set[Value]) -> None:
    """A snapshot that knows nothing changes nothing, and every value has its sentence."""
    found = difference(DesiredState(*values), Snapshot(missed="no answer"))

    assert len(found.problems) >= len(values)
    assert all("no answer" in problem for problem in found.problems)
    assert all(part.commands == () for part in found.parts)


def test_one_unreadable_path_stops_the_whole_operation() -> None:
    """Half a change is worse than none."""
    snapshot = Snapshot(files={"/etc/a": None, "/etc/b": FileState("unknown", error="EACCES")})
    part = difference(DesiredState(File("/etc/a", b"a"), Directory("/etc/b")), snapshot).files

    assert part.changes == ("write /etc/a: it is missing",)
    assert part.commands == ()


def test_nothing_is_asked_that_is_not_needed() -> None:
    """The questions are the values', and the units whose definition is among the files."""
    wanted = DesiredState(
        File("/etc/k", b"k", mode=0o600, secret=True), File(f"/etc/systemd/system/{UNIT}", b"")
    )

    assert {question[:2] for question in questions(wanted)} == {
        ("secret", "/etc/k"),
        ("file", f"/etc/systemd/system/{UNIT}"),
        ("unit", UNIT),
    }


@pytest.mark.parametrize(
    ("unit", "state", "said"),
    [
        (Unit(UNIT), UP, None),
        (
            Unit(UNIT, "3c4d"),
            UnitState("loaded", "active", "running", "enabled", started="3c4d"),
            None,
        ),
        (
            Unit(UNIT, "3c4d"),
            UnitState("loaded", "active", "running", "enabled", started="1a2b"),
            f"restart {UNIT}: started with 1a2b, declared 3c4d",
        ),
        (
            Unit(UNIT, "3c4d"),
            UP,
            f"restart {UNIT}: started with an unknown fingerprint, declared 3c4d",
        ),
        (
            Unit(UNIT, "3c4d"),
            UnitState("loaded", "activating", "start-post", "enabled", started="3c4d"),
            None,
        ),
        (
            Unit(UNIT, "3c4d"),
            UnitState("loaded", "activating", "auto-restart", "enabled", started="3c4d"),
            f"start {UNIT}: it is activating (auto-restart)",
        ),
        (
            Unit(UNIT, "3c4d"),
            UnitState("loaded", "activating", "auto-restart-queued", "enabled", started="3c4d"),
            f"start {UNIT}: it is activating (auto-restart-queued)",
        ),
        *(
            (
                Unit(UNIT, "3c4d"),
                UnitState("loaded", active, "running", "enabled", started="3c4d"),
                None,
            )
            for active in ("reloading", "refreshing")
        ),
        (
            Unit(UNIT),
            UnitState("loaded", "failed", "failed", "enabled"),
            f"start {UNIT}: it is failed (failed)",
        ),
        (
            Unit(UNIT, "3c4d"),
            UnitState("loaded", "deactivating", "stop-sigterm", "enabled", started="3c4d"),
            f"start {UNIT}: it is deactivating (stop-sigterm)",
        ),
        (Unit(UNIT, "3c4d", enabled=None, running=None), UnitState("loaded"), None),
        (Unit(UNIT, "3c4d", enabled=False, running=False), UnitState("loaded"), None),
    ],
)
def test_a_unit_is_restarted_only_for_what_its_process_was_started_with(
    unit: Unit, state: UnitState, said: str | None
) -> None:
    """Also not while it is still loading a model with the right fingerprint."""
    changes, words = units(unit, state)

    assert changes == ((said,) if said else ())
    assert ("restart" in words) is (said is not None)


def test_the_deadline_of_a_restart_holds_the_units_own_times() -> None:
    """A drain of five minutes must not be cut off by our ssh command."""
    unit = Unit(UNIT, stop_seconds=330, start_seconds=1800)
    assert last_command(unit).seconds > 330 + 1800

    other = Unit("vllm-big-0.service", stop_seconds=600, start_seconds=900)
    assert last_command(unit, other).seconds > 600 + 1800, "all stop before any starts"


# Writes down how it was called; fails for the verb in $FAILS, as systemctl fails.
SYSTEMCTL = """\
echo "$@" >> "$HERE/calls"
case $1 in
  "$(cat "$HERE/fails" 2>/dev/null)") exit 5 ;;
  status) echo "CUDA out of memory"; exit 3 ;;
esac
"""


@pytest.mark.parametrize(
    ("fragment", "reloads"),
    [
        ("/lib/systemd/system/x.service", True),
        ("/etc/systemd/system/x.service", False),
    ],
)
def test_a_unit_file_in_front_of_a_packages_own_is_read(fragment: str, reloads: bool) -> None:
    """systemd does not see that one came to lie there: NeedDaemonReload stays "no" (measured)."""
    path = "/etc/systemd/system/x.service"
    text = b"[Service]\nExecStart=/bin/true\n"
    wanted = DesiredState(File(path, text), Unit("x.service"))
    placed = FileState("file", "root", "root", 0o644, sha256=File(path, text).sha256)
    state = replace(UP, fragment=fragment)
    seen = Snapshot(files={path: placed}, units={"x.service": state})

    argvs = [each.argv for each in difference(wanted, seen).units.commands if hasattr(each, "argv")]

    assert (("systemctl", "daemon-reload") in argvs) is reloads


def test_several_units_all_stop_before_any_of_them_starts(tmp_path: Path) -> None:
    """One may take the GPUs or the port that another still holds while it drains."""
    a, b = Unit("vllm-a-0.service"), Unit("vllm-b-0.service")

    done = run(last_command(a, b), tmp_path, systemctl=SYSTEMCTL)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"stop -- {a.name} {b.name}",
        f"start -- {a.name} {b.name}",
    ]


def test_a_single_unit_is_restarted(tmp_path: Path) -> None:
    done = run(last_command(Unit(UNIT)), tmp_path, systemctl=SYSTEMCTL)

    assert done.returncode == 0
    assert (tmp_path / "calls").read_text() == f"restart -- {UNIT}\n"


@pytest.mark.parametrize(
    ("started", "active", "calls"),
    [
        ("3c4d", True, []),
        ("3c4d", False, [f"restart -- {UNIT}"]),
        ("1a2b", True, [f"restart -- {UNIT}"]),
        (None, True, [f"restart -- {UNIT}"]),
    ],
)
def test_what_runs_with_the_wanted_by_now_is_not_started_again(
    tmp_path: Path, started: str | None, active: bool, calls: list[str]
) -> None:
    """Between the look and the restart systemd may have started it, with the file just loaded."""
    if started:
        (tmp_path / UNIT).write_text(started)
    (tmp_path / "fails").write_text("" if active else "is-active")
    command = last_command(Unit(UNIT, "3c4d"))
    words = tuple(word.replace(STARTED_DIRECTORY, str(tmp_path)) for word in command.argv)

    done = run(replace(command, argv=words), tmp_path, systemctl=SYSTEMCTL)

    assert (done.returncode, done.stderr) == (0, "")
    said = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    assert [each for each in said if not each.startswith("is-active")] == calls


@pytest.mark.parametrize(("count", "fails"), [(1, "restart"), (2, "stop"), (2, "start")], ids=str)
def test_a_start_that_fails_says_why_and_stays_failed(
    tmp_path: Path, count: int, fails: str
) -> None:
    """The unit's own last lines, and not the exit status of the command that shows them."""
    names = [f"vllm-tiny-{index}.service" for index in range(count)]
    (tmp_path / "fails").write_text(fails)

    done = run(last_command(*map(Unit, names)), tmp_path, systemctl=SYSTEMCTL)
    assert done.returncode == 5
    assert "CUDA out of memory" in done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-2].startswith(fails), "nothing starts when a stop failed"
    assert calls[-1] == f"status --no-pager --lines=15 -- {' '.join(names)}"


def test_what_is_unwanted_stops_before_anything_starts() -> None:
    """It holds the GPUs and the port."""
    wanted = DesiredState(Unit(UNIT), NoOtherUnits("vllm-*.service", stop_seconds=300))
    snapshot = Snapshot(
        units={UNIT: UnitState(), "vllm-old-0.service": UP},
        units_like={"vllm-*.service": frozenset({UNIT, "vllm-old-0.service"})},
    )
    commands = [
        c.argv for c in difference(wanted, snapshot).units.commands if isinstance(c, Command)
    ]

    stop = commands.index(("systemctl", "stop", "--", "vllm-old-0.service"))
    assert stop < len(commands) - 1
    assert "systemctl restart" in commands[-1][2]
    assert commands[-1][-1] == UNIT


def test_a_removed_unit_is_gone_and_stays_unmentioned() -> None:
    """Also one that a package keeps on disk, once it is stopped and disabled."""
    for state in (UnitState(), UnitState("loaded", "inactive", "dead", "disabled")):
        found = difference(DesiredState(UnitGone(UNIT)), Snapshot(units={UNIT: state}))
        assert found.changes == ()


@pytest.mark.parametrize(
    ("package", "state", "plan"),
    [
        (Package("gcc"), PackageState("1", True, False), None),
        (Package("gcc"), PackageState("1", True, True), None),
        (Package("gcc", "1", hold=True), PackageState("1", True, True), None),
        (
            Package("gcc", "1", hold=True),
            PackageState("1", True, False),
            Plan("apt", hold=("gcc",)),
        ),
        (Package("gcc", hold=False), PackageState("1", True, True), Plan("apt", release=("gcc",))),
        (Package("gcc"), None, Plan("apt", (Package("gcc"),))),
        (Package("gcc", "2"), PackageState("1", True, False), Plan("apt", (Package("gcc", "2"),))),
        (
            Package("gcc", "2", hold=True),
            PackageState("1", True, True),
            Plan("apt", (Package("gcc", "2", hold=True),), hold=("gcc",)),
        ),
        (Package("gcc"), PackageState("1", False, False), Plan("apt", (Package("gcc"),))),
    ],
)
def test_packages_move_only_when_they_must(
    package: Package, state: PackageState | None, plan: Plan | None
) -> None:
    """All that has to happen to packages is one transaction; what moves is held again by it."""
    part = difference(DesiredState(package), Snapshot(packages={"gcc": state})).packages

    assert part.commands == ((Transaction(plan),) if plan else ())
    assert bool(part.changes) is bool(plan)


def test_an_interrupted_dpkg_is_foretold_to_be_finished() -> None:
    """The transaction does so whenever it finds one; the dry run says it."""
    snapshot = Snapshot(packages={"gcc": None}, dpkg_unfinished=frozenset({"libc6"}))
    part = difference(DesiredState(Package("gcc")), snapshot).packages

    assert part.changes[0] == "finish the interrupted run of dpkg: libc6"


def test_a_dpkg_that_another_left_unfinished_is_no_drift_of_ours() -> None:
    snapshot = Snapshot(
        packages={"gcc": PackageState("1", True, False)}, dpkg_unfinished=frozenset({"libc6"})
    )
    assert difference(DesiredState(Package("gcc")), snapshot).changes == ()


def test_directories_are_made_before_what_lies_in_them() -> None:
    """Whatever the order in which a role names them; upper ones first."""
    wanted = DesiredState(File("/etc/a/b/c", b""), Directory("/etc/a/b"), Directory("/etc/a"))
    paths = ("/etc/a", "/etc/a/b", "/etc/a/b/c")
    (placing,) = difference(wanted, Snapshot(files=dict.fromkeys(paths))).files.commands

    assert isinstance(placing, Placement)
    assert [entry["path"] for entry in placing.entries] == list(paths)


def test_no_repr_of_a_difference_tells_a_content() -> None:
    found = difference(DesiredState(File("/etc/a", b"canary")), Snapshot(files={"/etc/a": None}))

    assert "canary" not in repr(found)
    assert "Y2FuYXJ5" not in repr(found), "base64"


def satisfied(wanted: DesiredState) -> Snapshot:
    """Return the node on which nothing of it is left to do."""
    files = {
        **{
            f.path: FileState("file", f.user, f.group, f.mode, f.sha256)
            for f in wanted.values_of(File)
        },
        **{
            d.path: FileState("directory", d.user, d.group, d.mode)
            for d in wanted.values_of(Directory)
        },
        **{k.path: FileState("link", target=k.target) for k in wanted.values_of(Link)},
        **{absent.path: None for absent in wanted.values_of(Absent)},
    }
    users = {
        u.name: UserState(u.home, u.shell, u.group, frozenset()) for u in wanted.values_of(User)
    }
    names = frozenset(unit.name for unit in wanted.values_of(Unit))
    return Snapshot(
        files=files,
        users=users,
        lines={line.path: frozenset({line.line}) for line in wanted.values_of(Line)},
        groups={group.name: 990 for group in wanted.values_of(Group)},
        packages={
            **{name: None for step in wanted.values_of(Lockstep) for name in step.names},
            **{
                p.name: PackageState(p.version or "1", True, False)
                for p in wanted.values_of(Package)
            },
        },
        packages_like={gone.pattern: frozenset() for gone in wanted.values_of(NoPackage)},
        files_like={like.pattern: frozenset() for like in wanted.values_of(NoOtherFiles)},
        units={
            **dict.fromkeys(names, UP),
            **{gone.name: UnitState() for gone in wanted.values_of(UnitGone)},
        },
        units_like={like.pattern: names for like in wanted.values_of(NoOtherUnits)},
    )


@given(st.sets(st.sampled_from(VALUES)))
def test_a_node_that_is_as_wanted_gets_no_command(values: set[Value]) -> None:
    wanted = DesiredState(*values)

    found = difference(wanted, satisfied(wanted))
    assert found.changes == found.problems == ()
    assert all(part.commands == () for part in found.parts)
    assert isinstance(found, Difference)


@pytest.mark.parametrize("target", ["/opt/a", "/opt/z", None])
def test_a_link_elsewhere_is_placed_anew_whichever_name_its_target_has(target: str | None) -> None:
    wanted = DesiredState(Link("/etc/c", "/opt/m"))
    seen = FileState("link", target=target or "/opt/m")

    changes = difference(wanted, Snapshot(files={"/etc/c": seen})).files.changes

    assert bool(changes) is (target is not None)
    assert all(f"it points to {target}" in change for change in changes)


def test_a_package_s_unit_file_stays_in_force_where_none_of_ours_lies_in_front() -> None:
    """A file of ours that lies elsewhere hides nothing."""
    wanted = DesiredState(File("/etc/a", b"a"), Unit("x.service"))
    placed = FileState("file", "root", "root", 0o644, sha256=File("/etc/a", b"a").sha256)
    state = replace(UP, fragment="/lib/systemd/system/x.service")
    seen = Snapshot(files={"/etc/a": placed}, units={"x.service": state})

    assert difference(wanted, seen).units.commands == ()


def test_the_deadline_of_a_stop_holds_the_longest_of_those_that_stop() -> None:
    wanted = DesiredState(
        UnitGone("vllm-a-0.service", stop_seconds=40),
        UnitGone("vllm-b-0.service", stop_seconds=400),
    )
    seen = Snapshot(units={"vllm-a-0.service": UP, "vllm-b-0.service": UP})

    (stop,) = [
        each
        for each in difference(wanted, seen).units.commands
        if isinstance(each, Command) and each.argv[:2] == ("systemctl", "stop")
    ]

    assert 400 < stop.seconds <= 500


@pytest.mark.parametrize("mode", [-1, 0o10000])
def test_a_mode_that_is_none_is_refused(mode: int) -> None:
    with pytest.raises(FleetError, match="is not a mode: write 0 to 0o7777"):
        File("/etc/a", b"a", mode=mode)
    assert File("/etc/a", b"a", mode=0o7777).mode == 0o7777
