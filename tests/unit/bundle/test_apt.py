"""What apt is told of a vendor's archive: it gives what it is meant to give, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufleet.bundle import serve
from gpufleet.bundle.apt import Archives, Source
from gpufleet.errors import FleetError
from lab.vendor.deb import Package
from tests.unit.bundle import archives
from tests.unit.bundle.conftest import needs_apt, running

pytestmark = needs_apt


@pytest.fixture
def resolved(tmp_path: Path):
    """Give apt over a distribution and a vendor that has its packages, too, and newer ones."""
    own = (Package("openssl", "3-1"), Package("tool", "1-1", fields={"Depends": "openssl"}))
    theirs = (
        Package("openssl", "9-1"),
        Package("cuda-x", "13-1", fields={"Depends": "openssl"}),
        Package("stray", "1-1"),
    )
    keys = tmp_path / "keys"
    key = archives.distribution(tmp_path / "www/debian", own, keys)
    archives.distribution(tmp_path / "www/vendor", theirs, keys)
    with running(serve.bind_server(tmp_path / "www", ("127.0.0.1", 0))) as url:
        elsewhere = url.replace("127.0.0.1", "localhost")
        sources = [
            Source(f"{url}/debian", ("bookworm",), ("main",), key),
            Source(f"{elsewhere}/vendor", ("bookworm",), ("main",), key, ("cuda-*",)),
        ]
        found = Archives(tmp_path / "home", sources, "amd64")
        found.update()
        yield found


def names(resolved: Archives, *words: str) -> set[str]:
    return {Path(remote.path).name for remote in resolved.packages(words)}


def test_the_distribution_s_packages_are_the_distribution_s(resolved: Archives):
    """A vendor's newer openssl is not what its own package brings along."""
    assert names(resolved, "cuda-x") == {"cuda-x_13-1_amd64.deb", "openssl_3-1_amd64.deb"}


def test_what_a_vendor_is_not_meant_to_give_is_not_taken(resolved: Archives):
    with pytest.raises(FleetError, match="stray"):
        names(resolved, "stray")


def test_versions_may_be_patterns(resolved: Archives):
    assert names(resolved, "openssl=3-*") == {"openssl_3-1_amd64.deb"}
    with pytest.raises(FleetError, match="openssl"):
        names(resolved, "openssl=4-*")
