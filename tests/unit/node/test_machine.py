"""What a machine is comes from the PCI bus and the kernel's files, with a driver or without one."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.node.machine import Kernel, Machine, System, from_probe, generation
from tests.support.checkout import ROOT
from tests.support.rows import each_row

NODES = ROOT / "src/gpufleet/catalog/data/nodes"
ABSENT = {"missing": "absent"}


def recorded(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((NODES / f"{name}.json").read_text())
    return document


def without_driver(document: dict[str, Any]) -> dict[str, Any]:
    """The same node before anything of NVIDIA's was installed."""
    bare = copy.deepcopy(document)
    bare["driver"] = dict.fromkeys(bare["driver"], ABSENT)
    bare["driver"]["kernels"] = [
        {**row, "nvidia": ABSENT, "signer": ABSENT} for row in document["driver"]["kernels"]
    ]
    for section in ("gpus", "nvlink", "numa", "fabric"):
        bare[section] = []
    bare["system"]["modules"] = [
        name for name in bare["system"]["modules"] if not name.startswith("nvidia")
    ]
    for function in bare["pci"]:
        function["driver"] = ABSENT
    return bare


FABRIC = {
    "a100x2-pcie": (False, False, False),
    "a100x4-pcie": (False, False, False),
    "a100x8": (True, False, False),
    "b200x8": (True, True, False),
    "gb200x4": (False, False, True),
    "h100x2-nvl": (False, False, False),
    "h100x8": (True, False, False),
    "h200x8": (True, False, False),
    "l40sx8": (False, False, False),
    "rtx4090x2": (False, False, False),
    "t4x1": (False, False, False),
}


@each_row("name", FABRIC)
def test_each_recorded_machine_has_the_fabric_that_its_boards_have(name: str) -> None:
    """NVSwitches managed here, NVLink 5, IMEX: HGX boards, HGX from Blackwell on, racks."""
    _, machine = from_probe(recorded(name))
    assert (machine.nvswitch, machine.nvlink5, machine.imex) == FABRIC[name]


@each_row("name", FABRIC)
def test_a_machine_is_the_same_before_its_driver_is_there(name: str) -> None:
    """Else the first run would choose packages that the second takes away again."""
    document = recorded(name)
    system, machine = from_probe(document)
    bare_system, bare = from_probe(without_driver(document))

    assert bare_system == system
    assert len(bare.gpus) == len(document["gpus"])
    compared = ("gpus", "nvswitch", "nvlink5", "imex", "grace", "secure_boot")
    assert [getattr(bare, key) for key in compared] == [getattr(machine, key) for key in compared]
    assert [kernel.module for kernel in bare.kernels] == [None]


@each_row(
    ("devices", "managed"),
    [
        ([False, False, True], True),
        ([False, False], False),  # a virtual machine with adapters of its own
        ([{"missing": "no_permission"}], True),
        ([None], True),  # an older probe's document
        ([], True),
    ],
    ids=["on the board", "virtual machine", "not read", "not asked", "no adapters"],
)
def test_nvlink_5_switches_are_managed_by_who_has_their_adapters(
    devices: list[Any], managed: bool
) -> None:
    """What could not be read is taken for there: a fabric manager too many fails loudly."""
    document = recorded("b200x8")
    document["nics"]["infiniband"] = [{"manages_switches": each} for each in devices]
    _, machine = from_probe(document)
    assert (machine.nvswitch, machine.nvlink5) == (managed, managed)


def test_generations_by_id_agree_with_what_the_driver_says_of_recorded_gpus() -> None:
    """The other route: NVML's compute capability of the same GPU."""
    capabilities = {
        (7, 0): "volta", (7, 5): "turing", (8, 0): "ampere", (8, 6): "ampere",
        (8, 9): "ada", (9, 0): "hopper", (10, 0): "blackwell", (10, 3): "blackwell",
    }  # fmt: skip
    seen = set()
    for name in FABRIC:
        document = recorded(name)
        for gpu in document["gpus"]:
            functions = {each["bus_id"]: each["device"] for each in document["pci"]}
            capability = tuple(gpu["compute_capability"])
            bus_id = next(at for at in functions if at.lower() in gpu["pci"]["bus_id"].lower())
            assert generation(int(functions[bus_id], 16)) == capabilities[capability], name
            seen.add(capability)
    assert len(seen) >= 5


def test_ids_of_a_block_have_one_generation() -> None:
    """NVIDIA gives ids by sixteen and more to a chip: no row of the table ends within them."""
    for block in range(0x1000, 0x4000, 0x10):
        assert len({generation(block + each) for each in range(0x10)}) == 1, hex(block)


def test_a_chip_that_is_not_in_the_table_has_no_generation() -> None:
    assert generation(0x3500) is None
    assert Machine(gpus=(0x3500, 0x2330)).generations == {"hopper"}


def test_what_cannot_be_told_is_refused_all_at_once() -> None:
    document = recorded("h100x8")
    document["os_release"]["version_id"] = ABSENT
    document["pci"] = {"missing": "timeout"}

    with pytest.raises(FleetError) as refused:
        from_probe(document)
    assert [problem.split(" could not")[0] for problem in refused.value.problems] == [
        "/etc/os-release's VERSION_ID",
        "the node's PCI bus",
    ]


def test_another_processor_is_refused() -> None:
    with pytest.raises(FleetError, match="riscv64: NVIDIA's packages are for x86_64 and aarch64"):
        from_probe({**recorded("h100x8"), "arch": "riscv64"})


def test_no_efi_is_no_secure_boot_and_what_cannot_be_read_is_unknown() -> None:
    document = recorded("h100x8")
    for value, expected in (
        (ABSENT, False),
        ({"missing": "no_permission"}, None),
        (True, True),
    ):
        document["system"]["secure_boot"] = value
        assert from_probe(document)[1].secure_boot is expected


def test_the_running_kernel_counts_where_the_others_could_not_be_listed() -> None:
    document = recorded("h100x8")
    document["driver"]["kernels"] = {"missing": "timeout"}

    assert from_probe(document)[1].kernels == (Kernel("6.8.0-90-generic", True, True),)


def test_packages_of_kernels_are_told_from_modules_that_are_built_for_them() -> None:
    document = recorded("gb200x4")
    document["system"]["packages"] |= {
        "linux-modules-nvidia-580-6.8.0-90-generic": {"version": "1", "held": False},
        "linux-image-generic": {"version": "1", "held": False},
    }
    assert from_probe(document)[1].kernel_packages == (
        "linux-headers-6.14.0-1013-nvidia-64k",
        "linux-image-6.14.0-1013-nvidia-64k",
        "linux-image-generic",
    )


def test_red_hats_family_is_one_system_within_a_major_version() -> None:
    assert System("rocky", "9.6", "x86_64").major == "9"
    assert System("ubuntu", "24.04", "x86_64").major == "24.04"
