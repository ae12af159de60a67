"""Settings of upgrades of a fleet under load.

Pure. `settings/node_settings.py` contains these settings. Durations are in seconds.
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
    raise ValueError(
        f'must be a number of 1 or more, or a percentage, for example "25%" (got {value!r})'
    )


WaveSize: TypeAlias = Annotated[int | str, BeforeValidator(_size)]


class Gates(Setting):
    """
    Conditions that must be met before a replica gets requests again, and before the next wave
    starts.
    """

    soak_seconds: Annotated[
        Seconds,
        Field(
            ge=0,
            le=86400,
            description="Time for which a changed wave serves requests before gpufleet judges it",
        ),
    ] = 60
    baseline_seconds: Annotated[
        Seconds,
        Field(
            ge=5,
            le=3600,
            description="Time for which gpufleet measures the fleet before it changes anything",
        ),
    ] = 30
    latency_ratio: Annotated[
        float,
        Field(
            ge=1,
            le=100,
            description="Maximum ratio of the latency after a change to the latency before. It "
            "applies to the p99 of the time to first token and of the inter-token latency",
        ),
    ] = 1.5
    latency_least_requests: Annotated[
        PositiveInt,
        Field(
            description="Minimum number of requests, both before and after the change, that "
            "gpufleet needs to judge latency"
        ),
    ] = 50
    error_ratio: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Maximum increase of the share of requests that end in a server error",
        ),
    ] = 0.0
    findings: Annotated[
        bool,
        Field(
            description="Whether the upgrade stops if `gpufleet check` has new findings that "
            "block a deploy"
        ),
    ] = True
    alerts: Annotated[
        bool,
        Field(
            description="Whether the upgrade stops on new alerts about the nodes of the "
            "wave. This needs a monitoring node"
        ),
    ] = True


class Upgrade(Setting):
    """How upgrades change a fleet while it serves."""

    canary: Annotated[int, Field(ge=0, description="Number of groups in the first wave")] = 1
    waves: Annotated[
        tuple[WaveSize, ...],
        Field(
            min_length=1,
            description="Sizes of the waves after the first wave, each as a number of "
            "groups or as a percentage of all groups. The last size applies to all further "
            "waves",
        ),
    ] = (1,)
    failures: Annotated[
        int,
        Field(
            ge=0,
            description="Number of groups that may fail before the upgrade stops. Each group "
            "that fails is rolled back",
        ),
    ] = 0
    confirm: Annotated[
        Literal["start", "canary", "wave"],
        Field(
            description="When the upgrade asks you. start: before the first wave. canary: "
            "also after the first wave (the canary). wave: before every wave"
        ),
    ] = "start"
    headroom: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Maximum load of the replicas that keep serving while others change",
        ),
    ] = 0.85
    keep: Annotated[
        PositiveInt, Field(description="Minimum number of replicas of a model that keep serving")
    ] = 1
    gates: Gates = Gates()


class Golden(Setting):
    """
    Prompts whose answers must be the same after a change.

    A model that does not generate text gets the prompts as its input. For example, a reranker gets
    the prompts as documents.
    """

    free_text: ClassVar = frozenset({"prompts"})

    prompts: Annotated[
        tuple[str, ...],
        AfterValidator(lambda given: tuple(dict.fromkeys(given))),
        Field(description="Prompts, which the model completes with temperature 0"),
    ] = (
        "The capital of France is",
        "1, 2, 3, 4, 5,",
        "def fibonacci(n):",
    )
    query: Annotated[
        str,
        pattern_rule(
            r".*\S.*",
            "a question with at least one visible character; a reranker orders the prompts by "
            "this question",
        ),
        Field(description="Question by which a reranker orders the prompts"),
    ] = "What is the capital of France?"
    max_tokens: Annotated[
        int, Field(ge=1, le=512, description="Number of tokens of each answer that are compared")
    ] = 16
    same: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Share of the answer, from its first token on, that must be the "
            "same. 1: all tokens. 0: any answer passes",
        ),
    ] = 1.0
    cosine: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Minimum cosine similarity of an embedding model's vectors before "
            "and after the change. 0: any vector passes",
        ),
    ] = 0.999
