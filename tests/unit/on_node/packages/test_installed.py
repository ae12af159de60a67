"""What dpkg's database says of packages, as dpkg-query prints it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gpufleet.on_node.packages import installed
from gpufleet.on_node.packages.apt_transaction import Apt
from tests.support.rows import each_row

OWN = "ii \tdpkg\tamd64\t1.22\n"


@pytest.fixture
def updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where dpkg keeps what an interrupted run has not merged: nothing is there."""
    monkeypatch.setattr(installed, "DPKG_UPDATES", str(tmp_path))
    return tmp_path


def known(*rows: str) -> dict[str, Any]:
    return read(*rows)[0]


def read(*rows: str) -> tuple[dict[str, Any], list[str]]:
    return installed.dpkg(lambda *_: OWN + "".join(f"{row}\n" for row in rows))


@pytest.mark.usefixtures("updates")
def test_an_installed_package_has_its_version_with_and_without_its_architecture() -> None:
    found = known("ii \tcurl\tamd64\t8.5.0-2")
    wanted = {"version": "8.5.0-2", "installed": True, "held": False}
    assert found["curl"] == found["curl:amd64"] == wanted


@pytest.mark.usefixtures("updates")
@pytest.mark.parametrize("status", ["rc ", "un ", "pn "])
def test_a_package_of_which_only_its_configuration_is_left_is_not_there(status: str) -> None:
    found, unfinished = read(f"{status}\tcurl\tamd64\t8.5.0-2")
    assert not {"curl", "curl:amd64"} & set(found)
    assert unfinished == []


@pytest.mark.usefixtures("updates")
@each_row("status", ["iiR", "iU ", "iF ", "iH ", "iW "])
def test_a_package_that_is_half_done_or_has_to_be_installed_anew_is_not_finished(
    status: str,
) -> None:
    found, unfinished = read(f"{status}\tcurl\tamd64\t8.5.0-2")
    assert found["curl"]["installed"] is False
    assert unfinished == ["curl"]


@pytest.mark.usefixtures("updates")
def test_a_held_package_is_held() -> None:
    found, unfinished = read("hi \tcurl\tamd64\t8.5.0-2")
    assert found["curl"] == {"version": "8.5.0-2", "installed": True, "held": True}
    assert unfinished == []


@pytest.mark.usefixtures("updates")
@pytest.mark.parametrize("first", [0, 1])
def test_the_native_architecture_goes_before_a_foreign_one(first: int) -> None:
    """dpkg-query sorts architectures by name: a foreign one may be first."""
    rows = ["ii \tlibc6\tamd64\t2.39", "ii \tlibc6\ti386\t2.35"]
    found = known(rows[first], rows[1 - first])
    assert found["libc6"]["version"] == found["libc6:amd64"]["version"] == "2.39"
    assert found["libc6:i386"]["version"] == "2.35"


@pytest.mark.usefixtures("updates")
def test_a_package_of_a_foreign_architecture_alone_is_not_the_native_one() -> None:
    """`apt install libnuma1` would install the native one, so it is not installed."""
    found = known("ii \tlibnuma1\ti386\t2.0.18")
    assert "libnuma1" not in found
    assert found["libnuma1:i386"]["installed"]


@pytest.mark.usefixtures("updates")
def test_a_pattern_finds_what_is_there_of_a_foreign_architecture_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status").touch()
    monkeypatch.setattr(installed, "DPKG_STATUS", str(tmp_path / "status"))
    rows = OWN + "ii \tlibnvidia-gl-535\ti386\t535.1\nii \tlibc6\tamd64\t2.39\n"

    found = installed.read(["libnvidia-gl-535"], ["libnvidia-*"], [], lambda *_: rows, str)

    assert found["packages"] == {"libnvidia-gl-535": None}
    assert found["packages_like"] == {"libnvidia-*": ["libnvidia-gl-535"]}


@pytest.mark.skipif(not shutil.which("dpkg-query"), reason="no dpkg on this machine")
@each_row("native", ["amd64", "arm64"])
def test_a_transaction_takes_the_native_package_for_the_name(tmp_path: Path, native: str) -> None:
    """dpkg-query prints amd64 before arm64, also on a node whose own packages are of arm64."""
    folder = tmp_path / native / "var/lib/dpkg"
    (folder / "info").mkdir(parents=True)
    rows = (("dpkg", native), ("libx", "amd64"), ("libx", "arm64"))
    (folder / "status").write_text(
        "".join(
            f"Package: {name}\nStatus: install ok installed\nMaintainer: m\nMulti-Arch: same\n"
            f"Architecture: {architecture}\nVersion: 1-{architecture}\nDescription: d\n\n"
            for name, architecture in rows
        )
    )

    found = Apt({"root": str(tmp_path / native), "steps": {}}).installed()

    assert found["libx"].version == f"1-{native}"
    assert found["libx:amd64"].version == "1-amd64"


def test_files_of_an_interrupted_dpkg_are_said(updates: Path) -> None:
    (updates / "0001").touch()
    (updates / "tmp.i").touch()
    assert read()[1] == ["an interrupted dpkg"]


def rpms(*rows: str) -> tuple[dict[str, Any], list[str]]:
    return installed.rpm(lambda *_: "".join(f"{row}\n" for row in rows))


def test_an_rpm_in_two_versions_was_left_by_an_interrupted_run() -> None:
    found, unfinished = rpms("curl\tx86_64\t8.5.0-1", "curl\tx86_64\t8.6.0-1", "vim\tx86_64\t9-1")

    assert unfinished == ["curl"]
    assert found["curl"] == {"version": "8.6.0-1", "installed": False, "held": False}
    assert found["vim"] == {"version": "9-1", "installed": True, "held": False}


def test_kernels_of_several_versions_and_two_architectures_of_a_library_are_meant_so() -> None:
    found, unfinished = rpms(
        "kernel\tx86_64\t5.14.0-1",
        "kernel\tx86_64\t5.14.0-2",
        "glibc\ti686\t2-1",
        "glibc\tx86_64\t2-1",
    )

    assert unfinished == []
    assert found["kernel-5.14.0-1"]["installed"]
    assert found["kernel"]["version"] == "5.14.0-2"
    assert {name for name in found if name.startswith("glibc")} == {
        "glibc",
        "glibc:i686",
        "glibc:x86_64",
    }
