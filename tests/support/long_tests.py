"""Run one part of the long tests, and write its result into the register.

    python -m tests.support.long_tests          # the parts, each with its last result
    python -m tests.support.long_tests alerts

The register is docs/measured/long-tests.md. A part takes at most an hour on two cores. A run that
is killed leaves the register as it was.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree as ET

from tests.support.checkout import ROOT
from tests.support.measured import RUN, WRITE, cells_of, of_this_run, with_rows

REGISTER = ROOT / "docs/measured/long-tests.md"
TESTS = ROOT / "tests"
MARK = "pytest.mark.long"
SECONDS = 3600
"""The longest that a part may take."""

# Which part a long test belongs to: the first prefix of its id. A new long test needs one.
PARTS = {
    "tests/unit/checks/": "check-matrix",
    "tests/unit/report/": "pages",
    "tests/unit/": "programs",
    "tests/lab/test_batch.py": "batch",
    "tests/lab/test_commands.py": "measure",
    "tests/lab/test_measuring.py::test_tune": "measure-tune",
    "tests/lab/test_measuring.py::test_a_tune": "measure-tune",
    "tests/lab/test_measuring.py::test_a_setting": "measure-tune",
    "tests/lab/test_measuring.py": "measure",
    "tests/lab/test_doctor_hardware.py": "doctor-hardware",
    "tests/lab/test_doctor.py": "doctor",
    "tests/lab/test_lab_commands.py": "main-job",
    "tests/lab/test_main_job.py": "main-job",
    "tests/lab/test_flag_schemas.py": "main-job",
    "tests/lab/test_server_routes.py": "main-job",
    "tests/lab/test_interruptions.py": "interrupted-deploys",
    "tests/lab/test_node_upgrades.py": "driver-upgrades",
    "tests/lab/test_driver_in_force.py": "drivers",
    "tests/lab/test_lab_driver.py": "drivers",
    "tests/lab/test_group_faults.py::test_whatever_breaks_all_ranks_end_in_time_and_serve_again"
    "[PP2 mp": "group-faults-mp",
    "tests/lab/test_group_faults.py": "group-faults-ray",
    "tests/lab/test_replicas_over_nodes.py": "replicas-over-nodes",
    "tests/lab/test_networks.py": "replicas-over-nodes",
    "tests/lab/test_reachability.py": "replicas-over-nodes",
    "tests/lab/test_firewall": "firewall",
    "tests/lab/test_alerts.py": "alerts",
    "tests/lab/test_monitoring.py": "alerts",
    "tests/lab/test_watchdog.py": "watchdog",
    "tests/lab/test_gateways.py": "gateways",
    "tests/lab/test_adapters.py": "adapters",
    "tests/lab/test_air_gap.py": "air-gap",
    "tests/lab/test_argument_proof.py": "air-gap",
    "tests/lab/test_drift.py": "drift",
    "tests/lab/test_model_kinds.py": "model-kinds",
    "tests/lab/test_shared_gpus.py": "shared-gpus",
    "tests/lab/test_first_hour.py": "first-hour",
    "tests/lab/test_engines.py::test_a_model_moves": "engines-upgrades",
    "tests/lab/test_engines.py::test_a_replica_spans": "engines-over-nodes",
    "tests/lab/test_engines.py": "engines",
    "tests/lab/test_environment_faults.py": "environment-faults",
    "tests/lab/test_faults_of_sources.py": "environment-faults",
    "tests/lab/test_upgrade.py::test_five_upgrades": "upgrades-releases",
    "tests/lab/test_upgrade.py::test_a_driver": "upgrades-driver",
    "tests/lab/test_upgrade.py": "upgrades-settings",
    "tests/lab/test_upgrade_faults.py::test_a_controller_killed": "upgrade-faults-killed",
    "tests/lab/test_upgrade_faults.py::test_a_bad_release": "upgrade-faults-releases",
    "tests/lab/test_upgrade_faults.py::test_a_flag": "upgrade-faults-releases",
    "tests/lab/test_upgrade_faults.py::test_a_release_that_dies": "upgrade-faults-releases",
    "tests/lab/test_upgrade_faults.py": "upgrade-faults-machines",
}


def part_of(test: str) -> str | None:
    """Return the part that a test belongs to, by its id; None: no part has it."""
    return next((part for prefix, part in PARTS.items() if test.startswith(prefix)), None)


def long_tests() -> list[str]:
    """Return the id of every test that is marked `long`, from the files that have the mark."""
    files = [str(file) for file in TESTS.rglob("test_*.py") if MARK in file.read_text()]
    pytest = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "long", *sorted(files)]
    done = subprocess.run(pytest, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    return [line for line in done.stdout.splitlines() if line.startswith("tests/")]


def listing(register: str) -> str:
    """Return a line for each part: its name, its last result, its minutes, and the run."""
    rows = [cells_of(line) for line in register.splitlines() if line.endswith(" |")]
    known = {row[0]: row[1:] for row in rows if row[-1] != RUN}
    return "\n".join(
        f"{part:24} {'; '.join(known.get(part, ['never run']))}"
        for part in dict.fromkeys(PARTS.values())
    )


def verdict(report: Path, tests: Sequence[str]) -> str:
    """
    Return what a junit report says of these tests: how many passed, and which did not.

    A test that the report lacks was not run: a time limit ends a part without a failure.
    """
    if not report.is_file():
        return "failed: pytest wrote no report"
    cases = list(ET.parse(report).iter("testcase"))
    names = [case.get("name", "") for case in cases]
    left = [
        name
        for name, case in zip(names, cases, strict=True)
        if any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
    ]
    not_run = list((Counter(map(_name_of, tests)) - Counter(names)).elements())
    said = f"{len(cases) - len(left)} of {len(cases) + len(not_run)} passed"
    if cases and not left and not not_run:
        return f"passed: {said}"
    failed = f"; not: {', '.join(left)}" if left else ""
    return f"failed: {said}{failed}" + (f"; not run: {', '.join(not_run)}" if not_run else "")


def _name_of(test: str) -> str:
    """Return the name that a junit report has for a test's id."""
    path, bracket, values = test.partition("[")
    return path.rpartition("::")[2] + bracket + values


def run(part: str) -> int:
    """Run a part, write its row, and return pytest's exit status."""
    tests = [test for test in long_tests() if part_of(test) == part]
    begin = time.monotonic()
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        pytest = [sys.executable, "-m", "pytest", "-v", f"--session-timeout={SECONDS}"]
        status = subprocess.run(
            [*pytest, f"--junit-xml={report}", *tests],
            cwd=ROOT,
            check=False,
            env={**os.environ, WRITE: "1"},
        ).returncode
        result = verdict(report, tests)
    minutes = f"{(time.monotonic() - begin) / 60:.0f} min"
    row = [part, result, minutes, of_this_run()]
    REGISTER.write_text(with_rows(REGISTER.read_text(), [row], key=1))
    print(": ".join(row[:3]), flush=True)
    return status


def main(arguments: list[str]) -> int:
    """List the parts, or run the one that is named."""
    if not arguments:
        print(listing(REGISTER.read_text()))
        return 0
    if len(arguments) > 1 or arguments[0] not in PARTS.values():
        print(f"{' '.join(arguments)}: not a part. The parts:\n{listing(REGISTER.read_text())}")
        return 2
    return run(arguments[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
