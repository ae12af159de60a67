"""Group nodes by their GPUs, and derive the settings of each group.  Pure.

A kind is a set of nodes with the same number of GPUs of the same model. Each kind becomes a group
of the inventory. The input is the documents that `on_node/probe/probe.py` prints
(docs/reference/probe.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.artifacts.package_lock import PROGRAMS
from gpufleet.catalog import gpu_models
from gpufleet.errors import FleetError
from gpufleet.formatting import join_names
from gpufleet.gpu_software.lock_from_nodes import modules_flavour
from gpufleet.gpu_software.repository import VENDOR, repository_path, vendor_repository
from gpufleet.gpu_software.version_sets import ReleaseSet, release_set, release_sets
from gpufleet.node.machine import Generation, Machine, System, from_probe
from gpufleet.node.topology import node_from_probe, value_or
from gpufleet.settings.gpu_lock import GpuLock
from gpufleet.versions import numbers

NO_GPUS = "monitoring"
"""The group of nodes without GPUs. These nodes can monitor the other nodes."""
BARE_SET = "r580-lts"
"""The set of versions for nodes without a driver. Its driver branch has the longest support."""

# The compute capabilities of each generation of GPUs (from NVIDIA's page on CUDA GPUs).
_CAPABILITIES: Mapping[Generation, frozenset[tuple[int, int]]] = {
    "turing": frozenset({(7, 5)}),
    "ampere": frozenset({(8, 0), (8, 6)}),
    "ada": frozenset({(8, 9)}),
    "hopper": frozenset({(9, 0)}),
    "blackwell": frozenset({(10, 0), (10, 3), (12, 0), (12, 1)}),
}


@dataclass(frozen=True)
class Kind:
    """
    Nodes with the same GPUs.

    Attributes:
        group: the name of the group in the inventory.
        nodes: the names of the nodes.
        gpus: the number of GPUs in each node.
        model: the name of the GPUs' model.
        memory_gib: the memory of one GPU in GiB, as CUDA reports it. If the GPU is unknown, the
            least memory of its generation. None: not known.
        drivers: the versions of the loaded drivers. It is empty if no driver is loaded.
        lock: the suitable versions. None: the nodes have no GPUs.
        source: the origin of the versions in `lock`.
    """

    group: str
    nodes: tuple[str, ...]
    gpus: int
    model: str
    memory_gib: float | None
    drivers: tuple[str, ...]
    lock: GpuLock | None = None
    source: str = ""
    why: Mapping[str, str] | None = None

    @property
    def bare(self) -> bool:
        """Return whether the nodes have GPUs but no driver."""
        return bool(self.gpus) and not self.drivers

    @property
    def gets_driver(self) -> bool:
        """
        Return whether `deploys/node.py` installs a driver of a branch that no node has loaded.
        """
        loaded = {_branch(each) for each in self.drivers}
        return self.lock is not None and self.lock.branch not in loaded


@dataclass(frozen=True)
class Findings:
    """The kinds of nodes, the settings of NVIDIA's repository, and remarks for the operator."""

    kinds: tuple[Kind, ...]
    repository: Mapping[str, str]
    remarks: tuple[str, ...]


def read_kinds(documents: Mapping[str, Mapping[str, Any]]) -> Findings:
    """Return the kinds of the probed nodes. Raises `FleetError` with every unsupported node."""
    systems: dict[str, System] = {}
    machines: dict[str, Machine] = {}
    problems = []
    for name, document in documents.items():
        try:
            systems[name], machines[name] = from_probe(document)
            vendor_repository(systems[name])
        except FleetError as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
    if problems:
        raise FleetError(*problems)
    paths = {name: repository_path(system) for name, system in systems.items()}
    if len(set(paths.values())) > 1:
        said = "; ".join(f"{name}: {system}" for name, system in systems.items())
        raise FleetError(
            f"the nodes run different systems ({said}), and NVIDIA has a separate "
            "repository for each system: run this command once for each system, with the "
            "hosts of that system and a directory of their own"
        )
    grouped: dict[tuple[str, int], list[str]] = {}
    for name, document in documents.items():
        grouped.setdefault(_model(document, machines[name]), []).append(name)
    kinds = tuple(
        _kind(model, count, {name: documents[name] for name in names}, machines[names[0]])
        for (model, count), names in grouped.items()
    )
    system = next(iter(systems.values()))
    return Findings(kinds, _repository(system), tuple(_remarks(kinds)))


def _model(document: Mapping[str, Any], machine: Machine) -> tuple[str, int]:
    """
    Return the model and the number of a node's GPUs.

    Without a driver, the GPUs' generation replaces the model.
    """
    named = [gpu.name for gpu in node_from_probe("", document).gpus] if _driver(document) else []
    if named:
        cards = [gpu_models.product_card(name) for name in named]
        names = [card.name if card else name for card, name in zip(cards, named, strict=True)]
        # A GPU that does not answer is still listed on the PCI bus.
        return (names[0] if len(set(names)) == 1 else "mixed"), max(len(named), len(machine.gpus))
    if not machine.gpus:
        return "", 0
    generations = sorted(machine.generations)
    return (generations[0].title() if len(generations) == 1 else "unknown"), len(machine.gpus)


def _kind(
    model: str, count: int, documents: Mapping[str, Mapping[str, Any]], machine: Machine
) -> Kind:
    names = tuple(documents)
    if not count:
        return Kind(NO_GPUS, names, 0, "no GPUs", None, ())
    slug = re.sub(r"[^a-z0-9]+", "_", model.lower()).strip("_")
    drivers = tuple(dict.fromkeys(filter(None, map(_driver, documents.values()))))
    lock, source, why = _lock(drivers, documents)
    return Kind(
        f"gpu_{slug}x{count}",
        names,
        count,
        model,
        _memory(model, machine),
        drivers,
        lock,
        source,
        why,
    )


def _driver(document: Mapping[str, Any]) -> str | None:
    """Return the version of the loaded driver, or None if no driver is loaded."""
    found = value_or(document["driver"]["module"])
    return found if isinstance(found, str) and found[:1].isdigit() else None


def _branch(driver: str) -> str:
    return driver.partition(".")[0]


def _memory(model: str, machine: Machine) -> float | None:
    """Return the least memory in GiB that a GPU of this model has, or None if unknown."""
    if card := next((each for each in gpu_models.cards() if each.name == model), None):
        return card.memory_gib
    capabilities = [_CAPABILITIES.get(each, frozenset()) for each in machine.generations]
    wanted = frozenset().union(*capabilities)
    if not all(capabilities):
        return None
    return min(
        (each.memory_gib for each in gpu_models.cards() if each.compute_capability in wanted),
        default=None,
    )


def _lock(
    drivers: tuple[str, ...], documents: Mapping[str, Mapping[str, Any]]
) -> tuple[GpuLock, str, Mapping[str, str]]:
    """
    Return the versions for nodes, their origin, and the reasons for them.

    They are the set of versions for the loaded driver's branch, with the loaded driver. If no
    driver is loaded, or if the drivers have several branches or an unknown branch, the set is
    `BARE_SET`.
    """
    sets = {each.lock.branch: each for each in release_sets().values()}
    suiting = {_branch(each): sets.get(_branch(each)) for each in drivers}
    found: ReleaseSet | None = next(iter(suiting.values()), None)
    if len(suiting) != 1 or found is None:
        bare = release_set(BARE_SET)
        return bare.lock, f"The set {bare.name}: {bare.title}.", bare.why
    # Within a branch, nodes keep the installed driver.
    driver = found.lock.branch if len(drivers) > 1 else drivers[0]
    flavours = {modules_flavour(each) for each in documents.values()}
    flavour = flavours.pop() if len(flavours) == 1 else None
    lock = found.lock.model_copy(
        update={"driver": driver, "modules": flavour or found.lock.modules}
    )
    return lock, f"The installed driver, with the set {found.name}: {found.title}.", found.why


def _repository(system: System) -> dict[str, str]:
    """
    Return the settings `cuda.repository` for a system. The hash of the key is left out if unknown.
    """
    found = vendor_repository(system)
    written = {"url": f"{VENDOR}/{repository_path(system)}"}
    if found.keyring_sha256:
        written["keyring_sha256"] = found.keyring_sha256
    return written


def _remarks(kinds: tuple[Kind, ...]) -> Iterator[str]:
    for kind in kinds:
        who = join_names(kind.nodes)
        if kind.bare and kind.lock:
            yield (
                f"{who}: no NVIDIA driver is loaded: run `gpufleet deploy node` first, "
                f"which installs {kind.lock.driver}"
            )
        elif kind.lock and kind.gets_driver:
            yield (
                f"{who}: the driver {join_names(kind.drivers)} is in no set of versions on "
                "which vLLM's CUDA 13 runs: run `gpufleet deploy node` first, which "
                f"installs {kind.lock.driver}"
            )


def old_pythons(documents: Mapping[str, Mapping[str, Any]], release: str) -> str | None:
    """
    Return a sentence about nodes whose Python is too old for the lock that gpufleet ships, or None.
    """
    python = PROGRAMS["vllm"].python
    oldest = tuple(map(int, python.split(".")))
    old = {
        name: numbers(str(version))
        for name, document in documents.items()
        if (version := value_or(document["python"])) and numbers(str(version))[:2] < oldest
    }
    if not old:
        return None
    named = ", ".join(f"{name} ({'.'.join(map(str, each))})" for name, each in old.items())
    least = ".".join(map(str, min(old.values())[:2]))
    return (
        f"the lock file of vLLM that gpufleet ships is for Python {python} and newer, but "
        f"these nodes have an older Python: {named}. Run `gpufleet packages lock vllm "
        f"{release} --python {least}` in the new directory. This command writes the file "
        "that `vllm.lock` names"
    )
