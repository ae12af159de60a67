"""Requests arrive at random, and as often as was asked for, from however many processes."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, pvariance

import pytest

from gpufleet.errors import FleetError
from gpufleet.load_test.arrivals import (
    ClosedLoop,
    Poisson,
    Trace,
    TraceEntry,
    poisson_times,
    read_trace,
)
from gpufleet.on_node.load.request_draws import arrival_times
from tests.support.rows import each_row


def dispersion(times: Iterable[float], seconds: float, windows: int) -> float:
    """Return variance / mean of the counts in equal windows: 1 for a Poisson process."""
    counts = Counter(int(at * windows / seconds) for at in times if at < seconds)
    each = [counts[window] for window in range(windows)]
    return pvariance(each) / fmean(each)


@pytest.mark.parametrize("processes", [1, 4])
def test_counts_vary_as_those_of_a_poisson_process(processes: int) -> None:
    """For 4000 windows the index has a standard deviation of sqrt(2 / 4000) = 0.022."""
    times = list(poisson_times(25.0, 1600.0, 7, processes))
    assert dispersion(times, 1600.0, 4000) == pytest.approx(1.0, abs=0.08)
    assert len(times) == pytest.approx(40_000, abs=4 * math.sqrt(40_000))


def test_the_number_of_requests_varies_too() -> None:
    """Times that are scaled to end at n / rate have the same number in every run."""
    numbers = [len(list(poisson_times(20.0, 10.0, seed))) for seed in range(800)]
    assert pvariance(numbers) / fmean(numbers) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("processes", [1, 3])
def test_gaps_are_exponential(processes: int) -> None:
    """Kolmogorov and Smirnov's distance, for which 1.63 / sqrt(n) has a level of 1 %."""
    times = [0.0, *itertools.islice(poisson_times(50.0, 1e9, 3, processes), 20_000)]
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    count = len(gaps)
    distance = max(
        abs(1 - math.exp(-50.0 * gap) - (rank + 0.5) / count) for rank, gap in enumerate(gaps)
    )
    assert distance < 1.63 / math.sqrt(count)


def test_a_seed_repeats_itself_and_no_other() -> None:
    def first(seed: int) -> list[float]:
        return list(itertools.islice(poisson_times(9.0, 1e9, seed, 2), 50))

    assert first(1) == first(1)
    assert not set(first(1)) & set(first(2))
    one, other = (list(itertools.islice(arrival_times(1.0, s), 99)) for s in ("1/0", "1/1"))
    assert not set(one) & set(other)


def test_parts_of_clients_add_up_to_the_whole() -> None:
    for processes in (1, 2, 3, 7):
        parts = [Poisson(30.0, 20).part(n, processes) for n in range(processes)]
        assert sum(part["rate"] for part in parts) == pytest.approx(30.0)
        assert sum(part["concurrency"] for part in parts) == 20
        places = [ClosedLoop(20).part(n, processes)["concurrency"] for n in range(processes)]
        assert sum(places) == 20
        assert max(places) - min(places) <= 1
        trace = Trace(tuple(TraceEntry(float(n), n + 1, 1) for n in range(20)))
        schedules = [trace.part(n, processes)["schedule"] for n in range(processes)]
        assert sorted(itertools.chain(*schedules)) == [[float(n), n + 1, 1, []] for n in range(20)]


@each_row(
    "make",
    [
        lambda: Poisson(0.0),
        lambda: Poisson(-1.0),
        lambda: Poisson(math.nan),
        lambda: Poisson(math.inf),
        lambda: Poisson(1.0, 0),
        lambda: ClosedLoop(0),
    ],
)
def test_a_load_that_cannot_be_is_refused(make: object) -> None:
    with pytest.raises(FleetError, match="write"):
        make()  # type: ignore[operator]


def test_a_trace_begins_at_0_and_keeps_its_gaps(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 5000, "input_length": 700, "output_length": 20, "hash_ids": [1, 2]},
        {"timestamp": 4000.5, "input_length": 6, "output_length": 5},
        {"timestamp": 7000, "input_length": 1, "output_length": 1, "more": "is not looked at"},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    trace = read_trace(path)
    assert [each.due for each in trace.entries] == pytest.approx([0.0, 0.9995, 2.9995])
    assert [(e.prompt_tokens, e.tokens, e.blocks) for e in trace.entries] == [
        (6, 5, ()),
        (700, 20, (1, 2)),
        (1, 1, ()),
    ]
    assert trace.rate == pytest.approx(3 / 2.9995)
    fast = trace.at_rate(10 * trace.rate)
    assert fast.seconds == pytest.approx(0.29995)
    assert [e.tokens for e in fast.entries] == [5, 20, 1]
    trace.check_context(720)
    with pytest.raises(FleetError, match=r"1 of the trace's 3 requests .* has 720 tokens"):
        trace.check_context(719)


@each_row(
    "line, why",
    [
        ("{", "line 2: the line is not JSON: the text is incomplete"),
        ("[1]", "line 2: the line is not a JSON object"),
        ('{"input_length": 1, "output_length": 1}', "line 2: `timestamp`"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "line 2: `timestamp`"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 2: `timestamp`"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "line 2: `input_length`"),
        ('{"timestamp": 1, "input_length": 1.5, "output_length": 1}', "line 2: `input_length`"),
        ('{"timestamp": 1, "input_length": 1, "output_length": true}', "line 2: `input_length`"),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}',
            "line 2: `hash_ids`",
        ),
        ('{"timestamp": ' + "1" * 5000 + "}", "line 2: the line has a number with too many digits"),
        ("[" * 100_000, "line 2: the line has a number with too many digits"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1, "input_length": 1, "output_length": 1}\n' + line)
    with pytest.raises(FleetError) as refusal:
        read_trace(path)
    assert f"{path}: {why}" in str(refusal.value)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="No such file"):
        read_trace(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(FleetError, match="has no request"):
        read_trace(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(FleetError, match="UTF-8"):
        read_trace(tmp_path / "binary")
