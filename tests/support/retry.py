"""Run pytest, and what failed once more, alone; the last line says what that was.

    python -m tests.support.retry -n 2 -m 'not slow'

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
from pathlib import Path

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
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


def main(arguments: list[str]) -> int:
    """Return pytest's exit status; where a second run passed, 0 only with CI in the environment."""
    pytest = [sys.executable, "-m", "pytest"]
    # Forget the failures of earlier runs: this one may not select their tests.
    status = subprocess.run([*pytest, "--cache-clear", *arguments], check=False).returncode
    if status != TESTS_FAILED or not LAST_FAILED.is_file():
        print("retried: none", flush=True)
        return status
    again = to_retry(json.loads(LAST_FAILED.read_text()))
    print(f"=== {len(again)} failed; once more, alone ===", flush=True)
    status = subprocess.run([*pytest, "-v", *marks(arguments), *again], check=False).returncode
    ended = "failed again" if status else "failed, then passed alone, which is a defect"
    print(f"retried, {ended}: {', '.join(again)}", flush=True)
    return status if status or "CI" in os.environ else TESTS_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
