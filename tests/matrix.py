"""Every simulated machine crossed with every fault it can have: what the checks say of it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpufleet.checks.finding import Report, Severity
from gpufleet.checks.judge import judge
from gpufleet.settings import node_settings
from lab import machine, nvml
from lab.faults import FAULTS, fault, possible
from lab.machine import Profile
from tests.nodes.record import probe_machine

TODAY = dt.date(2026, 1, 1)

# A GPU or driver that hangs costs the probe's own deadlines, here shortened: eight GPUs that are
# well answer within half a second on two busy cores.
SECONDS = {"init": 6, "gpu": 6, "pairs": 6}

# What a serving node declares: some faults only matter where vLLM is to be installed.
SETTINGS = node_settings({"vllm": {"version": "0.32.0", "lock": "l", "listen": "127.0.0.1"}})


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
        if not must_stop and self.stops:
            yield f"{self.profile} with {self.fault}: false alarm by {sorted(self.stops)}"
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
    return Case(profile, name, judge({profile: document}, {profile: SETTINGS}, TODAY))


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
