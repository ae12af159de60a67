"""Limits of flags with one number that the parser does not know, and the start enforces.  Pure.

The packaged schemas have the limits of the classes that JSON flags fill. These are those of the
other config classes: the `Field(...)` of vllm/config/cache.py, lora.py, observability.py and
scheduler.py, read in 0.31.0 and 0.32.0 and the same in both unless a row says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.flags.json_values import field_faults
from gpufleet.flags.schema import Field, Flag, Schema, sort_key

_READ = "0.31.0"


@dataclass(frozen=True, slots=True)
class Limit:
    """What a flag's number has to be, from a release on, up to and without another."""

    flag: str
    constraints: Mapping[str, float]
    """By pydantic's words: ge, gt, le, lt."""
    where: str
    """The class in vllm/config/ whose field has it."""
    since: str = _READ
    until: str | None = None

    def is_in_force(self, version: str) -> bool:
        """Whether a release has it."""
        at = sort_key(version)
        return sort_key(self.since) <= at and (self.until is None or at < sort_key(self.until))


LIMITS = (
    Limit("--block-size", {"gt": 0}, "CacheConfig"),
    Limit("--mamba-block-size", {"gt": 0}, "CacheConfig"),
    Limit("--prefix-cache-retention-interval", {"ge": 0}, "CacheConfig"),
    Limit("--prefix-match-unit", {"gt": 0}, "CacheConfig"),
    Limit("--replayssm-buffer-len", {"gt": 0}, "CacheConfig"),
    Limit("--max-lora-cls-labels", {"ge": 1}, "LoRAConfig"),
    Limit("--kv-cache-metrics-sample", {"gt": 0, "le": 1}, "ObservabilityConfig"),
    Limit("--long-prefill-token-threshold", {"ge": 0}, "SchedulerConfig"),
    Limit("--max-num-active-seqs", {"ge": 1}, "SchedulerConfig"),
    Limit("--max-num-queued-reqs", {"ge": 0}, "SchedulerConfig"),
    Limit("--max-num-queued-tokens", {"ge": 0}, "SchedulerConfig"),
    Limit("--max-num-scheduled-tokens", {"ge": 0}, "SchedulerConfig", until="0.32.0"),
    Limit("--max-num-scheduled-tokens", {"ge": 1}, "SchedulerConfig", since="0.32.0"),
    Limit("--prefill-schedule-interval", {"ge": 1}, "SchedulerConfig"),
    Limit("--watermark", {"ge": 0, "lt": 1}, "SchedulerConfig"),
)


def beyond_limits(schema: Schema, flag: Flag, value: Any) -> Iterator[str]:
    """Yield a sentence for each limit of a flag that its value breaks."""
    for limit in LIMITS:
        if limit.flag == flag.name and limit.is_in_force(schema.version):
            field = Field(flag.dest, "float", None, limit.constraints)
            yield from (fault.found for fault in field_faults(schema, field, value, flag.name))
