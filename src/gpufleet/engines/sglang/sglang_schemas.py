"""Load the flags of SGLang's releases, which were extracted from SGLang's own code. Pure.

The same rules apply as for vLLM (`flags/schema.py`). Names must match exactly. A release that is
not packaged is refused, and never replaced by the nearest release.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from gpufleet.errors import FleetError
from gpufleet.flags.schema import Schema, from_document, read_packed, release_name, sort_key

ENGINE = "sglang"
DATA = Path(__file__).with_name("data") / "sglang-schemas.json.xz"


def versions() -> tuple[str, ...]:
    """Return the releases of SGLang whose schemas are in gpufleet's package, the oldest first."""
    return tuple(read_packed(DATA))


@cache
def load(version: str) -> Schema:
    """
    Return the packaged schema of one release.

    A build suffix ("+cpu") is ignored. If the release is not in the package, the function raises a
    `FleetError` that lists the nearest releases.
    """
    release = release_name(version)
    text = read_packed(DATA).get(release)
    if text is not None:
        return from_document({**json.loads(text), ENGINE: release}, ENGINE)
    known = versions()
    older = [one for one in known if sort_key(one) < sort_key(release)][-1:]
    newer = [one for one in known if sort_key(one) > sort_key(release)][:1]
    raise FleetError(
        f"SGLang {version}: unknown release, and gpufleet does not guess from its neighbours "
        f"({' and '.join(older + newer)}): give one of {', '.join(known)}"
    )


def releases_with(option: str) -> tuple[str, ...]:
    """Return the packaged releases that have an option, the oldest first."""
    return tuple(one for one in versions() if option in load(one).by_option)
