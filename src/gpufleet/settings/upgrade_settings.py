"""Settings of upgrades of a fleet under load.

Pure, like `settings/node_settings.py`, which contains these. Durations are in seconds.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from gpufleet.settings.base import Seconds, Setting, pattern_rule


def _size(value: Any) -> Any:
    """Validate the size of a wave: a number of groups, or a share such as "25%"."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str) and re.fullmatch(r"[1-9]\d?%|100%", value):
        return value
    raise ValueError(f'must be a number from 1 up, or a share as "25%" (got {value!r})')


WaveSize: TypeAlias = Annotated[int | str, BeforeValidator(_size)]


class Gates(Setting):
    """Conditions before a replica gets requests again, and before the next wave."""

    soak_seconds: Annotated[
        Seconds, Field(ge=0, le=86400, description="Time under load before a wave is judged")
    ] = 60
    baseline_seconds: Annotated[
        Seconds, Field(ge=5, le=3600, description="Observation time before any change")
    ] = 30
    latency_ratio: Annotated[
        float,
        Field(ge=1, le=100, description="Maximum ratio of TTFT and ITL p99 to those before"),
    ] = 1.5
    latency_least_requests: Annotated[
        PositiveInt, Field(description="Minimum requests on each side to judge latency")
    ] = 50
    error_ratio: Annotated[
        float, Field(ge=0, le=1, description="Maximum increase of server errors")
    ] = 0.0
    findings: Annotated[
        bool, Field(description="Stop on new blocking findings of `gpufleet check`")
    ] = True
    alerts: Annotated[
        bool,
        Field(
            description="Stop on new alerts about the wave's nodes, if there is a monitoring node"
        ),
    ] = True


class Upgrade(Setting):
    """How upgrades change a serving fleet."""

    canary: Annotated[int, Field(ge=0, description="Groups in the first wave")] = 1
    waves: Annotated[
        tuple[WaveSize, ...],
        Field(
            min_length=1,
            description="Sizes of the following waves, in groups or percent of all; the last "
            "one repeats",
        ),
    ] = (1,)
    failures: Annotated[
        int,
        Field(ge=0, description="Groups that may fail and be rolled back before the upgrade stops"),
    ] = 0
    confirm: Annotated[
        Literal["start", "canary", "wave"],
        Field(
            description="Ask before the first wave; canary: also after the canary; wave: before "
            "every wave"
        ),
    ] = "start"
    headroom: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Maximum load of the remaining replicas",
        ),
    ] = 0.85
    keep: Annotated[PositiveInt, Field(description="Minimum serving replicas of a model")] = 1
    gates: Gates = Gates()


class Golden(Setting):
    """
    Prompts whose answers must be the same after a change.

    A model of another kind gets the prompts as its input: a reranker gets them as documents.
    """

    free_text: ClassVar = frozenset({"prompts"})

    prompts: Annotated[
        tuple[str, ...],
        AfterValidator(lambda given: tuple(dict.fromkeys(given))),
        Field(description="Prompt; completed with temperature 0"),
    ] = (
        "The capital of France is",
        "1, 2, 3, 4, 5,",
        "def fibonacci(n):",
    )
    query: Annotated[
        str,
        pattern_rule(r".*\S.*", "a question, by which a reranker orders the prompts"),
        Field(description="Question by which a reranker orders the prompts"),
    ] = "What is the capital of France?"
    max_tokens: Annotated[
        int, Field(ge=1, le=512, description="Tokens of each answer to compare")
    ] = 16
    same: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Share of leading tokens that must match; 1: all; 0: any answer passes",
        ),
    ] = 1.0
    cosine: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Minimum cosine of the angle "
            "between an embedder's vectors before and after; 0: any",
        ),
    ] = 0.999
