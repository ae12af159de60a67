"""NVIDIA's container toolkit: one version, from one signed place, and containers that keep GPUs."""

from __future__ import annotations

import pytest

from gpufleet.converge.desired import File, Lockstep, Package, PackageSource
from gpufleet.converge.snapshot import Snapshot, UnitState, Unknown
from gpufleet.gpu_software import container_toolkit
from gpufleet.settings.gpu_settings import ContainerToolkit

SETTING = ContainerToolkit(version="1.18.0-1", key_file="keys/toolkit.asc")
ARMOURED = b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n...\n"


def test_all_four_packages_have_the_version_and_are_held():
    wanted = container_toolkit.desired_toolkit(SETTING, ARMOURED)
    assert {(each.version, each.hold) for each in wanted.values_of(Package)} == {("1.18.0-1", True)}
    assert wanted.values_of(Lockstep) == (
        Lockstep(tuple(each.name for each in wanted.values_of(Package))),
    )


@pytest.mark.parametrize(("key", "suffix"), [(ARMOURED, "asc"), (b"\x99\x02\x0d\x04", "gpg")])
def test_the_source_takes_the_key_that_lies_there_and_names_it_as_apt_reads_it(key, suffix):
    wanted = container_toolkit.desired_toolkit(SETTING, key)
    (source,) = wanted.values_of(PackageSource)
    contents = {each.path: each.content for each in wanted.values_of(File)}
    assert contents[source.key] == key
    assert source.key.endswith(f".{suffix}")


def test_every_package_may_come_from_the_source_and_no_driver_may():
    (source,) = container_toolkit.desired_toolkit(SETTING, ARMOURED).values_of(PackageSource)
    stems = tuple(pattern.rstrip("*") for pattern in source.packages)
    assert all(name.startswith(stems) for name in container_toolkit.PACKAGES)
    assert not "nvidia-open".startswith(stems)


def test_links_of_nvidias_devices_and_no_others_count():
    assert container_toolkit.has_device_links({"1:3", "195:255"})
    assert not container_toolkit.has_device_links({"1:3", "10:195"})
    assert not container_toolkit.has_device_links(frozenset())


def test_an_engine_is_named_only_when_it_is_known_to_run():
    seen = Snapshot(
        units={
            "docker.service": UnitState(load="loaded", active="active"),
            "containerd.service": UnitState(load="loaded", active="inactive"),
            "podman.service": Unknown("systemctl gave no answer"),
        }
    )
    assert container_toolkit.running_engines(seen) == ("docker.service",)
    assert "restart these containers" in container_toolkit.engine_warning("docker.service")
