"""Read a release's schema from its source on this machine. Nodes run the same program.

Contract: nothing of the release is installed or imported, and torch is not needed. The release's
code runs in a separate process (`on_node/flags/schema.py`), which ends at the deadline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.flags.schema import TITLES
from gpufleet.remote import payload

INSTALLED = "installed"
"""The `source` value for the installed vLLM."""

SECONDS = 120.0
"""
Deadline in seconds. Reading a release takes about 2 s on an idle core. Unpacking a source
distribution takes 2 s more.
"""

_GRACE = 10.0  # seconds in which the program can report its own deadline before gpufleet ends it


def program(
    source: str = INSTALLED,
    *,
    engine: str = "vllm",
    seconds: float = SECONDS,
    helps: bool = False,
    metrics: bool = False,
    models: bool = False,
) -> payload.Payload:
    """
    Return a program for a node that prints the document of a release of `engine` at `source`.

    Run the program with the release's Python (3.10 or newer), not with the node's. If there is no
    readable release, the program prints {"refused": SENTENCE} and exits with 1.
    """
    return payload.program(
        "flags/schema",
        source=source,
        engine=engine,
        seconds=seconds,
        helps=helps,
        metrics=metrics,
        models=models,
    )


def flag_document(
    source: str,
    *,
    engine: str = "vllm",
    python: str = sys.executable,
    seconds: float = SECONDS,
    helps: bool = False,
    metrics: bool = False,
    models: bool = False,
) -> dict[str, Any]:
    """
    Return the document of the release of `engine` at `source`, for `schema.from_document`.

    `source` is a source tree, a source distribution (.tar.gz), a wheel, or "installed" for the
    release that `python` imports. Raises `FleetError` with the reason if there is no readable
    release.
    """
    place = source if source == INSTALLED else str(Path(source).absolute())
    text = program(
        place, engine=engine, seconds=seconds, helps=helps, metrics=metrics, models=models
    )
    environment = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONHASHSEED": "0"}
    try:
        done = subprocess.run(
            [python, "-s", "-"],
            input=text.encode(),
            capture_output=True,
            timeout=seconds + _GRACE,
            cwd="/",
            env=environment,
            check=False,
        )
    except FileNotFoundError as error:
        raise FleetError(
            f"{python} does not exist: give the path of the Python of an environment in which "
            "the release is installed"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise FleetError(f"gpufleet could not read {source} within {seconds:g} s") from error
    output, errors = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    return answer(output, errors, engine)


def answer(output: str, errors: str = "", engine: str = "vllm") -> dict[str, Any]:
    """
    Return the document from the program's output.

    Raises `FleetError` if there is no document. The message has the program's own reason or, if the
    program failed, the last line of `errors`.
    """
    try:
        found = json.loads(output)
        refused = found.get("refused")
    except (ValueError, AttributeError) as error:
        last = (errors.strip().splitlines() or ["the program printed no error message"])[-1]
        raise FleetError(
            f"gpufleet could not read the flags of {TITLES[engine]}: {last}"
        ) from error
    if refused is not None:
        raise FleetError(str(refused))
    return dict(found)
