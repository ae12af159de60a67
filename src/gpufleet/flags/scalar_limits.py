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


@dataclass(frozen=True, slots=True)
class Limit:
    """What a flag's number has to be, from a release on, up to and without another."""

    flag: str
    constraints: Mapping[str, float]
    """By pydantic's words: ge, gt, le, lt."""
    where: str
    """The class in vllm/config/ whose field has it."""
    since: str
    until: str | None = None

    def is_in_force(self, version: str) -> bool:
        """Whether a release has it."""
        at = sort_key(version)
        return sort_key(self.since) <= at and (self.until is None or at < sort_key(self.until))


LIMITS = (
    Limit("--block-size", {"gt": 0}, "CacheConfig", "0.26.0"),
    Limit("--mamba-block-size", {"gt": 0}, "CacheConfig", "0.11.1"),
    Limit("--prefix-cache-retention-interval", {"ge": 0}, "CacheConfig", "0.31.0"),
    Limit("--prefix-match-unit", {"gt": 0}, "CacheConfig", "0.26.0"),
    Limit("--replayssm-buffer-len", {"gt": 0}, "CacheConfig", "0.31.0"),
    Limit("--max-lora-cls-labels", {"ge": 1}, "LoRAConfig", "0.31.0"),
    Limit("--kv-cache-metrics-sample", {"gt": 0, "le": 1}, "ObservabilityConfig", "0.14.0"),
    Limit("--long-prefill-token-threshold", {"ge": 0}, "SchedulerConfig", "0.26.0"),
    Limit("--max-long-partial-prefills", {"ge": 1}, "SchedulerConfig", "0.11.1", "0.27.0"),
    Limit("--max-num-partial-prefills", {"ge": 1}, "SchedulerConfig", "0.11.1", "0.27.0"),
    Limit("--max-num-active-seqs", {"ge": 1}, "SchedulerConfig", "0.31.0"),
    Limit("--max-num-queued-reqs", {"ge": 0}, "SchedulerConfig", "0.31.0"),
    Limit("--max-num-queued-tokens", {"ge": 0}, "SchedulerConfig", "0.31.0"),
    Limit("--max-num-scheduled-tokens", {"ge": 0}, "SchedulerConfig", "0.26.0", "0.32.0"),
    Limit("--max-num-scheduled-tokens", {"ge": 1}, "SchedulerConfig", "0.32.0"),
    Limit("--prefill-schedule-interval", {"ge": 1}, "SchedulerConfig", "0.26.0"),
    Limit("--watermark", {"ge": 0, "lt": 1}, "SchedulerConfig", "0.26.0"),
)


def beyond_limits(schema: Schema, flag: Flag, value: Any) -> Iterator[str]:
    """Yield a sentence for each limit of a flag that its value breaks."""
    for limit in LIMITS:
        if limit.flag == flag.name and limit.is_in_force(schema.version):
            field = Field(flag.dest, "float", None, limit.constraints)
            yield from (fault.found for fault in field_faults(schema, field, value, flag.name))
