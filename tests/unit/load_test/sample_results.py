"""Measurements made by hand, with numbers that are easy to check."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpufleet.load_test.fingerprint import Subject
from gpufleet.load_test.level import LevelSummary, Verdict
from gpufleet.load_test.outcomes import Contract
from gpufleet.load_test.result import Client, Measurement, RateBracket, Searched
from gpufleet.load_test.time_series import TimeSeries

WHEN = dt.datetime(2026, 11, 20, 12, 30, 5, tzinfo=dt.UTC)

CONTRACT = Contract(ttft_seconds=0.5, itl_seconds=0.05, share=0.95)

SUBJECT = Subject(
    weights="meta-llama/Llama-3.1-8B",
    revision="d04e592bb4f6aa9cfee91e2e20afa771667e1d4b",
    release="0.32.0-1a2b3c4d5e",
    arguments=(
        "/opt/vllm/releases/0.32.0-1a2b3c4d5e/bin/vllm serve",
        "/var/lib/vllm/models/meta-llama--Llama-3.1-8B",
        "--served-model-name llama",
        "--port 8000",
        "--tensor-parallel-size 2",
        "--max-num-seqs 128",
        "--enable-prefix-caching",
    ),
    gpus={"NVIDIA H100 80GB HBM3": 2},
    driver="580.65.06",
    nodes=("gpu-01",),
)

WORKLOAD: Mapping[str, Any] = {
    "preset": "chat",
    "input": "512",
    "output": "64-192",
    "prefix_tokens": 0,
    "turns": 1,
    "seed": 7,
}


def latencies(p50: float) -> dict[str, float]:
    """Return percentiles around a median."""
    return {"p50": p50, "p90": 2 * p50, "p95": 2.5 * p50, "p99": 4 * p50}


def level(
    rate: float, kept: int, of: int, interval: tuple[float, float], verdict: Verdict, **more: Any
) -> LevelSummary:
    """Return an open loop's level; its latencies rise with the rate."""
    plain = LevelSummary(
        rate=rate,
        concurrency=None,
        seconds=of / rate,
        requests=of,
        kept=kept,
        low=interval[0],
        high=interval[1],
        verdict=verdict,
        why=f"{kept} of {of} requests kept the contract",
        ended="resolved",
        warm_up_seconds=4.0,
        errors={},
        ttft=latencies(0.02 * rate),
        itl=latencies(0.002 * rate),
        e2e=latencies(0.3 * rate),
        mean_concurrency=0.4 * rate * rate,
        output_tokens_per_second=128 * rate,
        prompt_tokens_per_second=512 * rate,
        dispatch_lag_p99=0.001,
    )
    return replace(plain, **more)


LEVELS = (
    level(2.0, 400, 400, (0.985, 1.0), "kept"),
    level(4.0, 780, 800, (0.955, 0.985), "kept"),
    level(8.0, 500, 1000, (0.46, 0.54), "missed", errors={"429": 3, "unfinished": 2}),
    level(6.0, 950, 1000, (0.93, 0.965), "not known", ended="budget"),
)


CLOSED = Searched(
    (
        replace(LEVELS[0], rate=None, concurrency=8, requests=400, seconds=50.0),
        replace(LEVELS[2], rate=None, concurrency=12),
    ),
    RateBracket(8.0, 12.0, "found", "8 is kept, 12 is missed", 8.0),
)

SERIES = TimeSeries(
    step_seconds=1.0,
    levels=(0.5, 4.2),
    rate=(2.0, 1.0, 2.0, 0.0, 3.0, 4.0),
    failed=(0.0, 0.0, 0.0, 0.0, 0.0, 1.0),
    running=(1.0, 2.0, None, 2.0, 5.0, 6.0),
    waiting=(0.0, 0.0, None, 0.0, 0.0, 3.0),
    kv_usage=(0.1, 0.2, None, 0.2, 0.4, 0.9),
    ttft_p50=(0.1, 0.1, 0.2, None, 0.3, 0.9),
    ttft_p95=(0.2, 0.2, 0.3, None, 0.5, 1.9),
    itl_p50=(0.01, 0.01, 0.02, None, 0.03, 0.06),
    itl_p95=(0.02, 0.02, 0.03, None, 0.04, 0.09),
)


def measurement(**changed: Any) -> Measurement:
    """Return a measurement of one replica."""
    plain = Measurement(
        when=WHEN,
        version="0.2.0",
        model="llama",
        target="replica llama-0",
        replicas=1,
        contract=CONTRACT,
        workload=WORKLOAD,
        loop="open",
        levels=LEVELS,
        found=RateBracket(4.0, 8.0, "budget", "between 4 and 8 requests/s", 6.4),
        client=Client(2, 900.0, 0.0011, 0.0012, "controller"),
        subject=SUBJECT,
    )
    return replace(plain, **changed)
