"""Every simulated machine crossed with every fault it can have: what the checks say of it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpufleet.catalog.checks import CHECKS
from gpufleet.checks.evaluate import evaluate
from gpufleet.checks.finding import Report, Severity
from gpufleet.settings.parse import parse_settings
from lab import machine, nvml
from lab.faults import FAULTS, fault, possible
from lab.machine import Profile
from tests.support.record_node import probe_machine

TODAY = dt.date(2026, 1, 1)

# A GPU or driver that hangs costs the probe's own deadlines, here shortened: eight GPUs that are
# well answer within half a second on two busy cores.
SECONDS = {"init": 6, "gpu": 6, "pairs": 6}

# What a serving node declares: some faults only matter where vLLM is to be installed.
SETTINGS = parse_settings({"vllm": {"version": "0.32.0", "lock": "l", "listen": "127.0.0.1"}})


# What follows from a fault beside what must find it: without its driver a fabric manager fails, and
# so on. A GPU that answers now and then, or until the 20th question, may leave any check unread.
_DRIVER = {"fabric-manager"}
CONSEQUENCES: dict[str, set[str]] = {
    "gpu-flaky": set(CHECKS),
    "gpu-vanishes": set(CHECKS),
    "gpu-garbage": {"gpu-identical", "pcie-width"},
    "gpu-missing": {"nvlink-links"},
    "gpu-excluded": {"nvlink-links"},
    "remap-failed": {"row-remap-spares"},
    "xid-48": {"recovery-action"},
    "xid-95": {"recovery-action"},
    "mismatch": _DRIVER | {"reboot-module"},
    "no-permission": _DRIVER | {"iommu-acs", "sxid"},
    **dict.fromkeys(
        ("no-driver", "nvml-unknown", "nvml-hang", "nvml-crash", "no-library", "old-driver",
         "nouveau", "secure-boot-unsigned"),
        _DRIVER,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One machine with one fault, and what was said of it."""

    profile: str
    fault: str
    report: Report

    @property
    def said(self) -> dict[str, Severity]:
        """The worst that each check said."""
        found: dict[str, Severity] = {}
        for finding in self.report.findings:
            found[finding.check] = max(finding.severity, found.get(finding.check, Severity.OK))
        return found

    @property
    def stops(self) -> set[str]:
        """The checks that stop work and were asked."""
        return {
            finding.check
            for finding in self.report.findings
            if finding.stops and finding.cause is None
        }

    @property
    def blamed(self) -> set[int]:
        """The GPUs that are stopped where one alone was harmed; a dead link has two ends."""
        if not FAULTS[self.fault].concerns_one_gpu(machine.of(self.profile)):
            return set()
        return {
            finding.gpu.index
            for finding in self.report.findings
            if finding.stops and finding.gpu and finding.gpu.index is not None
            and not finding.check.startswith("nvlink-")
        }  # fmt: skip

    @property
    def wrongs(self) -> Iterator[str]:
        """Yield everything that should have been said otherwise."""
        about = FAULTS[self.fault]
        expected = about.expected(Profile.of(self.profile))
        for check, word in expected.items():
            said = self.said.get(check, Severity.OK)
            if said < Severity[word.upper()]:
                yield f"{self.profile} with {self.fault}: {check} says {said.word}, not {word}"
        must_stop = {"block", "unknown"} & set(expected.values())
        if must_stop and not self.report.verdict().stops:
            yield f"{self.profile} with {self.fault}: passes"
        if strays := self.stops - set(expected) - CONSEQUENCES.get(self.fault, set()):
            yield f"{self.profile} with {self.fault}: false alarm by {sorted(strays)}"
        if not must_stop and not self.stops <= CONSEQUENCES.get(self.fault, set()):
            yield f"{self.profile} with {self.fault}: stopped by {sorted(self.stops)}"
        if blamed := self.blamed - {Profile.of(self.profile).count - 1}:
            yield f"{self.profile} with {self.fault}: blames GPUs {sorted(blamed)}"
        if about.harmless and self.report.verdict() > Severity.INFO:
            loud = {check for check, said in self.said.items() if said > Severity.INFO}
            yield f"{self.profile} with {self.fault}, which is harmless: {sorted(loud)}"


def crossed(library: Path, profile: str, faults: list[str]) -> list[Case]:
    """Probe and judge one kind of machine with each of the faults, some at a time."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(partial(case, library, profile), faults))


def case(library: Path, profile: str, name: str) -> Case:
    """Probe and judge one machine with one fault, on its last GPU."""
    harmed = machine.of(profile, fault(name, Profile.of(profile).count - 1))
    document = probe_machine(library, harmed, seconds=SECONDS)
    return Case(profile, name, evaluate({profile: document}, {profile: SETTINGS}, TODAY))


def every_fault_once() -> list[tuple[str, str]]:
    """Return each fault with one kind of machine that can have it, another one each time."""
    chosen = []
    for number, (name, each) in enumerate(FAULTS.items()):
        able = [profile for profile in nvml.profiles() if each.applies(Profile.of(profile))]
        chosen.append((able[number % len(able)], name))
    return chosen


def all_of(profile: str) -> list[str]:
    """Return every fault that this kind of machine can have."""
    return list(possible(Profile.of(profile)))
