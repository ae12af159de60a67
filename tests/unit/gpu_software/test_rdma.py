"""What RDMA between GPUs and adapters needs, and why it cannot be had."""

from __future__ import annotations

import pytest

from gpufleet.converge.desired import Absent, File, Package
from gpufleet.gpu_software import rdma
from gpufleet.settings.gpu_lock import GpuLock
from gpufleet.settings.gpu_settings import Rdma
from tests.support.rows import each_row

OPEN = GpuLock(driver="580.95.05")
PROPRIETARY = GpuLock(driver="580.95.05", modules="proprietary")


def files(wanted) -> dict[str, str]:
    return {each.path: each.content.decode() for each in wanted.values_of(File)}


def test_what_loads_at_boot_is_what_is_loaded_now():
    for way in ("dma_buf", "peermem"):
        asked = Rdma(way=way)
        boot = files(rdma.desired_rdma(asked, "debian"))[rdma.MODULES_AT_BOOT]
        named = tuple(line for line in boot.splitlines() if not line.startswith("#"))
        assert named == rdma.required_modules(asked)


def test_peermem_comes_after_the_adapters_driver_and_only_where_asked():
    assert (
        "pre: ib_core mlx5_ib"
        in files(rdma.desired_rdma(Rdma(way="peermem"), "debian"))[rdma.ORDER]
    )
    assert Absent(rdma.ORDER) in rdma.desired_rdma(Rdma(), "debian").values
    assert rdma.PEERMEM not in rdma.required_modules(Rdma())


def test_only_what_is_not_loaded_is_loaded():
    assert rdma.missing_modules(Rdma(), {"ib_uverbs", "ib_umad", "mlx5_core"}) == ("rdma_ucm",)
    assert rdma.missing_modules(Rdma(), set(rdma.required_modules(Rdma()))) == ()


@pytest.mark.parametrize(
    ("distribution", "apart"), [("debian", True), ("ubuntu", True), ("rocky", False)]
)
def test_the_adapters_library_is_a_package_of_its_own_on_debian_alone(distribution, apart):
    names = {each.name for each in rdma.desired_rdma(Rdma(), distribution).values_of(Package)}
    assert ("ibverbs-providers" in names) == apart


@each_row(
    ("way", "lock", "kernel", "said"),
    [
        ("dma_buf", OPEN, "6.1.0-40-amd64", None),
        ("dma_buf", OPEN, "5.12.0", None),
        ("dma_buf", OPEN, "5.11.22-generic", "gpu.rdma.way"),
        ("dma_buf", PROPRIETARY, "6.1.0-40-amd64", "modules: open"),
        ("peermem", PROPRIETARY, "5.4.0", None),
    ],
)
def test_dma_buf_needs_open_modules_and_a_kernel_that_takes_it(way, lock, kernel, said):
    found = list(rdma.refusals(Rdma(way=way), lock, kernel))
    assert [said in each for each in found] == ([True] if said else [])


def test_without_rdma_nothing_of_ours_stays_and_nothing_is_refused():
    wanted = rdma.desired_rdma(None, "debian")
    assert all(isinstance(each, Absent) for each in wanted)
    assert list(rdma.refusals(None, PROPRIETARY, "4.4")) == []


def test_peermem_without_the_vendors_driver_is_explained():
    said = rdma.load_error("nvidia_peermem", "modprobe: ERROR: ... Invalid argument")
    assert "DOCA" in said
    assert "no such module" in rdma.load_error("ib_umad", "no such module")
