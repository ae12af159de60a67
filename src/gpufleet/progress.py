"""Format the progress of a long step, for a terminal and for a log. Pure.

The module formats bytes and counted steps with rate and remaining time, and the names of awaited
things. `Pace` decides when a line is due. (`upgrade/report` has the steps of an upgrade.) Times are
in seconds of a monotonic clock, such as `time.monotonic()`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from gpufleet.formatting import count_of, format_duration, join_names

# What ends sooner needs no line.
FIRST_SECONDS = 2
OFTEN_SECONDS = 5
# After a minute fewer lines are enough: a download of six hours has 730 lines.
OFTEN_UNTIL_SECONDS = 60
SELDOM_SECONDS = 30
# The last three looks, 5 s apart: short enough to follow a line that becomes slow, and long enough
# that the gap between two files is no standstill.
WINDOW_SECONDS = 15
# The window for counts of steps that may take a minute each.
COUNT_WINDOW_SECONDS = 120
# Over a shorter time, a rate means nothing.
RATE_SECONDS = 1

UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class Pace:
    """The times of progress lines: after 2 s, then every 5 s, and every 30 s after a minute."""

    def __init__(self, began: float) -> None:
        self.began = began
        self._next = began + FIRST_SECONDS

    def is_due(self, now: float) -> bool:
        """Return whether a line is due; if so, count it as printed."""
        if now < self._next:
            return False
        early = now - self.began < OFTEN_UNTIL_SECONDS
        self._next = now + (OFTEN_SECONDS if early else SELDOM_SECONDS)
        return True


class Amount:
    """
    Progress of a transfer in bytes.

    `record` adds an observation, `text` formats the result.

    >>> amount = Amount()
    >>> amount.record(100.0, 0, 5_690_831_667)
    >>> amount.record(115.0, 1_288_490_188, 5_690_831_667)
    >>> amount.text()
    '1.2 of 5.3 GiB, 82 MiB/s, 51 s left'
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque()
        self._moved_at: float | None = None
        self._total: int | None = None

    def record(self, now: float, done: int, total: int | None = None) -> None:
        """Record the transferred bytes, and the total; None if unknown."""
        if not self._looks or done < self._looks[-1][1]:
            # Less than before: it was restarted, so earlier figures do not count.
            self._looks.clear()
            self._moved_at = now
        elif done > self._looks[-1][1]:
            self._moved_at = now
        self._total = total
        self._looks.append((now, done))
        # The last look before the window stays: the rate is over the whole window.
        while len(self._looks) > 2 and self._looks[1][0] <= now - WINDOW_SECONDS:
            self._looks.popleft()

    def text(self) -> str:
        """
        Return the progress at the last record; "" before the first one.

        With a total the text is "1.2 of 5.3 GiB, 85 MiB/s, 48 s left", without a total "1.2 GiB so
        far, 85 MiB/s", and after 15 s without a byte "1.2 of 5.3 GiB, no progress for 15 s".
        """
        if not self._looks or self._moved_at is None:
            return ""
        now, done = self._looks[-1]
        # A total that is passed was none.
        total = self._total if self._total is not None and self._total >= done else None
        parts = [f"{_bytes(done, 100)} so far" if total is None else amount_of(done, total)]
        began, before = self._looks[0]
        over = now - began
        if done != total and now - self._moved_at >= WINDOW_SECONDS:
            parts.append(f"no progress for {format_duration(now - self._moved_at)}")
        elif over >= RATE_SECONDS and done > before:
            rate = (done - before) / over
            parts.append(f"{_bytes(rate, 10)}/s")
            if total is not None and total > done:
                parts.append(f"{format_duration((total - done) / rate)} left")
        return ", ".join(parts)


class Count:
    """
    Progress of a known number of steps.

    >>> count = Count("line", 2000)
    >>> count.record(100.0, 0)
    >>> count.record(140.0, 400)
    >>> count.text()
    '400 of 2000 lines, 10/s, 2 min 40 s left'
    """

    def __init__(self, noun: str, total: int) -> None:
        self._noun, self._total = noun, total
        self._looks: deque[tuple[float, int]] = deque()

    def record(self, now: float, done: int) -> None:
        """Record the number of finished steps.

        Of the records within a second, only the first and the latest are kept.
        """
        if len(self._looks) > 1 and now - self._looks[-2][0] < RATE_SECONDS:
            self._looks.pop()
        self._looks.append((now, done))
        while len(self._looks) > 2 and self._looks[1][0] <= now - COUNT_WINDOW_SECONDS:
            self._looks.popleft()

    def text(self) -> str:
        """Return the finished steps at the last record, the rate, and the remaining time."""
        if not self._looks:
            return ""
        (began, before), (now, done) = self._looks[0], self._looks[-1]
        parts = [f"{done} of {count_of(self._total, self._noun)}"]
        if now - began >= RATE_SECONDS and done > before:
            rate = (done - before) / (now - began)
            parts.append(f"{rate:.3g}/s")
            parts.append(f"{format_duration((self._total - done) / rate)} left")
        return ", ".join(parts)


def amount_of(done: int, total: int) -> str:
    """
    Return "amount of total", both in the total's unit.

    >>> amount_of(1_288_490_188, 5_690_831_667)
    '1.2 of 5.3 GiB'
    """
    size, unit = _unit(total)
    decimals = _decimals(total / size, 100) if size > 1 else 0
    return f"{done / size:.{decimals}f} of {total / size:.{decimals}f} {unit}"


def download_text(done: int, total: int, left: Iterable[str]) -> str:
    """
    Return the downloaded bytes and the awaited items. There is no rate, because an item counts only
    once it is complete.

    >>> download_text(1_288_490_188, 5_690_831_667, ["torch", "triton"])
    '1.2 of 5.3 GiB done, 2 left: torch, triton'
    """
    names = list(left)
    text = f"{amount_of(done, total)} done"
    return f"{text}, {len(names)} left: {join_names(names)}" if names else text


def wait_text(noun: str, total: int, left: Iterable[str], seconds: float) -> str:
    """
    Return the number of things that have arrived, and the names of the missing ones.

    >>> wait_text("node", 64, ["gpu-31", "gpu-12", "gpu-07"], 12.3)
    '61 of 64 nodes after 12 s, 3 left: gpu-07, gpu-12, gpu-31'
    >>> wait_text("node", 1, ["gpu-31"], 12.3)
    'waiting for gpu-31, 12 s so far'
    """
    names = list(left)
    if total == 1 and names:
        return f"waiting for {names[0]}, {format_duration(seconds)} so far"
    text = f"{total - len(names)} of {count_of(total, noun)} after {format_duration(seconds)}"
    return f"{text}, {len(names)} left: {join_names(names)}" if names else text


def _bytes(count: float, below: int) -> str:
    size, unit = _unit(count)
    decimals = _decimals(count / size, below) if size > 1 else 0
    return f"{count / size:.{decimals}f} {unit}"


def _unit(count: float) -> tuple[int, str]:
    return next((each for each in UNITS if count >= each[0]), (1, "bytes"))


def _decimals(value: float, below: int) -> int:
    """
    Return the number of decimals: 1 below the limit, else 0.

    The limit is higher for amounts than for rates, because 30 s of a slow download must change an
    amount.
    """
    return 1 if value < below else 0
