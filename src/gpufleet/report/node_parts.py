"""Build the part of a report about a node: its GPUs and links, its replicas, its versions. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from gpufleet.checks.driver import loaded_version
from gpufleet.checks.finding import Report as Findings
from gpufleet.checks.probe_facts import Reading
from gpufleet.errors import FleetError
from gpufleet.fleet.fleet_plan import running_stages
from gpufleet.gpu_software.driver_activation import matches_lock
from gpufleet.gpu_software.lock_from_nodes import installed_versions, modules_flavour
from gpufleet.node import interconnect
from gpufleet.node.interconnect import Interconnect
from gpufleet.node.topology import node_from_probe, value_or
from gpufleet.planning.stage import Running
from gpufleet.remote.answer_forms import refuse_malformed
from gpufleet.report.fleet_document import MOST_GPUS, Gpu, Island, Node, Tier, Version
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.node_variables import NodeVars


def gpu_node(
    name: str,
    declared: NodeVars,
    answer: Mapping[str, Any] | str,
    found: Findings,
    releases: Collection[str] = (),
) -> Node:
    """
    Return the part for a node with GPUs.

    `answer` is the node's probe, or a sentence why there is no probe. `found` has the findings of
    all checks in the fleet. `releases` are the ids of the declared releases.
    """
    plain = Node(name=name, groups=declared.groups)
    if isinstance(answer, str):
        return plain.model_copy(update={"silent": answer})
    try:
        with refuse_malformed(name):
            parts = dict(_parts(name, declared.settings, answer, found, releases))
            return Node.model_validate({**plain.model_dump(), **parts})
    except FleetError as error:
        why = "; ".join(error.problems).removeprefix(f"{name}: ")
        return plain.model_copy(update={"silent": f"the node's probe cannot be read: {why}"})


def _parts(
    name: str,
    settings: NodeSettings,
    document: Mapping[str, Any],
    found: Findings,
    releases: Collection[str],
) -> Iterator[tuple[str, Any]]:
    links = interconnect.from_probe(name, document)
    running = tuple(running_stages({name: document}))
    packages = value_or(document["system"]["packages"], {})
    os_release = document["os_release"]
    system = (value_or(os_release.get("id")), value_or(os_release.get("version_id")))
    kernel = value_or(document["kernel"]) or "not known"
    yield "system", f"{' '.join(str(e) for e in system if e) or 'system not known'}, Linux {kernel}"
    yield "gpus", tuple(_gpus(name, document, links, running, found))
    yield (
        "islands",
        tuple(
            Island(gpus=gpus, links=_links(links, gpus)) for gpus in links.islands if len(gpus) > 1
        ),
    )
    yield "tiers", tuple(Tier(name=tier, groups=groups) for tier, groups in links.tiers.items())
    cordon = value_or(document.get("cordon"))
    by = f"cordoned by {cordon['by']}: {cordon['why']}" if cordon else ""
    yield "notes", (*links.warnings, *([by] if by else []))
    yield "versions", tuple(_versions(document, settings, running, releases))
    yield (
        "packages",
        {str(package): str(each["version"]) for package, each in sorted(packages.items())},
    )
    yield "releases", tuple(sorted(map(str, value_or(document["system"]["releases"], ()))))


def _gpus(
    name: str,
    document: Mapping[str, Any],
    links: Interconnect,
    running: Iterable[Running],
    found: Findings,
) -> Iterator[Gpu]:
    on: dict[str, list[str]] = {}
    for each in running:
        for uuid in each.gpu_uuids:
            on.setdefault(uuid, []).append(each.id)
    unfit = found.unfit(name)
    for gpu in node_from_probe(name, document).gpus[:MOST_GPUS]:
        yield Gpu(
            index=gpu.index,
            name=gpu.name,
            memory_mib=gpu.memory_mib,
            numa=gpu.numa_node,
            nics=tuple(links.nearest_nics.get(gpu.index, ())),
            replicas=tuple(sorted(on.get(gpu.uuid, ()))),
            unfit="; ".join(each.found for each in unfit.get(gpu.index, ())),
        )


def _links(links: Interconnect, gpus: tuple[int, ...]) -> str:
    counts = sorted(set(links.widths(gpus).values()))
    return " and ".join(f"NV{count}" for count in counts)


# -- versions


def _versions(
    document: Mapping[str, Any],
    settings: NodeSettings,
    running: Iterable[Running],
    releases: Collection[str],
) -> Iterator[Version]:
    """
    Yield the versions of the driver, CUDA, packages, vLLM and Python.

    A version that cannot be read is unknown.
    """
    lock = settings.gpu_lock
    driver = loaded_version(Reading("", document)) or _found(document["driver"]["module"])
    locked = lock.driver if lock else ""
    yield _version(
        "driver", driver, locked, matches_lock(driver, locked) if driver and locked else None
    )
    cuda = value_or(document["driver"].get("cuda"))
    most = f"{cuda // 1000}.{cuda % 1000 // 10}" if isinstance(cuda, int) else None
    yield _version("newest CUDA that the driver supports", "" if driver == "" else most)
    modules = modules_flavour(document)
    wanted = lock.modules if lock else ""
    yield _version("kernel modules", "" if driver == "" else modules, wanted)
    yield from _packaged(document, settings)
    release = ", ".join(releases)
    if releases:
        whole = document["system"]["releases"]
        there = () if _found(whole) == "" else value_or(whole)
        found = None if there is None else ", ".join(sorted(map(str, there)))
        agrees = None if there is None else set(releases) <= set(there)
        yield _version("vLLM that is installed", found, release, agrees)
    if runs := sorted({each.release or "not known" for each in running}):
        yield _version("vLLM that runs", ", ".join(runs), release)
    yield _version("Python of the system", value_or(document["python"]))


def _packaged(document: Mapping[str, Any], settings: NodeSettings) -> Iterator[Version]:
    """Yield the versions of the CUDA toolkit, DCGM, its exporter and NVLSM."""
    lock = settings.gpu_lock
    known = value_or(document["system"]["packages"]) is not None
    found = installed_versions(document, settings) if known else {}
    toolkit, wanted = found.get("toolkit", {}), lock.toolkit if lock else None
    yield _version(
        "CUDA toolkit",
        _words(toolkit.values()) if known else None,
        _words((wanted.profile, wanted.branch, wanted.version)) if wanted else "",
    )
    dcgm, own = found.get("dcgm") or {}, lock.dcgm if lock else None
    yield _version("DCGM", dcgm.get("version") or "" if known else None, own.version if own else "")
    exporter = (own and own.exporter) or ""
    yield _version("DCGM exporter", dcgm.get("exporter") or "" if known else None, exporter)
    nvlsm = found.get("nvlsm") or ""
    if nvlsm or (lock and lock.nvlsm):
        yield _version("NVLSM", nvlsm if known else None, (lock and lock.nvlsm) or "")


def _words(parts: Iterable[str | None]) -> str:
    found = " ".join(filter(None, parts))
    return "" if found == "none" else found


def _found(value: Any) -> str | None:
    """Return a fact of the probe as text, None if it is unknown, or "" if it does not exist."""
    if isinstance(value, Mapping) and "missing" in value:
        return "" if value["missing"] == "absent" else None
    return str(value)


def _version(
    part: str, found: str | None, declared: str = "", agrees: bool | None = None
) -> Version:
    if agrees is None and declared and found is not None:
        agrees = found == declared
    return Version(part=part, found=found, declared=declared, agrees=agrees)


def gpu_names(gpus: Iterable[Gpu]) -> str:
    """Return a node's GPUs as text, for example `8 NVIDIA H100 80GB HBM3`."""
    counts: dict[str, int] = {}
    for each in gpus:
        counts[each.name] = counts.get(each.name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no GPU"
