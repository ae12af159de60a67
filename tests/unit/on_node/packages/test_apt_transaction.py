"""Package transactions with real apt and dpkg, in a folder with a database of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from gpufleet.converge.desired import Lockstep, Package, PackageSource
from gpufleet.converge.package_commands import Plan
from lab.vendor import repository
from tests.unit.on_node.packages.folders import KEY, Debian, deb, document, transact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("apt-get"), reason="no apt on this machine"),
    pytest.mark.skipif(os.geteuid() != 0, reason="dpkg installs as root only, also in a folder"),
]

CONF = "{}/etc/gpufleet/apt/apt.conf"
DRIVER = ("drv-kernel", "drv-lib", "drv-fabric")


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The signing keys, made once: a key takes a second."""
    return tmp_path_factory.mktemp("keys")


@pytest.fixture
def system(tmp_path: Path, keys: Path) -> Debian:
    """A system to which a vendor offers a driver in three versions, and the distribution a tool."""
    found = Debian(tmp_path, keys).make()
    found.publish(
        "vendor",
        *(
            package
            for version in ("580.1.1-1", "580.2.2-1", "595.1.1-1")
            for package in (
                deb("drv-lib", version),
                deb("drv-kernel", version, depends=f"drv-lib (= {version})"),
                deb("drv-fabric", version),
                deb("drv-extra", version, depends=f"drv-lib (= {version})"),
            )
        ),
    )
    found.publish("host", deb("tool", "1.0"), deb("tool", "2.0"))
    return found


def vendor(system: Debian, *packages: str) -> PackageSource:
    return PackageSource("vendor", system.url("vendor"), KEY, packages or ("drv-*",))


def driver(system: Debian, version: str, *names: str) -> Plan:
    """The plan that brings a driver's packages, held, to a version."""
    packages = tuple(Package(name, version, hold=True) for name in names or DRIVER)
    return Plan(
        "apt",
        install=packages,
        hold=tuple(package.name for package in packages),
        sources=(vendor(system),),
        lockstep=(Lockstep((*DRIVER, "drv-extra")),),
    )


def test_a_driver_goes_up_and_down_and_is_held(system: Debian) -> None:
    """Each package at the version, marked held, whatever is newest in the repository."""
    for version in ("580.1.1-1", "595.1.1-1", "580.2.2-1"):
        assert len(transact(driver(system, version), system.root).changed) == 3
        assert system.status() == dict.fromkeys(DRIVER, f"hi {version}")
        assert transact(driver(system, version), system.root).changed == [], "a second run"


def test_the_hosts_own_apt_never_sees_the_vendors_index(system: Debian) -> None:
    """Neither its sources, nor its lists, nor its cache: it cannot be broken by the vendor."""
    transact(driver(system, "580.1.1-1"), system.root)

    theirs = [
        *system.root.glob("etc/apt/**/*"),
        *system.root.glob("var/lib/apt/**/*"),
        *system.root.glob("var/cache/apt/**/*"),
    ]
    text = "".join(p.read_text(errors="replace") for p in theirs if p.is_file())
    assert "vendor" not in text
    assert "vendor" not in "".join(p.name for p in theirs)


def test_nothing_but_what_is_named_comes_from_a_vendor(system: Debian) -> None:
    """A vendor that also has a newer `tool` does not get to bring it."""
    system.publish("vendor", deb("tool", "9.0"))
    plan = Plan("apt", install=(Package("tool"),), sources=(vendor(system),))

    assert transact(plan, system.root).changed == [["tool", None, "2.0"]]


def test_an_operators_pin_does_not_turn_a_wanted_version(system: Debian) -> None:
    """Ours is read first; a pin of another branch would have apt find no way."""
    pins = system.root / "etc/apt/preferences.d/vendor-pinning"
    pins.write_text("Package: drv-*\nPin: version 595.*\nPin-Priority: 1000\n")

    transact(driver(system, "580.1.1-1"), system.root)
    assert system.status() == dict.fromkeys(DRIVER, "hi 580.1.1-1")


def test_what_depends_on_the_driver_follows_it_down(system: Debian) -> None:
    """A library that no plan names has to be of the driver's version too."""
    transact(driver(system, "595.1.1-1", *DRIVER, "drv-extra"), system.root)
    system.dpkg("--set-selections", check=False)

    transact(driver(system, "580.1.1-1", *DRIVER, "drv-extra"), system.root)
    assert set(system.status().values()) == {"hi 580.1.1-1"}


def test_two_versions_of_one_driver_are_refused_before_anything_is_touched(
    system: Debian,
) -> None:
    transact(driver(system, "580.1.1-1"), system.root)
    before = system.status()

    run = transact(driver(system, "595.1.1-1", "drv-fabric"), system.root)
    assert run.status == 1
    assert "580.1.1 of drv-kernel, drv-lib; 595.1.1 of drv-fabric" in run.err
    assert "nothing was touched" in run.err
    assert system.status() == before


def test_a_removal_that_nobody_asked_for_is_refused(system: Debian) -> None:
    """The new driver conflicts with something of the operator's."""
    system.publish("host", deb("cuda-app", "1", depends="drv-lib (= 580.1.1-1)"))
    transact(driver(system, "580.1.1-1"), system.root)
    transact(Plan("apt", install=(Package("cuda-app"),)), system.root)
    before = system.status()

    run = transact(driver(system, "595.1.1-1"), system.root)
    assert run.status == 1
    assert "cuda-app" in run.err
    assert "nothing was touched" in run.err
    assert system.status() == before


def test_a_held_package_of_the_operators_is_not_moved(system: Debian) -> None:
    system.publish("host", deb("tool-lib", "1"), deb("needs-tool", "1", depends="tool (>= 2.0)"))
    transact(Plan("apt", install=(Package("tool", "1.0"),), hold=("tool",)), system.root)

    run = transact(Plan("apt", install=(Package("needs-tool"),)), system.root)
    assert run.status == 1
    assert "tool is held at 1.0" in run.err
    assert system.status() == {"tool": "hi 1.0"}


def test_a_renamed_driver_replaces_the_other_in_one_transaction(system: Debian) -> None:
    """As from branch 580's names on Ubuntu to those without a branch."""
    transact(driver(system, "580.1.1-1"), system.root)
    system.publish(
        "vendor",
        deb("drv-open", "595.1.1-1", depends="drv-lib (= 595.1.1-1)", conflicts="drv-kernel"),
    )
    plan = driver(system, "595.1.1-1", "drv-open", "drv-lib", "drv-fabric")

    refused = transact(plan, system.root)
    assert "drv-kernel is held at 580.1.1-1" in refused.err
    subprocess.run(["apt-mark", "-c", CONF.format(system.root), "unhold", "drv-kernel"], check=True)
    refused = transact(plan, system.root)
    assert "drv-kernel 580.1.1-1 would be removed, but that was not requested" in refused.err

    plan = Plan(**{**plan.__dict__, "remove": ("drv-kernel",)})
    transact(plan, system.root)
    assert system.status() == dict.fromkeys(("drv-open", "drv-lib", "drv-fabric"), "hi 595.1.1-1")


def test_a_branch_takes_its_newest_on_a_new_node(system: Debian) -> None:
    transact(driver(system, "580.*"), system.root)
    assert system.status() == dict.fromkeys(DRIVER, "hi 580.2.2-1")


def test_whoever_holds_the_lock_is_named(system: Debian) -> None:
    """By process, command and since when; and nothing is touched."""
    lock = system.root / "var/lib/dpkg/lock-frontend"
    with lock.open("w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        run = transact(driver(system, "580.1.1-1"), system.root, lock_seconds=1)

    assert run.status == 1
    assert f"process {os.getpid()} (" in run.err
    command = Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode()
    assert command[:20] in run.err
    assert "running since 20" in run.err
    assert system.status() == {}


@pytest.fixture
def other(system: Debian) -> Iterator[subprocess.Popen[bytes]]:
    """Another package manager, which ends by itself after two seconds."""
    lock = system.root / "var/lib/dpkg/lock-frontend"
    code = (
        f"import fcntl, time; f = open({str(lock)!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); "
        "print(flush=True); time.sleep(2)"
    )
    with subprocess.Popen(["python3", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        yield process


def test_another_package_manager_is_waited_for(
    system: Debian, other: subprocess.Popen[bytes]
) -> None:
    run = transact(driver(system, "580.1.1-1"), system.root, lock_seconds=30)

    assert len(run.changed) == 3
    assert f"waiting for process {other.pid}" in run.err


def test_an_interrupted_dpkg_is_finished_first(system: Debian) -> None:
    """As a power cut leaves it: unpacked, never configured."""
    system.dpkg("--unpack", str(system.home / "host/tool_1.0_all.deb"))
    assert system.status() == {"tool": "iU 1.0"}

    found = document(transact(driver(system, "580.1.1-1"), system.root))
    assert found["notes"] == ["completed unfinished work: tool"]
    assert system.status()["tool"] == "ii 1.0"


def test_a_package_half_installed_is_installed_again(system: Debian) -> None:
    """As a power cut in the midst of unpacking leaves it: `dpkg --configure` cannot help."""
    transact(driver(system, "580.1.1-1"), system.root)
    status = system.root / "var/lib/dpkg/status"
    text = status.read_text()
    block = next(b for b in text.split("\n\n") if b.startswith("Package: drv-lib"))
    half = block.replace("Status: hold ok installed", "Status: install reinstreq half-installed")
    assert half != block
    status.write_text(text.replace(block, half))

    transact(driver(system, "580.1.1-1"), system.root)
    assert system.status() == dict.fromkeys(DRIVER, "hi 580.1.1-1")


def test_a_stranger_that_cannot_be_finished_is_named(system: Debian) -> None:
    system.publish("host", deb("broken", "1", scripts={"postinst": "echo no such disk; exit 1\n"}))
    system.dpkg("--unpack", str(system.home / "host/broken_1_all.deb"))

    run = transact(driver(system, "580.1.1-1"), system.root)
    assert run.status == 1
    assert "broken is half installed" in run.err
    assert "no such disk" in run.err
    assert set(system.status()) == {"broken"}


FAILS = {"postinst": "echo 'Error! Bad return status for module build'; exit 10\n"}


def test_what_a_packages_script_breaks_is_put_back(system: Debian) -> None:
    """A module that does not build: the driver before is there again, whole and held."""
    transact(driver(system, "580.1.1-1"), system.root)
    system.publish("vendor", deb("drv-kernel", "600.1.1-1", scripts=FAILS))
    system.publish("vendor", deb("drv-lib", "600.1.1-1"), deb("drv-fabric", "600.1.1-1"))

    run = transact(driver(system, "600.1.1-1"), system.root)
    assert run.status == 1
    assert "the installation of drv-kernel failed" in run.err
    assert "Bad return status for module build" in run.err
    assert "Restored" in run.err
    assert system.status() == dict.fromkeys(DRIVER, "hi 580.1.1-1")


def test_a_first_installation_that_fails_leaves_nothing(system: Debian) -> None:
    system.publish("vendor", deb("drv-kernel", "600.1.1-1", scripts=FAILS))
    system.publish("vendor", deb("drv-lib", "600.1.1-1"), deb("drv-fabric", "600.1.1-1"))

    run = transact(driver(system, "600.1.1-1"), system.root)
    assert run.status == 1
    assert "Restored" in run.err
    assert system.status() == {}


def test_what_cannot_be_put_back_is_said(system: Debian) -> None:
    """The former version is in no repository any more."""
    transact(driver(system, "580.1.1-1"), system.root)
    system.publish("vendor", deb("drv-kernel", "600.1.1-1", scripts=FAILS))
    system.publish("vendor", deb("drv-lib", "600.1.1-1"), deb("drv-fabric", "600.1.1-1"))
    for old in (system.home / "vendor").glob("*_580.1.1-1_*"):
        old.unlink()
    system.publish("vendor")

    run = transact(driver(system, "600.1.1-1"), system.root)
    assert run.status == 1
    assert "could not be restored" in run.err
    assert "drv-kernel" in run.err
    system.publish("vendor", deb("drv-kernel", "600.1.2-1"))
    system.publish("vendor", deb("drv-lib", "600.1.2-1"), deb("drv-fabric", "600.1.2-1"))
    assert len(transact(driver(system, "600.1.2-1"), system.root).changed) == 3, "the next run"


def test_a_version_that_nobody_has_is_said_in_apts_words(system: Debian) -> None:
    run = transact(driver(system, "999.1.1-1"), system.root)

    assert "Version '999.1.1-1' for 'drv-kernel' was not found" in run.err
    assert "nothing was touched" in run.err


def index(system: Debian, change: str) -> None:
    """Publish an index that is wrong in one way."""
    pool = system.home / "vendor"
    if change == "unsigned":
        (pool / "InRelease").unlink()
        (pool / "Release.gpg").unlink()
    elif change == "signed by another":
        repository.index(pool, system.keys / "host")
    elif change == "tampered":
        with (pool / "Packages").open("a") as file:
            file.write("\nPackage: more\n")
        (pool / "Packages.gz").unlink()
    elif change == "malformed":
        repository.index(
            pool, system.keys / "vendor", lambda text: f"{text}\nVersion: 1\nno field at all\n\n"
        )
    elif change == "gone":
        shutil.rmtree(pool)


@pytest.mark.parametrize(
    ("change", "means"),
    [
        ("unsigned", "is not signed by its key"),
        ("signed by another", "is not signed by its key"),
        ("tampered", "differ from its signed index"),
        ("malformed", "its index is malformed"),
        ("gone", "there is no repository at this address"),
    ],
)
def test_a_source_that_is_not_as_it_must_be_is_one_sentence(
    system: Debian, change: str, means: str
) -> None:
    """It names the source and its address, says what that means, and nothing was touched."""
    index(system, change)

    run = transact(driver(system, "580.1.1-1"), system.root)
    assert run.status == 1
    assert f"the package source vendor ({system.url('vendor')}) cannot be used" in run.err
    assert means in run.err, run.err
    assert "nothing was touched" in run.err
    assert len(run.err.strip().splitlines()) == 1
    assert system.status() == {}


def test_a_key_that_is_not_on_the_node_is_named(system: Debian) -> None:
    (system.root / KEY.lstrip("/")).unlink()

    run = transact(driver(system, "580.1.1-1"), system.root)
    assert f"the key {KEY} of the package source vendor is not on the node" in run.err


def processes(below: Path) -> list[int]:
    """Return the processes whose command line names a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if str(below).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


@pytest.mark.parametrize("script", ["preinst", "postinst"])
def test_a_power_cut_in_the_midst_of_it_is_mended_by_the_next_run(
    system: Debian, script: str
) -> None:
    """Everything is killed while a package's script runs; the next run ends as wanted."""
    transact(driver(system, "580.1.1-1"), system.root)
    waits = f"touch {system.home}/reached; [ -e {system.home}/on ] || sleep 60\n"
    system.publish(
        "vendor",
        deb("drv-kernel", "600.1.1-1", scripts={script: waits}),
        deb("drv-lib", "600.1.1-1"),
        deb("drv-fabric", "600.1.1-1"),
    )
    plan = driver(system, "600.1.1-1")
    with ThreadPoolExecutor() as threads:
        cut = threads.submit(transact, plan, system.root)
        while not (system.home / "reached").exists():
            assert not cut.done(), cut.result().err
            time.sleep(0.05)
        while left := processes(system.home):
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        assert cut.result().status != 0
    assert system.status() != dict.fromkeys(DRIVER, "hi 600.1.1-1")
    (system.home / "on").touch()

    transact(plan, system.root)
    assert system.status() == dict.fromkeys(DRIVER, "hi 600.1.1-1")
    assert transact(plan, system.root).changed == []


@pytest.fixture
def small(system: Debian) -> Iterator[Debian]:
    """The system with 72 MB for what packages bring."""
    usr = str(system.root / "usr")
    mounted = ["mount", "-t", "tmpfs", "-o", "size=72m", "tmpfs", usr]
    if subprocess.run(mounted, check=False, capture_output=True).returncode:
        pytest.skip("mount is not allowed here")
    yield system
    subprocess.run(["umount", usr], check=True)


def test_a_disk_without_room_is_refused_before_anything_is_touched(small: Debian) -> None:
    """With what is free and what is needed."""
    small.publish("vendor", replace(deb("drv-lib", "600.1.1-1"), fields=HEAVY))

    run = transact(driver(small, "600.1.1-1", "drv-lib"), small.root)
    assert run.status == 1
    assert "has 75 MB free, but 88 MB are needed: free some space; nothing was touched" in run.err
    assert small.status() == {}


# KiB: together with the margin of 64 MiB more than there is.
HEAVY = {"Installed-Size": "20000"}


def test_a_mark_is_put_on_without_asking_any_repository(system: Debian) -> None:
    """So a hold can be corrected on a node that reaches nothing."""
    transact(driver(system, "580.1.1-1"), system.root)
    shutil.rmtree(system.home / "vendor")
    shutil.rmtree(system.home / "host")

    transact(Plan("apt", release=("drv-lib",)), system.root)
    assert system.status()["drv-lib"] == "ii 580.1.1-1"
    transact(Plan("apt", hold=("drv-lib",)), system.root)
    assert system.status()["drv-lib"] == "hi 580.1.1-1"


def test_a_broken_source_of_the_nodes_own_does_not_stop_the_vendors(system: Debian) -> None:
    """It is noted, and what the vendor has is installed."""
    (system.root / "etc/apt/sources.list.d/dead.list").write_text(
        f"deb [trusted=yes] file:{system.home}/nowhere /\n"
    )

    found = document(transact(driver(system, "580.1.1-1"), system.root))
    assert len(found["changed"]) == 3
    assert "nowhere" in " ".join(found["notes"])


def test_a_source_of_the_hosts_with_the_same_address_is_left_out(system: Debian) -> None:
    """apt refuses one address with two keys; an operator's own is not ours to remove."""
    key = system.root / "usr/share/keyrings/host.gpg"
    (system.root / "etc/apt/sources.list.d/cuda.list").write_text(
        f"deb [signed-by={key}] {system.url('vendor')}/ /\n"
    )

    assert len(transact(driver(system, "580.1.1-1"), system.root).changed) == 3
