"""What operators write about how a fleet is changed under load.

Pure, as `settings/node_settings.py`, of which these are parts. Durations are in seconds.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from gpufleet.settings.base import Seconds, Setting


def _size(value: Any) -> Any:
    """Take 2 for two, "25%" for a quarter of all."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str) and re.fullmatch(r"[1-9]\d?%|100%", value):
        return value
    raise ValueError(f'must be a number from 1 up, or a share as "25%" (got {value!r})')


WaveSize: TypeAlias = Annotated[int | str, BeforeValidator(_size)]


class Gates(Setting):
    """What must hold before a replica gets requests again, and before the next wave."""

    soak_seconds: Annotated[
        Seconds, Field(ge=0, le=86400, description="Under requests, until it is judged by them")
    ] = 60
    baseline_seconds: Annotated[
        Seconds, Field(ge=5, le=3600, description="Looked at before anything is changed")
    ] = 30
    latency_ratio: Annotated[
        float,
        Field(ge=1, le=100, description="TTFT and ITL p99 at most so many times those of before"),
    ] = 1.5
    latency_least_requests: Annotated[
        PositiveInt, Field(description="Of fewer, on either side, no latency is judged")
    ] = 50
    error_ratio: Annotated[
        float, Field(ge=0, le=1, description="More errors of the server than before, at most")
    ] = 0.0
    findings: Annotated[bool, Field(description="New blocking findings of the check stop")] = True
    alerts: Annotated[
        bool, Field(description="New alerts about the wave's nodes stop, where a node watches")
    ] = True


class Upgrade(Setting):
    """How the fleet is changed while it serves."""

    canary: Annotated[int, Field(ge=0, description="Groups in a wave before all others")] = 1
    waves: Annotated[
        tuple[WaveSize, ...],
        Field(
            min_length=1,
            description="Sizes of the waves that follow, in groups or percent of all; the last one "
            "is repeated",
        ),
    ] = (1,)
    failures: Annotated[
        int, Field(ge=0, description="Groups that may fail, and be rolled back, before it stops")
    ] = 0
    confirm: Annotated[
        Literal["start", "canary", "wave"],
        Field(description="Ask a person before the first wave; after the canary too; every wave"),
    ] = "start"
    headroom: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="How full the replicas that remain may become with the present load",
        ),
    ] = 0.85
    keep: Annotated[
        PositiveInt, Field(description="Replicas of a model that have to serve at any time")
    ] = 1
    gates: Gates = Gates()


class Golden(Setting):
    """Prompts whose answers must be after a change what they were before."""

    free_text: ClassVar = frozenset({"prompts"})

    prompts: Annotated[
        tuple[str, ...],
        AfterValidator(lambda given: tuple(dict.fromkeys(given))),
        Field(description="Completed with temperature 0"),
    ] = (
        "The capital of France is",
        "1, 2, 3, 4, 5,",
        "def fibonacci(n):",
    )
    max_tokens: Annotated[
        int, Field(ge=1, le=512, description="Length of each answer that is compared")
    ] = 16
    same: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Share of the tokens, from the first one on, that must be the same; 1: "
            "all; 0: an answer is enough",
        ),
    ] = 1.0
