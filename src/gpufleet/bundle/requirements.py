"""List all downloads of a fleet without duplicates: packages, wheels, models and programs. Pure.

The settings are used as written, before a mirror replaces their URLs, because a bundle is filled
from the original URLs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from gpufleet.bundle.models import Model
from gpufleet.bundle.wheels import Target
from gpufleet.converge.desired import Package
from gpufleet.errors import FleetError
from gpufleet.node.machine import System
from gpufleet.settings.cuda_settings import Repository
from gpufleet.settings.mirror_settings import Archive
from gpufleet.settings.monitoring_settings import PublishedProgram
from gpufleet.settings.node_settings import NodeSettings

# The version of the C library of each system (`ldd --version`), which determines the compatible
# wheels. Ubuntu 26.04 has a newer version than the one in this table, and accepts the same wheels.
GLIBC = {
    ("debian", "12"): (2, 36),
    ("debian", "13"): (2, 41),
    ("ubuntu", "22.04"): (2, 35),
    ("ubuntu", "24.04"): (2, 39),
    ("ubuntu", "26.04"): (2, 39),
    ("rhel", "8"): (2, 28),
    ("rhel", "9"): (2, 34),
    ("rhel", "10"): (2, 39),
}
KINDS = ("packages", "wheels", "models", "programs")
_DEB = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class NodeNeeds:
    """
    A node's settings as written, its system, the version of its Python ("3.11.2") and its packages.
    """

    name: str
    settings: NodeSettings
    system: System
    python: str
    packages: tuple[Package, ...]


@dataclass(frozen=True)
class Packages:
    """The packages of one kind of node, which apt resolves together, and their sources."""

    system: System
    words: tuple[str, ...]
    archives: tuple[Archive, ...]
    repository: Repository | None
    containers: tuple[str, str] | None
    """The URL and the key file of the container toolkit's repository, or None."""

    @property
    def architecture(self) -> str:
        """The processor architecture by Debian's name."""
        return _DEB[self.system.arch]


@dataclass(frozen=True)
class Locked:
    """One lock file for one kind of node, and the sources of its wheels."""

    path: str
    target: Target
    index_url: str | None
    find_links: tuple[str, ...]


@dataclass(frozen=True)
class Needs:
    """The contents of a bundle, and remarks on what a bundle cannot contain."""

    packages: tuple[Packages, ...]
    locks: tuple[Locked, ...]
    models: tuple[Model, ...]
    programs: tuple[PublishedProgram, ...]
    """The archives of programs that publishers offer, with URL and hash."""
    remarks: tuple[str, ...]


def needs(nodes: Iterable[NodeNeeds], index_url: str, kinds: Collection[str] = KINDS) -> Needs:
    """
    Return the downloads of these kinds that the nodes need.

    `index_url` is the package index for nodes whose settings have none. Raises FleetError with
    every missing setting.
    """
    packages: dict[Packages, None] = {}
    locks: dict[Locked, None] = {}
    models: dict[Model, None] = {}
    programs: dict[PublishedProgram, None] = {}
    remarks: dict[str, None] = {}
    problems: dict[str, None] = {}
    for node in nodes:
        if "packages" not in kinds:
            pass
        elif node.system.is_red_hat:
            remarks[
                f"gpufleet does not bundle packages of {node.system}: mirror the repositories of "
                "this system with `dnf reposync`, and NVIDIA's repository to `mirror.vendor`"
            ] = None
        elif not (found := _packages(node)).archives:
            problems[
                f"{node.name}: `mirror.archives` is missing: set the archives of "
                f"{node.system.id}, which contain the dependencies (docs/gpu-nodes/air-gap.md), "
                "or bundle only `--only wheels --only models`"
            ] = None
        else:
            packages[found] = None
        if "wheels" in kinds:
            locks |= dict.fromkeys(_locks(node, index_url))
        if "models" in kinds:
            models |= dict.fromkeys(_models(node.settings))
        if "programs" in kinds:
            programs |= dict.fromkeys(_programs(node.settings))
    if problems:
        raise FleetError(*problems)
    return Needs(tuple(packages), tuple(locks), tuple(models), tuple(programs), tuple(remarks))


def _packages(node: NodeNeeds) -> Packages:
    settings = node.settings
    toolkit = settings.gpu.container_toolkit
    return Packages(
        system=node.system,
        words=tuple(sorted(map(_word, node.packages))),
        archives=settings.mirror.archives if settings.mirror else (),
        repository=settings.cuda.repository if settings.cuda else None,
        containers=(toolkit.repository, toolkit.key_file) if toolkit else None,
    )


def _locks(node: NodeNeeds, index_url: str) -> Iterator[Locked]:
    for wanted in (*node.settings.engines.values(), node.settings.litellm):
        if wanted is None:
            continue
        target = _target(node)
        index = None if wanted.no_index else wanted.index_url or index_url
        for path in (wanted.lock, wanted.uv_lock):
            yield Locked(path, target, index, wanted.find_links)


def _models(settings: NodeSettings) -> Iterator[Model]:
    if servers := settings.servers:
        for served in settings.serving.values():
            for repository, revision in served.hub_sources:
                yield Model(repository, revision, servers.hf_endpoint, servers.hf_token_file)


def _programs(settings: NodeSettings) -> Iterator[PublishedProgram]:
    monitoring = settings.monitoring
    for each in (
        settings.node_exporter,
        monitoring and monitoring.prometheus,
        monitoring and monitoring.alertmanager,
    ):
        if each and each.archive:
            yield each.archive


def _word(package: Package) -> str:
    return f"{package.name}={package.version}" if package.version else package.name


def _target(node: NodeNeeds) -> Target:
    """
    Return the properties by which the wheels of a node are chosen.

    If the lock states a Python version, this version is used, because the node's Python in the
    probe is the system's Python.
    """
    system = "rhel" if node.system.is_red_hat else node.system.id
    glibc = GLIBC.get((system, node.system.major))
    lock = node.settings.gpu_lock
    python = lock.vllm.python if lock and lock.vllm else node.python
    parts = python.split(".")
    if glibc is None or len(parts) < 2 or not all(part.isdecimal() for part in parts[:2]):
        known = ", ".join(f"{name} {version}" for name, version in GLIBC)
        raise FleetError(
            f"{node.name}: gpufleet does not know which wheels run on {node.system} with Python "
            f"{python or 'unknown'}. Known systems: {known}"
        )
    return Target((int(parts[0]), int(parts[1])), glibc, node.system.arch)
