"""Convert a measurement to llm-d's Benchmark Report v0.2.1, for other tools. Pure.

The format has one report for each level of load ("stage"), joined by the experiment's id. The
format has no keys for the verdict, the interval and the end of the search. These values are under
`gpufleet` in `results.observability`, which is the only part in which a tool may add keys. Format:
github.com/llm-d/llm-d-benchmark, benchmark-report/; package llmd-benchmark-report 0.2.1.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from gpufleet.errors import FleetError
from gpufleet.load_test.fingerprint import Subject
from gpufleet.load_test.level import LevelSummary
from gpufleet.load_test.result import Measurement
from gpufleet.load_test.workloads import Lengths, Workload, parse_lengths

VERSION = "0.2.1"
"""The version of the format. A reader of 0.2 also reads it."""

UNFINISHED = "unfinished"
"""The error name for requests without an answer that were already too old to meet the contract."""

_PART_VERSION = "0.0.1"
"""The version of the descriptions of components and of load."""

_DRAWN = {"input", "words", "seconds"}
"""If a workload has one of these keys, the client generates its requests."""

# Maps the format's names of parallelism to vLLM's options.
_PARALLELISM = {
    "tp": "--tensor-parallel-size",
    "pp": "--pipeline-parallel-size",
    "dp": "--data-parallel-size",
    "dp_local": "--data-parallel-size-local",
}
# Statistics of a level for which the format has names.
_STATISTICS = ("mean", "stddev", "min", "p50", "p90", "p95", "p99", "max")


def reports(found: Measurement) -> list[dict[str, Any]]:
    """
    Return one Benchmark Report for each level, in the order of measurement.

    The levels of an additional closed-loop search are a separate experiment.
    """
    both = [found]
    if found.closed is not None:
        both.append(found.as_closed())
    return [report_of(each, stage) for each in both for stage in range(len(each.levels))]


def report_of(found: Measurement, stage: int) -> dict[str, Any]:
    """Return the Benchmark Report of one level, as plain values for `json.dumps`."""
    level = found.levels[stage]
    experiment = _hash(found.as_json())
    return {
        "version": VERSION,
        "run": {
            "uid": _hash([experiment, stage]),
            "eid": experiment,
            "time": {"duration": f"PT{level.seconds:.3f}S"},
            "description": f"gpufleet measure {found.model}, {found.target}: {level.why}",
            "keywords": ["gpufleet measure", f"{found.loop} loop", level.verdict],
        },
        "scenario": {"stack": _stack(found), "load": _load(found, level, stage)},
        "results": {
            "request_performance": {
                "aggregate": {
                    "requests": _requests(level),
                    "latency": _latency(level),
                    "throughput": _throughput(level),
                }
            },
            "observability": {"gpufleet": _own(found, stage)},
        },
    }


def text(report: Mapping[str, Any]) -> str:
    """
    Return a report as the text of its file. Raises `ValueError` for numbers that are not finite.
    """
    return json.dumps(report, indent=1, allow_nan=False) + "\n"


# -- what was measured


def _stack(found: Measurement) -> list[dict[str, Any]]:
    stack = [_engine(found)]
    if not found.target.startswith("replica "):
        about = {
            "replicas": found.replicas,
            "replicas_of": found.replicas_of,
            "target": found.target,
        }
        stack.append(
            _component(
                found.target,
                {"kind": "generic", "tool": "gpufleet gateway", "tool_version": found.version},
                {"config": about},
            )
        )
    return stack


def _engine(found: Measurement) -> dict[str, Any]:
    of = found.subject
    sizes = {name: _size(of, option) for name, option in _PARALLELISM.items()}
    if sizes["dp_local"] is None:
        sizes["dp_local"] = sizes["dp"]
    experts = "--enable-expert-parallel" in of.arguments
    parallelism = {name: size for name, size in sizes.items() if size is not None}
    if experts:
        # vLLM spreads experts over all ranks of tensor and data parallelism.
        parallelism["ep"] = (sizes["tp"] or 1) * (sizes["dp"] or 1)
    native = {
        "args": _arguments(of),
        "config": {
            "driver": of.driver,
            "fingerprint": of.fingerprint.digest,
            "nodes": list(of.nodes),
            "revision": of.revision,
        },
    }
    standard = {
        "kind": "inference_engine",
        "tool": "vllm",
        "tool_version": of.release,
        "role": "replica",
        "replicas": found.replicas,
        "model": {"name": of.weights},
        "accelerator": {
            "model": ", ".join(sorted(of.gpus)) or "none",
            "count": sum(of.gpus.values()),
            "parallelism": parallelism,
        },
    }
    return _component(found.model, standard, native)


def _component(
    label: str, standard: Mapping[str, Any], native: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "metadata": {
            "schema_version": _PART_VERSION,
            "label": label,
            "cfg_id": _hash([standard, native]),
        },
        "standardized": dict(standard),
        "native": dict(native),
    }


def _arguments(of: Subject) -> dict[str, str | None]:
    """Return the options with their values. An option without a value has None."""
    found: dict[str, str | None] = {}
    for line in of.arguments:
        if line.startswith("-"):
            name = re.split(r"[ =]", line, maxsplit=1)[0]
            found[name] = line[len(name) + 1 :] or None
    return found


def _size(of: Subject, option: str) -> int | None:
    value = _arguments(of).get(option)
    return int(value) if value is not None and value.isdecimal() else None


# -- the load


def _load(found: Measurement, level: LevelSummary, stage: int) -> dict[str, Any]:
    sent: dict[str, Any] = {}
    if level.rate:
        sent["rate_qps"] = level.rate
    if level.concurrency:
        sent["concurrency"] = level.concurrency
    return {
        "metadata": {"schema_version": _PART_VERSION, "cfg_id": _hash(found.workload)},
        "standardized": {
            "tool": "gpufleet",
            "tool_version": found.version,
            "parallelism": max(1, found.client.processes),
            # Only the client's generated requests have random lengths.
            "source": "random" if _DRAWN & found.workload.keys() else "sampled",
            "stage": stage,
            "input_seq_len": _length(found, level, "input"),
            "output_seq_len": _length(found, level, "output"),
            **_turns(found.workload),
            **sent,
        },
        "native": {
            "config": {
                "workload": dict(found.workload),
                "loop": found.loop,
                "client": found.as_json()["client"],
                "contract": found.as_json()["contract"],
            }
        },
    }


def _turns(workload: Mapping[str, Any]) -> dict[str, Any]:
    turns = _whole(workload.get("turns"), 1)
    if turns == 1:
        return {}
    return {"multi_turn": {"enabled": True, "max_turns": {"distribution": "fixed", "value": turns}}}


def _length(found: Measurement, level: LevelSummary, side: Literal["input", "output"]) -> Any:
    """
    Return a sequence length in the format's form.

    It is the distribution, or the mean if the format does not support the distribution. A prompt
    with a shared prefix or earlier turns is longer than its drawn length.
    """
    of = found.workload
    drawn, answers = _lengths(of.get("input")), _lengths(of.get("output"))
    if drawn is None or answers is None:
        tokens = (
            level.output_tokens_per_second if side == "output" else level.prompt_tokens_per_second
        )
        rate = level.answered_per_second
        return {"distribution": "other", "value": tokens / rate if rate else 0.0}
    if side == "output":
        return _described(answers)
    prefix, turns = _whole(of.get("prefix_tokens"), 0), _whole(of.get("turns"), 1)
    if not prefix and turns == 1:
        return _described(drawn)
    whole = Workload("", drawn, answers, "", prefix_tokens=prefix, turns=turns)
    return {"distribution": "other", "value": whole.mean_prompt_tokens}


def _described(lengths: Lengths) -> dict[str, Any]:
    named = "other" if lengths.kind == "lognormal" else lengths.kind
    ends = {} if lengths.kind == "fixed" else {"min": lengths.low, "max": lengths.most}
    return {"distribution": named, "value": lengths.mean, **ends}


def _lengths(written: object) -> Lengths | None:
    """Parse lengths in the operator's notation. Return None for anything else."""
    try:
        return parse_lengths(written) if isinstance(written, str) else None
    except FleetError:
        return None


def _whole(value: object, least: int) -> int:
    return value if isinstance(value, int) and value > least else least


# -- results


def _requests(level: LevelSummary) -> dict[str, Any]:
    unfinished = level.errors.get(UNFINISHED, 0)
    failed = sum(level.errors.values()) - unfinished
    return {"total": level.requests, "failures": failed, "incomplete": unfinished}


def _latency(level: LevelSummary) -> dict[str, Any]:
    """
    Return the latencies whose mean is known, because the format requires a mean.

    Latencies without a mean are in `results.observability.gpufleet` only.
    """
    found = {}
    for name, units, values in (
        ("time_to_first_token", "s", level.ttft),
        ("inter_token_latency", "s/token", level.itl),
        ("request_latency", "s", level.e2e),
    ):
        if "mean" in values:
            known = {key: values[key] for key in _STATISTICS if key in values}
            found[name] = {"units": units, **known}
    return found


def _throughput(level: LevelSummary) -> dict[str, Any]:
    both = level.prompt_tokens_per_second + level.output_tokens_per_second
    return {
        "input_token_rate": {"units": "tokens/s", "mean": level.prompt_tokens_per_second},
        "output_token_rate": {"units": "tokens/s", "mean": level.output_tokens_per_second},
        "total_token_rate": {"units": "tokens/s", "mean": both},
        "request_rate": {"units": "queries/s", "mean": level.answered_per_second},
    }


def _own(found: Measurement, stage: int) -> dict[str, Any]:
    plain = found.as_json()
    return {
        "level": plain["levels"][stage],
        "found": plain["found"],
        "notes": plain["notes"],
    }


def _hash(value: object) -> str:
    """Return 32 hexadecimal digits, as in the format's other writers."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
