"""Records what a real vLLM's parser says of the command lines of `lines.py`.

    python -m tests.unit.flags.record_verdicts PYTHON

PYTHON is that of an environment with vLLM in it, such as `make lab` builds. Writes
verdicts-VERSION.json.xz beside this file; the tests compare ours with it and need no vLLM.
"""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpufleet.flags import schema
from tests.support.checkout import ROOT
from tests.unit.flags import lines

HERE = ROOT / "tests/unit/flags"
_SECONDS = 900.0  # importing vLLM takes half a minute on an idle core, and a line a millisecond


@dataclass(frozen=True, slots=True)
class Recorded:
    """A release's own verdicts."""

    vllm: str
    python: str
    verdicts: tuple[tuple[tuple[str, ...], bool], ...]  # arguments, and whether they are taken


def ask(python: str, command_lines: Iterable[Sequence[str]]) -> Recorded:
    """Return what the parser of the vLLM beside `python` says of each command line."""
    asked = [tuple(line) for line in command_lines]
    quiet = {"VLLM_LOGGING_LEVEL": "CRITICAL", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, str(HERE / "real_parser.py")],
        input="".join(json.dumps(line) + "\n" for line in asked),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        cwd="/",
        env={"PATH": os.environ["PATH"], "HOME": "/tmp", **quiet},
        check=False,
    )
    return answers(asked, done.stdout, done.stderr)


def answers(asked: Sequence[tuple[str, ...]], output: str, errors: str) -> Recorded:
    """Return the verdicts that `real_parser.py` printed of the lines it was asked."""
    told: list[Any] = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if len(told) != len(asked) + 1:
        raise RuntimeError(f"{len(told)} answers to {len(asked)} lines: {errors[-2000:]}")
    verdicts = [(line, answer["accepted"]) for line, answer in zip(asked, told[1:], strict=True)]
    return Recorded(told[0]["vllm"].partition("+")[0], told[0]["python"], tuple(verdicts))


def load(version: str) -> Recorded:
    """Return the verdicts that were recorded of a release."""
    found = json.loads(lzma.decompress((HERE / f"verdicts-{version}.json.xz").read_bytes()))
    verdicts = tuple((tuple(line), accepted) for line, accepted in found["verdicts"])
    return Recorded(found["vllm"], found["python"], verdicts)


def main(arguments: Sequence[str]) -> int:
    """Record, and say how many."""
    if len(arguments) != 1:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    found = ask(arguments[0], [])
    asked = [*lines.written(), *lines.generated(schema.load(found.vllm))]
    asked += lines.combined(asked)
    found = ask(arguments[0], asked)
    text = json.dumps(
        {"vllm": found.vllm, "python": found.python, "verdicts": found.verdicts},
        separators=(",", ":"),
    )
    path = HERE / f"verdicts-{found.vllm}.json.xz"
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    accepted = sum(verdict[1] for verdict in found.verdicts)
    sys.stdout.write(f"{path.name}: {len(found.verdicts)} lines, {accepted} accepted\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
