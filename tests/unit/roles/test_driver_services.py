"""What the roles of the driver's own services want of a node, by its system and machine."""

from __future__ import annotations

import dataclasses

import pytest

from gpufleet.converge.desired import DesiredState, File, Unit, UnitGone
from gpufleet.gpu_software.provisioning import BareNode
from gpufleet.node.machine import Machine, System
from gpufleet.operations import join_imex_domain
from gpufleet.settings.parse import parse_settings
from roles import fabric_manager, persistenced

PCIE = Machine(gpus=(0x2330,))
HGX = dataclasses.replace(PCIE, nvswitch=True)
B200 = Machine(gpus=(0x2901,), nvswitch=True, nvlink5=True)


def node(machine: Machine = PCIE, system: str = "debian", **lock) -> BareNode:
    settings = parse_settings({"gpu_lock": {"driver": "580.95.05", **lock}})
    return BareNode("gpu-01", System(system, "12", "x86_64"), machine, settings, {})


def contents(wanted: DesiredState) -> str:
    return "\n".join(file.content.decode() for file in wanted.values_of(File))


def test_ubuntus_persistence_daemon_is_told_to_persist_and_others_are_left_as_packaged():
    undone = contents(persistenced.wanted(node(system="ubuntu")))
    assert "ExecStart=\n" in undone
    assert "--user nvidia-persistenced --persistence-mode" in undone
    for system in ("debian", "rocky"):
        assert "ExecStart=" not in contents(persistenced.wanted(node(system=system))).replace(
            "ExecStartPre=", ""
        )


def test_without_persistence_the_daemon_is_off():
    (gone,) = persistenced.wanted(node(persistence=False))
    assert gone == UnitGone("nvidia-persistenced.service")


@pytest.mark.parametrize("role", [persistenced, fabric_manager])
def test_another_driver_restarts_the_service_and_the_same_does_not(role):
    def fingerprint(driver: str) -> str | None:
        (unit,) = role.wanted(node(HGX, driver=driver)).values_of(Unit)
        return unit.fingerprint

    assert fingerprint("580.95.05") == fingerprint("580.95.05")
    assert fingerprint("580.95.05") != fingerprint("580.178.04")


def test_the_fabric_manager_is_off_where_there_is_no_switch():
    (gone,) = fabric_manager.wanted(node(PCIE))
    assert gone == UnitGone("nvidia-fabricmanager.service")


def test_nvlink_5_needs_infinibands_management_datagrams_and_older_switches_do_not():
    assert "ib_umad" in contents(fabric_manager.wanted(node(B200)))
    assert "ib_umad" not in contents(fabric_manager.wanted(node(HGX)))


def test_another_domain_restarts_imex():
    def unit(*domain: str) -> Unit:
        (found,) = join_imex_domain.imex_wanted("580.95.05", domain).values_of(Unit)
        return found

    assert unit("10.0.0.1") == unit("10.0.0.1")
    assert unit("10.0.0.1") != unit("10.0.0.1", "10.0.0.2")
    wanted = join_imex_domain.imex_wanted("580.95.05", ("10.0.0.1", "10.0.0.2"))
    (nodes,) = [each for each in wanted.values_of(File) if each.path == join_imex_domain.NODES]
    assert nodes.content == b"10.0.0.1\n10.0.0.2\n"
