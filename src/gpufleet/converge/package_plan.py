"""Compare the desired with the installed packages, and return the changes and one transaction.

Pure. `converge/diff.py` calls this module. This module decides which packages change, and chooses
among several acceptable versions:

  * If the wanted version ends in `*`, an acceptable installed version stays. A new node gets the
    newest acceptable version.
  * Packages in a lockstep get the version of the installed packages of this lockstep. So a fabric
    manager that is added later matches the driver, and an interrupted upgrade ends with one
    version.
  * An installed package of a lockstep changes with the others, even if no role declares it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpufleet.converge.desired import (
    DesiredState,
    Lockstep,
    ModuleStream,
    NoPackage,
    Package,
    PackageSource,
    upstream,
)
from gpufleet.converge.package_commands import Manager, Plan
from gpufleet.converge.snapshot import VERSIONLOCK, PackageState, Snapshot, Unknown


@dataclass(frozen=True)
class Packages:
    """
    The changes of packages.

    Attributes:
        changes: one line for each change, as an imperative.
        unknown: (what, why) for each fact that could not be read on the node.
        problems: why the transaction must not begin, as sentences.
        plan: the transaction, or None if there is no change.
    """

    changes: tuple[str, ...] = ()
    unknown: tuple[tuple[str, str], ...] = ()
    problems: tuple[str, ...] = ()
    plan: Plan | None = None


def packages(wanted: DesiredState, snapshot: Snapshot) -> Packages:
    """Compare the desired packages with a snapshot."""
    if not any(wanted.values_of(kind) for kind in (Package, NoPackage, Lockstep, ModuleStream)):
        return Packages()
    manager = snapshot.package_manager
    named = _named(wanted, manager)
    unknown = tuple(_unknown(wanted, named, snapshot))
    if unknown or isinstance(manager, Unknown):
        return Packages(unknown=unknown)
    problems = list(_impossible(wanted, manager))
    seen = {name: _seen(snapshot, name) for name in _names(wanted, named)}
    aligned, out_of_step = _aligned(named, wanted.values_of(Lockstep), seen)
    problems += out_of_step
    changes: list[str] = []
    install, hold, release = [], [], []
    for package in aligned:
        found = seen[package.name]
        held = found is not None and found.held
        if reason := _why_install(package, found):
            install.append(package)
            changes.append(f"install {_exact(package)}: {reason}")
        # A package whose version changes loses its hold, so the transaction sets the hold again.
        # The transaction also holds a new package, and a package that has lost its hold.
        if package.hold and (reason or not held):
            hold.append(package.name)
            if found is not None and found.installed and not reason:
                changes.append(f"hold {package.name} at {found.version}")
        if package.hold is False and held:
            release.append(package.name)
            changes.append(f"release the hold on {package.name}")
    remove = _unwanted(wanted, snapshot)
    changes += [f"remove {name} ({why})" for name, why in remove.items()]
    streams = tuple(_streams(wanted, snapshot))
    changes += [f"enable stream {one.stream} of dnf module {one.name}" for one in streams]
    half = snapshot.dpkg_unfinished
    if (install or remove) and not isinstance(half, Unknown) and half:
        changes.insert(
            0, f"finish the interrupted run of {_TOOL[manager]}: {', '.join(sorted(half))}"
        )
    plan = Plan(
        manager=manager,
        install=tuple(install),
        remove=tuple(remove),
        hold=tuple(hold),
        release=tuple(release),
        sources=wanted.values_of(PackageSource) if install else (),
        lockstep=wanted.values_of(Lockstep),
        streams=streams,
    )
    return Packages(tuple(changes), (), tuple(problems), plan if changes else None)


_TOOL = {"apt": "dpkg", "dnf": "rpm"}


def _named(wanted: DesiredState, manager: Manager | Unknown) -> list[Package]:
    """
    Return the declared packages.

    With dnf, the package that implements holds is added if a hold is declared.
    """
    named = list(wanted.values_of(Package))
    if manager == "dnf" and any(package.hold for package in named):
        named.insert(0, Package(VERSIONLOCK))
    return named


def _unknown(
    wanted: DesiredState, named: list[Package], snapshot: Snapshot
) -> Iterator[tuple[str, str]]:
    if isinstance(snapshot.package_manager, Unknown):
        yield "the package manager", snapshot.package_manager.reason
    for name in _names(wanted, named):
        found = snapshot.packages.get(name, Unknown(snapshot.missed))
        if isinstance(found, Unknown):
            yield f"package {name}", found.reason
    for pattern in wanted.values_of(NoPackage):
        alike = snapshot.packages_like.get(pattern.pattern, Unknown(snapshot.missed))
        if isinstance(alike, Unknown):
            yield f"packages {pattern.pattern}", alike.reason
    for module in wanted.values_of(ModuleStream):
        stream = snapshot.streams.get(module.name, Unknown(snapshot.missed))
        if isinstance(stream, Unknown):
            yield f"dnf module {module.name}", stream.reason
    if isinstance(snapshot.dpkg_unfinished, Unknown) and named:
        yield "dpkg's state", snapshot.dpkg_unfinished.reason


def _names(wanted: DesiredState, named: list[Package]) -> list[str]:
    together = [name for lockstep in wanted.values_of(Lockstep) for name in lockstep.names]
    return list(dict.fromkeys([*(package.name for package in named), *together]))


def _seen(snapshot: Snapshot, name: str) -> PackageState | None:
    found = snapshot.packages[name]
    return None if isinstance(found, Unknown) else found


def _impossible(wanted: DesiredState, manager: Manager) -> Iterator[str]:
    if manager == "apt" and (streams := wanted.values_of(ModuleStream)):
        yield (
            f"dnf module {streams[0].name} is declared, but this node has apt: declare it only for "
            "nodes with dnf"
        )


def _why_install(package: Package, found: PackageState | None) -> str | None:
    if found is None:
        return "it is not installed"
    if not found.installed:
        return f"its installation of {found.version} was not finished"
    return None if package.accepts(found.version) else f"{found.version} is installed"


def _exact(package: Package) -> str:
    return f"{package.name}={package.version}" if package.version else package.name


def _unwanted(wanted: DesiredState, snapshot: Snapshot) -> dict[str, str]:
    """Return {name: reason} for the installed packages to remove, sorted by name."""
    found: dict[str, str] = {}
    for pattern in wanted.values_of(NoPackage):
        alike = snapshot.packages_like[pattern.pattern]
        names = frozenset() if isinstance(alike, Unknown) else alike
        for name in filter(pattern.matches, names):
            found.setdefault(name, f"no {pattern.pattern} is declared")
    return dict(sorted(found.items()))


def _streams(wanted: DesiredState, snapshot: Snapshot) -> Iterator[ModuleStream]:
    for module in wanted.values_of(ModuleStream):
        if snapshot.streams[module.name] != module.stream:
            yield module


# --- lockstep


def _aligned(
    named: list[Package],
    locksteps: tuple[Lockstep, ...],
    seen: dict[str, PackageState | None],
) -> tuple[list[Package], list[str]]:
    """Return the wanted packages with one version for each lockstep, and the contradictions."""
    found = {package.name: package for package in named}
    problems = []
    for lockstep in locksteps:
        members = [found[name] for name in lockstep.names if name in found]
        versions = {member.version for member in members if member.version}
        exact = {upstream(version) for version in versions if _is_whole(version)}
        if len(exact) > 1:
            problems.append(
                f"{', '.join(lockstep.names)} need the same version, but are declared with "
                f"{' and '.join(sorted(exact))}: declare one of these versions for all of them"
            )
            continue
        if (target := _target(members, seen)) is None:
            continue
        for name in lockstep.names:
            package, state = found.get(name), seen[name]
            if package is None and (state is None or upstream(state.version) == upstream(target)):
                continue
            if package is None:
                found[name] = Package(name, target)
            elif package.version is None or not _is_whole(package.version):
                found[name] = replace(package, version=target)
    return list(found.values()), problems


def _target(members: list[Package], seen: dict[str, PackageState | None]) -> str | None:
    """
    Return the common version of a lockstep as a pattern, or None for the newest version.

    The common version is an exact version that a package declares, or else the newest acceptable
    installed version.
    """
    for member in members:
        if member.version and _is_whole(member.version):
            return f"{member.version.partition('-')[0]}-*"
    states = ((member, seen[member.name]) for member in members)
    installed = [
        state.version for member, state in states if state and member.accepts(state.version)
    ]
    if not installed:
        return None
    newest = max(installed, key=_order)
    return f"{newest.partition('-')[0]}-*"


def _is_whole(version: str) -> bool:
    """
    Return whether a version names a single upstream version.

    580.95.05-1 and 580.95.05-* name a single upstream version. 580.* does not.
    """
    return not version.endswith("*") or version.endswith("-*")


def _order(version: str) -> tuple[int, ...]:
    """Return a sort key for NVIDIA's upstream versions, which consist of numbers and dots."""
    return tuple(int(number) for number in re.findall(r"\d+", upstream(version)))
