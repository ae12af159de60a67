"""Which packages move, and to which version, decided from values alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.converge.desired import (
    DesiredState,
    Lockstep,
    ModuleStream,
    NoPackage,
    Package,
    PackageSource,
    Value,
)
from gpufleet.converge.package_commands import Plan, commands, files, parameters, steps
from gpufleet.converge.package_plan import VERSIONLOCK, Packages, packages
from gpufleet.converge.snapshot import PackageState, Snapshot, Unknown, questions
from gpufleet.errors import FleetError
from gpufleet.on_node.packages import outcome
from gpufleet.on_node.packages.dnf_transaction import parse_listing
from gpufleet.on_node.packages.outcome import Change, Installed
from tests.support.rows import each_row

PARTS = ("lib", "kernel", "fabric")
SOURCE = PackageSource("vendor", "https://x.invalid/debian12/x86_64", "/etc/k", ("lib", "kern*"))


def compare(*values: Value, manager: str = "apt", **installed: str) -> Packages:
    """Compare with a node that has these packages, and has answered every question."""
    wanted = DesiredState(*values)
    names = {question[1] for question in questions(wanted) if question[0] == "package"}
    state = {name: PackageState(version, True, False) for name, version in installed.items()}
    like = {
        none.pattern: frozenset(name for name in installed if none.matches(name))
        for none in wanted.values_of(NoPackage)
    }
    return packages(
        wanted,
        Snapshot(
            packages={name: state.get(name) for name in names},
            packages_like=like,
            streams={module.name: "old" for module in wanted.values_of(ModuleStream)},
            package_manager="dnf" if manager == "dnf" else "apt",
        ),
    )


def moved(found: Packages) -> dict[str, str | None]:
    """Return {name: version} of what the transaction installs."""
    return {each.name: each.version for each in (found.plan or Plan("apt")).install}


def driver(version: str | None) -> tuple[Value, ...]:
    return (*(Package(name, version) for name in PARTS), Lockstep((*PARTS, "extra")))


def test_a_branch_keeps_what_is_installed_of_it() -> None:
    """Also when the repository has a newer one: only an operator moves a driver."""
    assert compare(*driver("580.*"), **dict.fromkeys(PARTS, "580.1.1-1")).plan is None


def test_what_comes_late_takes_the_version_of_the_others() -> None:
    """A fabric manager for a node that was given switches is the driver's, not the newest."""
    found = compare(*driver("580.*"), lib="580.1.1-1", kernel="580.1.1-1")
    assert moved(found) == {"fabric": "580.1.1-*"}


def test_an_upgrade_that_was_interrupted_ends_on_its_newer_version() -> None:
    found = compare(*driver("580.*"), lib="580.2.1-1", kernel="580.10.1-1", fabric="580.2.1-1")
    assert moved(found) == {"lib": "580.10.1-*", "fabric": "580.10.1-*"}


def test_a_member_that_is_installed_but_not_wanted_goes_along() -> None:
    """An operator's nvidia-settings would keep the driver from moving, or stay behind."""
    at = dict.fromkeys((*PARTS, "extra"), "580.1.1-1")
    assert moved(compare(*driver("595.1.1-1"), **at))["extra"] == "595.1.1-*"
    assert compare(*driver("580.1.1-1"), **at).plan is None


def test_members_wanted_with_two_versions_are_refused() -> None:
    values = (Package("lib", "580.1.1-1"), Package("kernel", "595.1.1-1"), Lockstep(PARTS))
    assert "580.1.1 and 595.1.1: declare one of these versions" in compare(*values).problems[0]


def test_what_must_go_goes_in_the_same_transaction() -> None:
    found = compare(
        Package("open-new", "595.1-1"), NoPackage("open-*", ("open-new",)), **{"open-580": "580.1"}
    )
    assert found.plan
    assert found.plan.remove == ("open-580",)
    assert found.changes == (
        "install open-new=595.1-1: it is not installed",
        "remove open-580 (no open-* is declared)",
    )
    assert compare(NoPackage("open-*", ("open-new",)), **{"open-new": "1"}).plan is None


def test_a_node_with_dnf_gets_what_holds_need() -> None:
    """dnf holds nothing by itself."""
    plan = compare(Package("lib", "1-1", hold=True), manager="dnf").plan
    assert plan
    assert [package.name for package in plan.install] == [VERSIONLOCK, "lib"]


def test_a_module_of_dnf_is_no_wish_for_apt() -> None:
    stream = ModuleStream("nvidia-driver", "580-open")
    assert compare(stream, manager="dnf").changes == (
        "enable stream 580-open of dnf module nvidia-driver",
    )
    assert "this node has apt" in compare(stream).problems[0]


@given(st.sets(st.sampled_from(PARTS)), st.sampled_from(["580.1.1-1", "580.*", None]))
def test_after_the_transaction_nothing_is_left_to_do(present: set[str], version: str) -> None:
    """Whatever of them was there: what is said to be installed satisfies what is wanted."""
    before = dict.fromkeys(present, "580.0.9-1")
    found = compare(*driver(version), **before)
    newest = {name: (text or "").replace("*", "1") for name, text in moved(found).items()}
    after = {**before, **{name: text or "580.0.9-1" for name, text in newest.items()}}
    if version == "580.*" and not present:
        after = dict.fromkeys(after, "580.7.7-1")

    assert compare(*driver(version), **after).plan is None


def test_what_was_not_read_is_unknown() -> None:
    """No package is installed, removed or held on a guess."""
    wanted = DesiredState(Package("lib"), NoPackage("old*"), ModuleStream("m", "s"))
    found = packages(wanted, Snapshot(missed="no answer", package_manager=Unknown("no answer")))

    assert found.plan is None
    assert {what for what, _ in found.unknown} >= {"the package manager", "package lib"}


@given(st.sampled_from(["apt", "dnf"]))
def test_every_command_line_has_a_deadline_and_no_shell(manager: str) -> None:
    plan = Plan(
        "dnf" if manager == "dnf" else "apt",
        install=(Package("lib", "1-1", hold=True),),
        remove=("old",),
        hold=("lib",),
        sources=(SOURCE,),
    )
    assert all(0 < step.seconds <= 3600 for step in steps(plan))
    assert not any("sh" in line[:1] for line in commands(plan))


def test_another_package_manager_is_waited_for_five_minutes() -> None:
    plan = Plan("apt", install=(Package("lib"),))

    assert parameters(plan)["lock_seconds"] == 300
    assert any('DPkg::Lock::Timeout "300"' in text for text in map(str, files(plan).values()))


def test_no_package_of_a_repair_can_be_taken_for_an_option() -> None:
    """What was torn is put behind these words, in its version."""
    (repair,) = [
        step for step in steps(Plan("apt", install=(Package("lib"),))) if step.name == "repair"
    ]

    assert repair.argv[-1] == "--"
    assert "--reinstall" in repair.argv


def test_a_hold_that_was_lost_is_told_with_the_version_that_it_keeps() -> None:
    wanted = Package("lib", "1", hold=True)

    assert compare(wanted, lib="1").changes == ("hold lib at 1",)
    assert compare(wanted, lib="2").changes == ("install lib=1: 2 is installed",)


@pytest.mark.parametrize(
    "none", [("nvidia-dkms-*", "no such name!"), ("no such pattern!",), ("nv*", "x y")]
)
def test_a_pattern_that_no_package_can_have_is_refused(none: tuple[str, ...]) -> None:
    with pytest.raises(FleetError):
        NoPackage(none[0], none[1:])


# --- what a simulation foretells


ASKED = {"install": [["lib", "2.0-1"]], "remove": ["old"], "lockstep": [["lib", "kernel"]]}
AT = {
    "lib": Installed("1.0-1", True, False),
    "kernel": Installed("1.0-1", True, False),
    "app": Installed("3-1", True, False),
    "pinned": Installed("3-1", True, True),
    "old": Installed("1", True, False),
}
GOOD = [
    Change("lib", "1.0-1", "2.0-1"),
    Change("kernel", "1.0-1", "2.0-1"),
    Change("old", "1", None),
]


@each_row(
    ("changes", "said"),
    [
        (GOOD, None),
        ([*GOOD, Change("dep", None, "1")], None),
        ([*GOOD, Change("app", "3-1", None)], "app 3-1 would be removed"),
        ([*GOOD, Change("app", "3-1", "2-1")], "app would be downgraded from 3-1 to 2-1"),
        ([*GOOD, Change("app", "3-1", "2.0-9")], None),  # what follows the driver
        ([*GOOD, Change("pinned", "3-1", "4-1")], "pinned is held at 3-1"),
        (GOOD[::2], "1.0 of kernel; 2.0 of lib"),
        (GOOD[1:], "lib would be version 1.0-1, but 2.0-1 is wanted"),
        (GOOD[:2], "old 1 would stay, but must be removed"),
    ],
)
def test_what_nobody_asked_for_is_a_reason_against_it(
    changes: list[Change], said: str | None
) -> None:
    found = outcome.judge(changes, ASKED, AT, lambda one, other: one < other)

    assert (said in "; ".join(found)) if said else found == []


DNF = """\
Last metadata expiration check: 0:00:29 ago on Sun Nov 22 07:41:53 2026.
> > ================================================================================
 Package       Architecture      Version                Repository         Size
================================================================================
Installing:
 nvidia-kmod-common-of-a-long-name
               noarch            3:595.91.07-1.el9      nvidia-cuda       5.4 k
     replacing  nvidia-old.x86_64 3:580.95.05-1.el9
Downgrading:
 lib           x86_64            3:580.95.05-1.el9      nvidia-cuda       5.4 M
Removing dependent packages:
 app           noarch            2.0-1.el9              @vendor              0

Transaction Summary
"""


def test_the_table_of_dnf_is_read_whole() -> None:
    """Names that are too long for their column, and what another package replaces, too."""
    assert parse_listing(DNF) == [
        ("Installing", "nvidia-kmod-common-of-a-long-name", "3:595.91.07-1.el9"),
        ("replacing", "nvidia-old", "3:580.95.05-1.el9"),
        ("Downgrading", "lib", "3:580.95.05-1.el9"),
        ("Removing dependent packages", "app", "2.0-1.el9"),
    ]
