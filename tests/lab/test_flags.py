"""Our verdict on command lines, and that of the release which serves on a real node."""

from __future__ import annotations

import json

from gpufleet.flags import schema
from gpufleet.flags.check import check
from gpufleet.flags.problem import JudgedBy
from tests.lab.conftest import Fleet
from tests.unit.flags import lines, record_verdicts

NODE = "gpu-01"
LINES = 60


def test_the_release_on_the_node_agrees(deployed: Fleet) -> None:
    """What the installed release's own parser takes is what `flags check` says that it takes."""
    python = deployed.ssh(NODE, "ls /opt/vllm/releases/*/bin/python | head -n 1").strip()
    program = (record_verdicts.HERE / "real_parser.py").read_text()
    found = asked(deployed, python, program, [])
    known = schema.load(found.vllm)
    every = [*lines.written(), *lines.generated(known)]
    sample = [tuple(line) for line in every[:: len(every) // LINES]]

    found = asked(deployed, python, program, sample)

    ours = {
        line: all(problem.by is not JudgedBy.PARSER for problem in check(known, line))
        for line in sample
    }
    assert ours == dict(found.verdicts)
    assert set(ours.values()) == {True, False}


def asked(
    deployed: Fleet, python: str, program: str, sample: list[tuple[str, ...]]
) -> record_verdicts.Recorded:
    """Ask the parser on the node; nothing is written there."""
    first = "import json, sys; exec(json.loads(sys.stdin.readline()))"
    answer = deployed.ssh(
        NODE,
        f"cd / && VLLM_LOGGING_LEVEL=CRITICAL HF_HUB_OFFLINE=1 {python} -c '{first}'",
        seconds=900,
        stdin="".join(json.dumps(each) + "\n" for each in (program, *sample)),
    )
    return record_verdicts.answers(sample, answer, "")
