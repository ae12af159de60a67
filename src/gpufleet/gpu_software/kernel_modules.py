"""Check that every kernel has the locked driver's module on disk and would load it. Pure.

The source is the document of `on_node/gpu_software/kernel_modules.py`. Only the files on disk
count. The exit status of a package manager does not, because a maintainer script may succeed
although it has not built a module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from gpufleet.gpu_software.driver_activation import matches_lock
from gpufleet.node.machine import Machine

SecureBoot = Literal["refuse", "enrolled"]


def build_refusal(machine: Machine, policy: SecureBoot) -> str | None:
    """Return why modules must not be built for a node, or None if they may be built."""
    if policy == "enrolled" or machine.secure_boot is False:
        return None
    state = "is on" if machine.secure_boot else "could not be read"
    return (
        f"Secure Boot {state}. With Secure Boot, a DKMS module loads only if the firmware knows "
        "the signing key, and a person must confirm that key at the console. Enrol the key "
        "(`mokutil --import`, docs/gpu-nodes/supported-systems.md) and set gpu.secure_boot: "
        "enrolled, or switch Secure Boot off"
    )


def kernels_without_module(document: Mapping[str, Any], driver: str) -> tuple[str, ...]:
    """
    Return the kernels that have no module of the driver. `driver` is a version or a branch.
    """
    return tuple(
        row["kernel"]
        for row in _rows(document)
        if _missing(row["nvidia"]) or not matches_lock(row["nvidia"], driver)
    )


def module_problems(document: Mapping[str, Any], driver: str) -> tuple[str, ...]:
    """Return why the locked driver would be missing after a reboot, as sentences."""
    if _missing(document["kernels"]):
        why = document["kernels"].get("detail") or document["kernels"]["missing"]
        return (
            f"gpufleet could not read which kernels have an NVIDIA module ({why}): check this by "
            "hand",
        )
    return (*_unbuilt(document, driver), *_unsigned(document))


def _unbuilt(document: Mapping[str, Any], driver: str) -> Iterator[str]:
    said = document.get("said", {})
    lacks = kernels_without_module(document, driver)
    for row in _rows(document):
        if row["kernel"] not in lacks:
            continue
        kernel = row["kernel"]
        has = "no NVIDIA module" if _missing(row["nvidia"]) else f"module {row['nvidia']}"
        which = "runs now" if row["running"] else "is installed"
        which += ", boots next" if row["newest"] and not row["running"] else ""
        reason = f" DKMS said:\n{said[kernel]}" if said.get(kernel) else ""
        yield (
            f"kernel {kernel} {which} and has {has}, but driver {driver} is required: install the "
            "packages that DKMS needs to build the module, or remove this kernel if the node does "
            f"not boot it.{reason}"
        )


def _unsigned(document: Mapping[str, Any]) -> Iterator[str]:
    """
    Yield a problem for modules that Secure Boot would refuse, because their signature is missing or
    not trusted.
    """
    if document["secure_boot"] is not True:
        return
    bare = [
        row["kernel"]
        for row in _rows(document)
        if not _missing(row["nvidia"]) and _missing(row["signer"])
    ]
    if bare:
        yield (
            f"Secure Boot is on, but the modules of {', '.join(bare)} are not signed: let DKMS "
            "sign the modules (`mok_signing_key` in /etc/dkms/framework.conf), then run "
            "`dkms install --force`"
        )
    elif document["enrolled"] is False:
        yield (
            "Secure Boot is on, but the firmware does not know DKMS's signing key: enrol the key "
            "with `mokutil --import`, and confirm it at the console at the next boot"
        )


def _rows(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [] if _missing(document["kernels"]) else list(document["kernels"])


def _missing(value: Any) -> bool:
    return isinstance(value, Mapping) and "missing" in value
