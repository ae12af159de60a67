"""Each state of the stand-in repository, as a real apt meets it; needs no root and no lab.

The mirror listens on a free port of the loopback; apt works in a directory of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpufleet.errors import FleetError
from lab import package_mirror, vendor
from lab.vendor import driver, states

OLDEST, NEWEST = f"{driver.VERSIONS[0]}-1", f"{driver.VERSIONS[-1]}-1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, (*vendor.TOOLS, "apt-get"))),
        reason="building and reading an apt repository needs apt, dpkg-dev and gnupg",
    ),
]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab")
    vendor.build(folder, "http://unused")
    return folder


@pytest.fixture
def url(state: Path) -> Iterator[str]:
    server = package_mirror.server(state, ("127.0.0.1", 0), state)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/vendor/"
    server.shutdown()
    server.server_close()
    states.put(state / "vendor", states.GOOD)


@dataclass(frozen=True)
class Apt:
    """A private apt with one source, which installs into nothing."""

    root: Path

    def __call__(self, *arguments: str, limit: float = 60) -> tuple[int, str]:
        """Run apt-get; return its exit status and all that it printed."""
        done = subprocess.run(
            ["apt-get", "-o", "Acquire::Retries=0", *arguments],
            env={"PATH": os.environ["PATH"], "APT_CONFIG": f"{self.root}/conf", "LC_ALL": "C"},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def apt(tmp_path: Path, state: Path, url: str) -> Apt:
    for folder in ("etc/apt/sources.list.d", "lists/partial", "archives/partial"):
        (tmp_path / folder).mkdir(parents=True)
    key = state / "vendor/signing-key.gpg"
    source = f"deb [arch=amd64 signed-by={key}] {url} /\n"
    (tmp_path / "etc/apt/sources.list.d/vendor.list").write_text(source)
    (tmp_path / "status").write_text(
        "".join(
            f"Package: {name}\nStatus: install ok installed\nArchitecture: amd64\n"
            "Maintainer: x\nDescription: x\nVersion: 9\n\n"
            for name in ("python3", "dkms")
        )
    )
    (tmp_path / "conf").write_text(
        f'Dir::Etc "{tmp_path}/etc/apt";\nDir::State "{tmp_path}";\nDir::Cache "{tmp_path}";\n'
        f'Dir::State::Lists "{tmp_path}/lists";\nDir::State::status "{tmp_path}/status";\n'
        'Acquire::Languages "none";\nAcquire::http::Proxy "DIRECT";\nAPT::Sandbox::User "";\n'
        'APT::Architecture "amd64";\nAPT::Architectures {"amd64";};\n'
    )
    return Apt(tmp_path)


@pytest.fixture
def put(state: Path) -> Callable[[str], None]:
    return lambda name: states.put(state / "vendor", name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unsigned", "is no longer signed"),
        ("bad-signature", "BADSIG"),
        ("malformed-index", "no Package: header"),
        ("gone", "404"),
    ],
)
def test_an_update_fails_for_the_reason_that_the_state_names(
    apt: Apt, put: Callable[[str], None], name: str, said: str
) -> None:
    """And succeeds again when the repository is mended, without anything done on the node."""
    assert apt("update")[0] == 0

    put(name)
    updated, printed = apt("update")
    usable, complaint = apt("install", "--simulate", "--no-download", "nvidia-smi")
    put("good")

    assert said in printed + complaint
    assert updated != 0 or usable != 0
    assert apt("update")[0] == 0
    assert apt("install", "--simulate", "nvidia-smi")[0] == 0


def test_a_package_that_is_not_what_the_index_says_is_not_taken(
    apt: Apt, put: Callable[[str], None]
) -> None:
    put("wrong-hash")

    assert apt("update")[0] == 0
    status, printed = apt("install", "-y", "--download-only", "libnvidia-ml1")

    assert status != 0
    assert "Hash Sum mismatch" in printed


def test_what_depends_on_a_missing_package_cannot_be_installed(
    apt: Apt, put: Callable[[str], None]
) -> None:
    assert apt("update")[0] == 0
    assert apt("install", "--simulate", "nvidia-driver-cuda")[0] == 0

    put("missing-dependency")
    assert apt("update")[0] == 0
    status, printed = apt("install", "--simulate", "nvidia-driver-cuda")

    assert status != 0
    assert "nvidia-firmware" in printed


def test_only_later_modules_do_not_compile(state: Path, put: Callable[[str], None]) -> None:
    """So that a driver that was installed before can be gone back to."""

    def broken(version: str) -> bool:
        package = states.served(state / "vendor") / f"nvidia-kernel-open-dkms_{version}_amd64.deb"
        listed = subprocess.run(
            ["dpkg-deb", "-c", package], capture_output=True, text=True, check=True
        )
        return "/broken" in listed.stdout

    assert not broken(NEWEST)

    put("dkms-fails")

    assert broken(NEWEST)
    assert not broken(OLDEST)


def test_a_slow_vendor_answers_a_kilobyte_a_second(apt: Apt, put: Callable[[str], None]) -> None:
    put("slow")
    begin = time.monotonic()

    with pytest.raises(subprocess.TimeoutExpired):
        apt("update", limit=5)

    assert time.monotonic() - begin < 10


def test_a_state_is_one_that_there_is_and_needs_a_repository(tmp_path: Path, state: Path) -> None:
    with pytest.raises(FleetError, match="cannot be 'on-fire': it is good, unsigned"):
        states.put(state / "vendor", "on-fire")
    with pytest.raises(FleetError, match="has no repository yet: run `gpufleet lab up`"):
        states.put(tmp_path, "good")


def test_a_repository_that_is_built_anew_is_good(state: Path, put: Callable[[str], None]) -> None:
    put("unsigned")
    (state / "vendor/recipe.sha256").unlink()

    vendor.build(state, "http://unused")

    assert states.current(state / "vendor") == "good"
    assert (states.served(state / "vendor") / "InRelease").exists()


def test_a_state_stays_when_nothing_has_to_be_built(
    state: Path, put: Callable[[str], None]
) -> None:
    put("unsigned")

    vendor.build(state, "http://unused")

    assert states.current(state / "vendor") == "unsigned"
    put("good")


def test_there_is_no_proprietary_module_from_the_branch_on_that_lost_it(state: Path) -> None:
    there = {path.name for path in (state / "vendor/repository").glob("nvidia-kernel-*.deb")}

    for version in driver.VERSIONS:
        assert f"nvidia-kernel-open-dkms_{version}-1_amd64.deb" in there
        has = f"nvidia-kernel-dkms_{version}-1_amd64.deb" in there
        assert has == (int(version.split(".")[0]) < driver.OPEN_ONLY)


@pytest.mark.parametrize("version", driver.VERSIONS)
def test_every_version_of_the_driver_installs_as_a_whole(apt: Apt, version: str) -> None:
    """Named as a deploy names them, and dependencies in no other version."""
    apt("update")
    names = (
        *("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "libcuda1", "libnvidia-ml1"),
        *("nvidia-modprobe", "nvidia-smi", "nvidia-persistenced", "nvidia-fabricmanager"),
        *("libnvidia-nscq", "libnvsdm", "nvidia-imex"),
    )

    status, printed = apt("install", "--simulate", *(f"{name}={version}-1" for name in names))

    assert status == 0, printed
    assert f"Inst nvidia-driver-cuda ({version}-1" in printed
    assert all(f"({version}-1" in line for line in printed.splitlines() if line[:5] == "Inst ")
