"""What a bundle has to hold follows from the nodes' settings, each thing once."""

from __future__ import annotations

from typing import Any

import pytest

from gpufleet.bundle.requirements import GLIBC, Locked, NodeNeeds, needs
from gpufleet.bundle.wheels import Target
from gpufleet.converge.desired import Package
from gpufleet.errors import FleetError
from gpufleet.node.machine import System
from gpufleet.settings.node_settings import NodeSettings

REVISION = "0" * 40
INDEX = "https://index.example/simple"
OWN = "https://own.example/simple"
DEBIAN = System("debian", "12", "x86_64")
VLLM = {"version": "0.32.0", "lock": "v.txt", "uv_lock": "uv.txt", "listen": "127.0.0.1"}
ARCHIVES = {"url": "https://debian.example", "suites": ["bookworm"], "key_file": "debian.asc"}


def node(
    name: str = "gpu-01",
    *,
    system: System = DEBIAN,
    python: str = "3.11.2",
    packages: tuple[Package, ...] = (),
    **written: Any,
) -> NodeNeeds:
    settings = NodeSettings.model_validate({"vllm": VLLM, **written})
    return NodeNeeds(name, settings, system, python, packages)


@pytest.mark.parametrize(
    ("sources", "index"),
    [
        ({}, INDEX),
        ({"index_url": OWN}, OWN),
        ({"find_links": ["/wheels"]}, INDEX),
        ({"find_links": ["/wheels"], "no_index": True}, None),
    ],
)
def test_wheels_come_from_the_index_that_settings_name_else_from_the_common_one_or_from_none(
    sources: dict[str, Any], index: str | None
) -> None:
    found = needs([node(vllm=VLLM | sources)], INDEX, ["wheels"])

    links = tuple(sources.get("find_links", ()))
    target = Target((3, 11), (2, 36), "x86_64")
    assert found.locks == tuple(Locked(path, target, index, links) for path in ("v.txt", "uv.txt"))


@pytest.mark.parametrize(
    ("lock", "python"),
    [
        (None, (3, 11)),
        ({"driver": "580"}, (3, 11)),
        ({"driver": "580", "vllm": {"version": "0.32.0", "python": "3.12"}}, (3, 12)),
    ],
)
def test_wheels_are_for_the_locks_python_where_it_names_one(
    lock: dict[str, Any] | None, python: tuple[int, int]
) -> None:
    written = {} if lock is None else {"gpu_lock": lock}

    (first, _) = needs([node(**written)], INDEX, ["wheels"]).locks

    assert first.target.python == python


@pytest.mark.parametrize(
    ("system", "glibc"),
    [
        (System("ubuntu", "22.04", "aarch64"), (2, 35)),
        (System("rocky", "9.6", "x86_64"), (2, 34)),
        (System("almalinux", "8.10", "x86_64"), (2, 28)),
    ],
)
def test_wheels_are_for_the_c_library_of_the_node(system: System, glibc: tuple[int, int]) -> None:
    (first, _) = needs([node(system=system)], INDEX, ["wheels"]).locks

    assert first.target == Target((3, 11), glibc, system.arch)


@pytest.mark.parametrize(
    ("system", "python"),
    [
        (System("debian", "99", "x86_64"), "3.11.2"),
        (DEBIAN, ""),
        (DEBIAN, "3"),
        (DEBIAN, "3.x"),
        (DEBIAN, "x.11"),
    ],
)
def test_a_node_whose_wheels_are_not_known_is_refused_with_those_that_are(
    system: System, python: str
) -> None:
    with pytest.raises(
        FleetError, match=r"gpu-01: .* which wheels .* Known systems: debian 12"
    ) as refused:
        needs([node(system=system, python=python)], INDEX, ["wheels"])
    assert f"with Python {python or 'unknown'}. Known" in str(refused.value)
    assert all(" ".join(each) in str(refused.value) for each in GLIBC)


def test_models_are_those_with_a_revision_each_once() -> None:
    """One without lies at a path of the node."""
    serving = {
        "a": {"model": "org/a", "revision": REVISION},
        "b": {"model": "/srv/b"},
    }
    nodes = [node(name, serving=serving) for name in ("gpu-01", "gpu-02")]

    found = needs(nodes, INDEX, ["models"])

    assert [(each.repository, each.revision) for each in found.models] == [("org/a", REVISION)]
    assert (found.locks, found.packages, found.programs) == ((), (), ())


def test_packages_need_the_distributions_archives() -> None:
    wanted = (Package("nvidia-open", "580.95.05-1"), Package("curl"))
    mirror = {"url": "http://mirror", "archives": [ARCHIVES]}

    with pytest.raises(FleetError, match=r"gpu-01: `mirror\.archives` is missing"):
        needs([node(packages=wanted)], INDEX, ["packages"])
    (found,) = needs([node(packages=wanted, mirror=mirror)], INDEX, ["packages"]).packages

    assert found.words == ("curl", "nvidia-open=580.95.05-1")
    assert found.architecture == "amd64"
    assert (found.repository, found.containers) == (None, None)


def test_packages_of_red_hats_family_are_a_remark() -> None:
    rocky = System("rocky", "9.6", "x86_64")

    found = needs([node(system=rocky), node("gpu-02", system=rocky)], INDEX, ["packages"])

    assert found.packages == ()
    (remark,) = found.remarks
    assert remark.startswith("gpufleet does not bundle packages of rocky 9.6 on x86_64")
