"""Choose the first model of a new fleet: small enough for its GPUs, pinned to a commit.

The choice depends only on the memory of the GPUs. Later, the plan uses the model's own config.
tests/unit/setup/test_first_model.py computes the memory that each row needs, and compares the rows
with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpufleet.errors import FleetError

CONTEXT = 8192
"""The rows are sized for requests with at most this number of tokens."""
HUB_SECONDS = 10

_GIVEN = re.compile(r"(?P<model>/\S+|[\w.-]+/[\w.-]+)(?:@(?P<revision>[0-9a-f]{40}))?")


@dataclass(frozen=True)
class FirstModel:
    """
    A model, and the commit of its files.

    If `revision` is None, the Hub is queried for the commit. `memory_gib` is the memory of the
    smallest GPU on which the model fits.
    """

    model: str
    revision: str | None = None
    memory_gib: float = 0

    @property
    def name(self) -> str:
        """Return the model's name for clients. It is also a part of the names of units."""
        return re.sub(r"[^a-z0-9.]+", "-", self.model.rpartition("/")[2].lower()).strip("-.")

    @property
    def local(self) -> bool:
        """Return whether the model is a directory on the nodes."""
        return self.model.startswith("/")


ROWS = (
    FirstModel("Qwen/Qwen3-8B", "b968826d9c46dd6066d109eabc6255188de91218", 22.0),
    FirstModel("Qwen/Qwen3-1.7B", None, 8.0),
)


def choose(memories_gib: Sequence[float | None]) -> FirstModel | None:
    """
    Return the largest model that fits on each of these GPUs, by their memory in GiB.

    The result is None if no model fits, if a GPU's memory is unknown, or without GPUs.

    >>> choose([139.8, 79.19]).model
    'Qwen/Qwen3-8B'
    >>> choose([139.8, None]), choose([])
    (None, None)
    """
    known = [each for each in memories_gib if each is not None]
    if not known or len(known) < len(memories_gib):
        return None
    return next((row for row in ROWS if row.memory_gib <= min(known)), None)


def parse_model(text: str) -> FirstModel:
    """Parse the value of `--model`: `ORG/NAME`, `ORG/NAME@COMMIT`, or a path on the nodes."""
    match = _GIVEN.fullmatch(text)
    if match is None:
        raise FleetError(
            f"--model {text}: write ORG/NAME, or ORG/NAME@COMMIT with all 40 digits of the "
            "commit, or the absolute path of a directory on the nodes"
        )
    return FirstModel(match["model"], match["revision"])


def hub_revision(model: str, ask: Callable[[str], str | None] | None = None) -> str | None:
    """Return a model's current commit on the Hub, or None if the Hub does not report a commit."""
    return (ask or _ask_hub)(model)


def _ask_hub(model: str) -> str | None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return HfApi().model_info(model, timeout=HUB_SECONDS).sha
    except (OSError, HfHubHTTPError, ValueError):
        return None
