"""Run pytest, and what failed once more, alone; the last line says what that was.

    python -m tests.support.retry -n 2 -m 'not slow'
    python -m tests.support.retry -n 2 tests/unit --beside -v tests/lab/test_walkthrough.py

Arguments after `--beside` are for a second pytest that runs at the same time. Its output follows
that of the first one.

A test that fails and then passes alone is a defect: of the test, of what it tests, or of the
machine. It is named, and the run fails. With CI in the environment, as .ci/run sets it, such a run
passes, so that one of them does not throw a landing away; the line stays. What fails twice fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

CACHES = (".pytest_cache", ".pytest_cache/beside")
"""The folders in which each pytest notes what has failed."""
LAST_FAILED = "v/cache/lastfailed"
BESIDE = "--beside"
IN_ORDER = "tests/lab/"
"""Where each test of a file takes the nodes as the one before has left them."""
TESTS_FAILED = 1
"""pytest's exit status."""


def to_retry(failed: Iterable[str]) -> list[str]:
    """Return what has to run again for these tests, by their ids: whole files of tests on nodes."""
    return sorted(
        {test.partition("::")[0] if test.startswith(IN_ORDER) else test for test in failed}
    )


def marks(arguments: Sequence[str]) -> list[str]:
    """Return the `-m EXPRESSION` among pytest's arguments: a whole file may have other tests."""
    at = arguments.index("-m") if "-m" in arguments else len(arguments)
    return list(arguments[at : at + 2])


def split(arguments: Sequence[str]) -> list[list[str]]:
    """Return the arguments of each pytest: one, or two."""
    if BESIDE not in arguments:
        return [list(arguments)]
    at = arguments.index(BESIDE)
    return [list(arguments[:at]), list(arguments[at + 1 :])]


def follow(process: subprocess.Popen[bytes], output: IO[bytes]) -> int:
    """Print what a process writes into a file until it ends, and return its exit status."""
    while True:
        ended = process.poll() is not None
        sys.stdout.buffer.write(output.read())
        sys.stdout.flush()
        if ended:
            return process.returncode
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)


def run(commands: Sequence[Sequence[str]]) -> list[int]:
    """Run one pytest, or two at the same time, and return the exit statuses."""
    if len(commands) == 1:
        return [subprocess.run(commands[0], check=False).returncode]
    first, second = commands
    with (
        NamedTemporaryFile() as written,
        Path(written.name).open("rb") as output,
        subprocess.Popen(second, stdout=written, stderr=subprocess.STDOUT) as beside,
    ):
        status = subprocess.run(first, check=False).returncode
        return [status, follow(beside, output)]


def main(arguments: list[str]) -> int:
    """Return pytest's exit status; where a second run passed, 0 only with CI in the environment."""
    pytest, groups = [sys.executable, "-m", "pytest"], split(arguments)
    caches = [["-o", f"cache_dir={cache}"] for cache in CACHES]
    # Forget the failures of earlier runs: this one may not select their tests.
    statuses = run(
        [
            [*pytest, *cache, "--cache-clear", *group]
            for cache, group in zip(caches, groups, strict=False)
        ]
    )
    again = {}
    for number, (status, cache) in enumerate(zip(statuses, CACHES, strict=False)):
        noted = Path(cache, LAST_FAILED)
        if status == TESTS_FAILED and noted.is_file():
            again[number] = to_retry(json.loads(noted.read_text()))
            statuses[number] = 0
    names = [name for each in again.values() for name in each]
    if not names or any(statuses):
        print("retried: none", flush=True)
        return max(statuses)
    print(f"=== {len(names)} failed; once more, alone ===", flush=True)
    left = max(
        subprocess.run(
            [*pytest, *caches[number], "-v", *marks(groups[number]), *each], check=False
        ).returncode
        for number, each in again.items()
    )
    ended = "failed again" if left else "failed, then passed alone, which is a defect"
    print(f"retried, {ended}: {', '.join(names)}", flush=True)
    return left if left or "CI" in os.environ else TESTS_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
