"""Package transactions with real dnf and rpm, in a folder with a database of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufleet.converge.desired import Lockstep, Package, PackageSource
from gpufleet.converge.package_commands import Plan
from tests.unit.on_node.packages.folders import transact
from tests.unit.on_node.packages.rpms import KEY, RedHat, provide, spec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="rpm installs as root only, also in a folder"),
]
DRIVER = ("drv-fabric", "drv-kernel", "drv-lib")


@pytest.fixture(scope="session")
def gnupg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vendor's key, made once, on a machine that has what makes and reads rpms."""
    provide()
    return tmp_path_factory.mktemp("gnupg")


@pytest.fixture
def system(tmp_path: Path, gnupg: Path) -> Iterator[RedHat]:
    """A system to which a vendor offers a driver in two versions."""
    found = RedHat(tmp_path, gnupg).make()
    found.publish(
        *(
            text
            for version in ("580.1.1", "595.1.1")
            for text in (
                spec("drv-lib", version),
                spec("drv-kernel", version, requires=f"drv-lib = 3:{version}-1.el9"),
                spec("drv-fabric", version),
            )
        )
    )
    yield found
    # dnf leaves GnuPG's agent running for each key that it was shown.
    for home in (gnupg, *tmp_path.rglob("pubring")):
        subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False)


def driver(system: RedHat, version: str, *names: str) -> Plan:
    packages = tuple(Package(name, version, hold=True) for name in names or DRIVER)
    return Plan(
        "dnf",
        install=packages,
        hold=tuple(package.name for package in packages),
        sources=(PackageSource("vendor", system.url, KEY, ("drv-*",)),),
        lockstep=(Lockstep(DRIVER),),
    )


def test_a_driver_goes_up_and_down_and_is_locked(system: RedHat) -> None:
    """Each package at the version and locked there, whatever is newest; a second run is idle."""
    for version in ("580.1.1-1.el9", "595.1.1-1.el9", "580.1.1-1.el9"):
        assert len(transact(driver(system, version), system.root).changed) == 3
        assert system.versions() == dict.fromkeys(DRIVER, version)
        assert system.locks() == [f"{name}-3:{version}.*" for name in DRIVER]
        assert transact(driver(system, version), system.root).changed == []


def test_a_branch_takes_its_newest_of_it(system: RedHat) -> None:
    transact(driver(system, "580.*"), system.root)
    assert system.versions() == dict.fromkeys(DRIVER, "580.1.1-1.el9")


def test_two_versions_of_one_driver_are_refused(system: RedHat) -> None:
    transact(driver(system, "580.1.1-1.el9"), system.root)

    run = transact(driver(system, "595.1.1-1.el9", "drv-fabric"), system.root)
    assert run.status == 1
    assert "580.1.1 of drv-kernel, drv-lib; 595.1.1 of drv-fabric" in run.err
    assert "nothing was touched" in run.err
    assert system.versions() == dict.fromkeys(DRIVER, "580.1.1-1.el9")


def test_a_removal_that_nobody_asked_for_is_refused(system: RedHat) -> None:
    """And one that is asked for takes place in the same transaction."""
    transact(driver(system, "580.1.1-1.el9"), system.root)
    plan = Plan("dnf", remove=("drv-lib",))

    run = transact(plan, system.root)
    assert "drv-kernel 3:580.1.1-1.el9 would be removed" in run.err
    assert len(system.versions()) == 3
    transact(Plan("dnf", remove=("drv-lib", "drv-kernel")), system.root)
    assert set(system.versions()) == {"drv-fabric"}


def test_a_version_that_nobody_has_is_said_in_dnfs_words(system: RedHat) -> None:
    run = transact(driver(system, "999.1.1-1.el9"), system.root)

    assert run.status == 1
    assert "No match for argument: drv-fabric-999.1.1-1.el9" in run.err
    assert "nothing was touched" in run.err


def test_a_script_that_fails_is_not_passed_over(system: RedHat) -> None:
    """dnf calls such a transaction complete; the version before is put back."""
    transact(driver(system, "580.1.1-1.el9"), system.root)
    system.publish(
        spec("drv-lib", "600.1.1"),
        spec("drv-kernel", "600.1.1", scripts={"post": "error('no module was built')"}),
        spec("drv-fabric", "600.1.1"),
    )

    run = transact(driver(system, "600.1.1-1.el9"), system.root)
    assert run.status == 1
    assert "no module was built" in run.err
    assert "Restored" in run.err
    assert system.versions() == dict.fromkeys(DRIVER, "580.1.1-1.el9")
    assert system.locks() == [f"{name}-3:580.1.1-1.el9.*" for name in DRIVER]


@pytest.mark.parametrize("change", ["unsigned", "tampered", "gone"])
def test_a_source_that_is_not_as_it_must_be_is_one_sentence(system: RedHat, change: str) -> None:
    index = system.home / "vendor/repodata/repomd.xml"
    if change == "unsigned":
        index.with_name("repomd.xml.asc").unlink()
    elif change == "tampered":
        index.write_text(index.read_text().replace("<revision>", "<revision>9"))
    else:
        index.parent.rename(index.parent.with_name("elsewhere"))

    run = transact(driver(system, "580.1.1-1.el9"), system.root)
    assert run.status == 1
    assert f"the package source vendor ({system.url}) cannot be used" in run.err
    assert "nothing was touched" in run.err
    assert len(run.err.strip().splitlines()) == 1
    assert system.versions() == {}
