"""Parse results of `vllm bench serve`, guidellm and aiperf into one type.

Each format is read by its own keys. For each value that a format lacks, or counts differently from
`gpufleet measure`, the result has a reservation. A reservation is a sentence that is shown next to
the numbers. The file of another tool is untrusted, so a missing value, or a value of a wrong type,
is treated as unknown. The keys are taken from these sources: vllm/benchmarks/serve.py of vLLM 0.18
to 0.33, guidellm 0.8.1 (report schemas 1 and 2), aiperf 0.13.0 (export schemas up to 1.4).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpufleet.errors import FleetError, file_fault
from gpufleet.formatting import count_of
from gpufleet.load_test.foreign_values import (
    PERCENTILES,
    ForeignResult,
    missing_latencies,
    read_count,
    read_number,
    read_object,
    read_text,
    read_times,
)
from gpufleet.sanitize import printable

_FROM_SEND = "when the client sends a request, not when the request was due"
_EVEN = "its requests arrive at equal intervals, so fewer requests queue than with Poisson arrivals"


def read_foreign(file: Path) -> tuple[ForeignResult, ...]:
    """
    Return the levels in the result file of another tool. Raises a `FleetError` that names the file.
    """
    try:
        documents = _documents(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise FleetError(
            f"{file}: the file cannot be read: it has too many nested levels"
        ) from None
    except (OSError, ValueError) as error:
        raise FleetError(f"{file}: the file cannot be read: {file_fault(error)}") from None
    found = tuple(each for document in documents for each in _levels(document))
    if not found:
        raise FleetError(
            f"{file}: the file is not a result of `vllm bench serve`, guidellm or aiperf, "
            "because it has different keys or no level of load"
        )
    return found


def _documents(text: str) -> list[Any]:
    """
    Return the JSON values of a file. `vllm bench serve --append-result` writes one value per line.
    """
    try:
        return [json.loads(text)]
    except json.JSONDecodeError as error:
        lines = [line for line in text.splitlines() if line.strip()]
        if not error.msg.startswith("Extra data"):
            raise
        return [json.loads(line) for line in lines]


def _levels(document: Any) -> Iterator[ForeignResult]:
    if not isinstance(document, dict):
        return
    if isinstance(document.get("benchmarks"), list):
        for each in document["benchmarks"]:
            if isinstance(each, dict):
                yield _guidellm(document, each)
    elif "aiperf_version" in document or "input_config" in document:
        yield _aiperf(document)
    elif "num_prompts" in document and "request_throughput" in document:
        yield _vllm(document)


# -- vllm bench serve


def _vllm(of: Mapping[str, Any]) -> ForeignResult:
    completed, failed = read_count(of.get("completed")), read_count(of.get("failed"))
    requests = read_count(of.get("num_prompts"))
    if completed is not None and failed is not None:
        requests = completed + failed
    elif completed is not None and requests is not None:
        failed = max(0, requests - completed)
    # If no request completed, `vllm bench serve` writes latencies of 0.
    measured = of if completed else {}
    latencies = {
        name: _vllm_times(measured, f"{name}l" if name == "e2e" else name)
        for name in ("ttft", "tpot", "itl", "e2e")
    }
    # It also writes 0 for an endpoint that does not stream.
    if not latencies["ttft"].get("p50"):
        latencies["ttft"] = {}
    return ForeignResult(
        tool="vllm bench serve",
        version=None,
        model=read_text(of.get("model_id")),
        rate=read_number(of.get("request_rate")),
        concurrency=read_count(of.get("max_concurrency")),
        seconds=read_number(of.get("duration")),
        requests=requests,
        completed=completed,
        failed=failed,
        **latencies,
        output_tokens_per_second=read_number(of.get("output_throughput")),
        reservations=(*_vllm_reservations(of, failed), *missing_latencies(latencies)),
    )


def _vllm_times(of: Mapping[str, Any], name: str) -> dict[str, float]:
    keys = {"p50": f"median_{name}_ms", **{p: f"{p}_{name}_ms" for p in PERCENTILES[1:]}}
    return read_times({p: of.get(key) for p, key in keys.items()}, 1000)


def _vllm_reservations(of: Mapping[str, Any], failed: int | None) -> Iterator[str]:
    yield "the file has neither vLLM's version nor the number of warm-up requests"
    if failed:
        yield f"latencies and rates exclude {count_of(failed, 'failed request')}"
    bound, rate = read_count(of.get("max_concurrency")), read_number(of.get("request_rate"))
    if bound is not None:
        yield (
            f"latencies begin {_FROM_SEND}. With --max-concurrency {bound}, a request may wait "
            "before it is sent"
        )
    if rate is not None and read_number(of.get("burstiness")) == 1:
        yield (
            "its arrival times are scaled so that the last request arrives at a fixed time, so "
            "they vary less than in a Poisson process"
        )
    if read_text(of.get("ramp_up_strategy")):
        yield "its rate rises during the run, so the result is not that of a single level"
    if of.get("request_goodput") is not None:
        yield "its goodput excludes failed requests, and uses a TPOT of 0 for answers of one token"


# -- guidellm


def _guidellm(report: Mapping[str, Any], of: Mapping[str, Any]) -> ForeignResult:
    metrics = read_object(of, "metrics")
    totals = read_object(metrics, "request_totals")
    strategy = read_object(of, "config", "strategy") or read_object(of, "args", "strategy")
    kind = read_text(strategy.get("type_"))
    bound = read_count(strategy.get("streams")) or read_count(strategy.get("max_concurrency"))
    scheduled = _guidellm_times(metrics, "request_scheduled_latency", 1)
    latencies = {
        "ttft": _guidellm_times(metrics, "time_to_first_token_ms", 1000),
        "tpot": _guidellm_times(metrics, "inter_token_latency_ms", 1000),
        "e2e": scheduled or _guidellm_times(metrics, "request_latency", 1),
    }
    begin = f"{'TTFT begins' if scheduled else 'latencies begin'} {_FROM_SEND}"
    said = _guidellm_reservations(report, of, kind)
    return ForeignResult(
        tool="guidellm",
        version=read_text(read_object(report, "metadata").get("guidellm_version")),
        model=_guidellm_model(report, of),
        rate=read_number(strategy.get("rate")) if kind in ("constant", "poisson") else None,
        concurrency=1 if kind == "synchronous" else bound,
        seconds=read_number(of.get("duration")),
        requests=read_count(totals.get("total")),
        completed=read_count(totals.get("successful")),
        failed=read_count(totals.get("errored")),
        **latencies,
        itl={},
        output_tokens_per_second=read_number(
            read_object(metrics, "output_tokens_per_second", "successful").get("mean")
        ),
        reservations=(begin, *said, *missing_latencies(latencies)),
    )


def _guidellm_times(metrics: Mapping[str, Any], name: str, per_second: int) -> dict[str, float]:
    found = read_object(metrics, name, "successful")
    # If there are no values, guidellm writes percentiles of 0.
    if not read_count(found.get("count")):
        return {}
    return read_times(read_object(found, "percentiles"), per_second)


def _guidellm_model(report: Mapping[str, Any], of: Mapping[str, Any]) -> str | None:
    places = (
        read_object(of, "config", "backend"),
        read_object(report, "config", "spec", "backend"),
        read_object(report, "args"),
    )
    return next((name for each in places if (name := read_text(each.get("model")))), None)


def _guidellm_reservations(
    report: Mapping[str, Any], of: Mapping[str, Any], kind: str | None
) -> Iterator[str]:
    schema = read_object(report, "metadata").get("version", 1)
    if schema not in (1, 2):
        yield (
            f"gpufleet does not know version {printable(str(schema))} of its report schema, so a "
            "key may have a different meaning"
        )
    totals = read_object(of, "metrics", "request_totals")
    if errored := read_count(totals.get("errored")):
        yield f"{count_of(errored, 'failed request')} are in no latency"
    if cut := read_count(totals.get("incomplete")):
        yield f"latencies exclude {count_of(cut, 'request')} that had not ended when the run ended"
    if kind == "constant":
        yield _EVEN
    if kind not in ("constant", "poisson", "concurrent", "synchronous", "throughput"):
        yield f"its strategy {printable(kind or 'is missing')} is not a single level"
    yield (
        "its ITL is the mean of each answer, weighted by the answer's tokens, so gpufleet shows "
        "it as TPOT"
    )
    warnings = of.get("warnings")
    for each in warnings if isinstance(warnings, list) else []:
        if isinstance(each, dict) and (said := read_text(each.get("message"))):
            yield f"the tool's own warning: {printable(said)}"


# -- aiperf


def _aiperf(of: Mapping[str, Any]) -> ForeignResult:
    done = read_count(read_object(of, "request_count").get("avg"))
    failed = read_count(read_object(of, "error_request_count").get("avg"))
    # aiperf omits a counter that stayed at 0.
    if done is not None or failed is not None:
        done, failed = done or 0, failed or 0
    load = _aiperf_load(of)
    latencies = {
        "ttft": _aiperf_times(of, "time_to_first_token"),
        "tpot": _aiperf_times(of, "inter_token_latency"),
        "itl": _aiperf_times(of, "inter_chunk_latency"),
        "e2e": _aiperf_times(of, "request_latency"),
    }
    return ForeignResult(
        tool="aiperf",
        version=read_text(of.get("aiperf_version")),
        model=_aiperf_model(of),
        rate=read_number(load.get("rate", load.get("request_rate"))),
        concurrency=read_count(load.get("concurrency")),
        seconds=read_number(read_object(of, "benchmark_duration").get("avg")),
        requests=None if done is None or failed is None else done + failed,
        completed=done,
        failed=failed,
        **latencies,
        output_tokens_per_second=read_number(read_object(of, "output_token_throughput").get("avg")),
        reservations=(*_aiperf_reservations(of, load, failed), *missing_latencies(latencies)),
    )


def _aiperf_load(of: Mapping[str, Any]) -> Mapping[str, Any]:
    """
    Return the settings of the profiling phase.

    Older releases of aiperf have `loadgen` instead of phases.
    """
    listed = read_object(of, "input_config").get("phases")
    every = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    counted = [each for each in every if "profiling" in (each.get("kind"), each.get("name"))]
    if found := counted or every:
        return found[-1]
    return read_object(of, "input_config", "loadgen")


def _aiperf_model(of: Mapping[str, Any]) -> str | None:
    names = read_object(of, "input_config", "endpoint").get("model_names")
    if not isinstance(names, list):
        names = read_object(of, "input_config", "models").get("items")
    first = names[0] if isinstance(names, list) and names else None
    return read_text(first.get("name") if isinstance(first, dict) else first)


def _aiperf_times(of: Mapping[str, Any], name: str) -> dict[str, float]:
    found = read_object(of, name)
    per_second = {"ns": 1e9, "us": 1e6, "ms": 1e3, "sec": 1.0, "s": 1.0}.get(str(found.get("unit")))
    return read_times(found, per_second) if per_second else {}


def _aiperf_reservations(
    of: Mapping[str, Any], load: Mapping[str, Any], failed: int | None
) -> Iterator[str]:
    if of.get("was_cancelled") is True or of.get("is_complete") is False:
        why = read_text(of.get("incomplete_reason"))
        yield "the run did not end as planned" + (f": {printable(why)}" if why else "")
    if failed:
        yield f"{count_of(failed, 'failed request')} are in no latency"
    yield f"latencies begin {_FROM_SEND}"
    kind = load.get("type")
    if kind == "constant":
        yield _EVEN
    if kind in ("user_centric", "fixed_schedule", "gamma") or load.get("rate_series"):
        yield f"its load ({printable(str(kind))}) is not a Poisson process of one rate"
    yield "its ITL is the mean of each answer, so gpufleet shows it as TPOT"
