"""Live progress of an upgrade: one line per step, for terminals and logs.

`Progress` takes the journal's entries as they are written. A line has the elapsed time, the wave,
the group, the step, and the number of groups left:

    4 min 12 s  wave 2 of 3  tiny-1: done  (2 of 4 groups remaining)
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpufleet.formatting import count_of, format_duration, join_names
from gpufleet.sanitize import printable
from gpufleet.upgrade.plan.wave import Group
from gpufleet.upgrade.run.journal_entry import Entry

_OVER = {"done", "returned", "stuck"}
_STYLES = {
    "done": "green",
    "finished": "bold green",
    "failed": "bold red",
    "stuck": "bold red",
    "stopped": "bold red",
    "returned": "yellow",
    "restoring": "yellow",
    "restored": "yellow",
    "paused": "yellow",
    "aborting": "yellow",
    "noted": "dim",
}


class Progress:
    """
    Format the entries of one journal as lines.

    `before` are the entries from earlier runs of a resumed upgrade. They are counted, but not
    printed again.
    """

    def __init__(self, before: Iterable[Entry] = ()) -> None:
        self._started: float | None = None
        self._waves = 0
        self._groups: dict[str, Group] = {}
        self._over: set[str] = set()
        for entry in before:
            self._count(entry)

    def on_entry(self, entry: Entry) -> str | None:
        """Return an entry's line for the operator; None: the entry has no line."""
        self._count(entry)
        said = _wording(entry)
        if said is None:
            return None
        parts = [f"{format_duration(max(0.0, entry.at - (self._started or entry.at))):>11}"]
        if entry.wave:
            of = f" of {self._waves}" if self._waves else ""
            parts.append(f"wave {entry.wave}{of}")
        about = ", ".join(filter(None, (entry.group, entry.node)))
        parts.append(f"{about}: {said}" if about else said)
        if entry.group and entry.what in _OVER:
            left = len(self._groups) - len(self._over)
            of_all = f"{left} of {count_of(len(self._groups), 'group')} remaining"
            parts.append(f"({of_all if left else 'no group remaining'})")
        return printable("  ".join(parts))

    def logged(self, entry: Entry) -> str | None:
        """Return an entry's line for a log file, with date and time in UTC."""
        line = self.on_entry(entry)
        if line is None:
            return None
        moment = dt.datetime.fromtimestamp(entry.at, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return f"{moment} {line.strip()}"

    def _count(self, entry: Entry) -> None:
        if self._started is None:
            self._started = entry.at
        if entry.what == "planned":
            waves = entry.said.get("waves") or ()
            self._waves = len(waves)
            self._groups = {
                group["id"]: Group.from_json(group) for wave in waves for group in wave["groups"]
            }
        if entry.group in self._groups and entry.node is None:
            # A stuck group is tried again.
            if entry.what in _OVER:
                self._over.add(entry.group)
            else:
                self._over.discard(entry.group)


def style(entry: Entry) -> str:
    """Return `rich`'s style for an entry's line; "": no style."""
    if entry.what == "judged":
        return "" if entry.said.get("passed") is True else "bold red"
    return _STYLES.get(entry.what, "")


def _wording(entry: Entry) -> str | None:
    said = entry.said
    if entry.node is not None:
        return _of_node(entry)
    found = _WORDS.get(entry.what)
    return found(said) if callable(found) else found


def _of_node(entry: Entry) -> str | None:
    if cut := entry.said.get("cut"):
        return f"{join_names(cut)} did not stop in time and was killed with running requests"
    return None


def _drained(said: Mapping[str, Any]) -> str:
    left = int(said.get("left") or 0)
    told = f"drained{_in(said)}, {count_of(left, 'request')} not finished"
    if unknown := said.get("unknown"):
        told += f"; {join_names(map(str, unknown))} did not report a number of requests"
    return told


def _judged(said: Mapping[str, Any]) -> str:
    verdict = "has an unknown result"
    if said.get("passed") is not None:
        verdict = "passed" if said["passed"] else "did not pass"
    return _with(f"gate {said.get('gate')} {verdict}", said.get("reasons"))


def _ready(said: Mapping[str, Any]) -> str:
    loads = said.get("load_seconds")
    if isinstance(loads, Mapping) and loads:
        each = ", ".join(
            f"{name} in {format_duration(float(value))}" for name, value in loads.items()
        )
        return f"answers, loaded: {each}"
    return f"answers{_in(said)}"


def _in(said: Mapping[str, Any]) -> str:
    found = said.get("seconds")
    return f" in {found:.1f} s" if isinstance(found, int | float) else ""


def _logged(text: str, said: Mapping[str, Any]) -> str:
    return f"{text} (log: {said['log']})" if said.get("log") else text


def _with(text: str, why: Any) -> str:
    sentences = [why] if isinstance(why, str) else [str(each) for each in why or ()]
    # Only the first line of each: the report has the last lines of a unit that died.
    firsts = [each.splitlines()[0] for each in sentences if each]
    return f"{text}: {'; '.join(firsts)}" if firsts else text


_WORDS: Mapping[str, str | Callable[[Mapping[str, Any]], str]] = {
    "started": lambda said: f"{said.get('kind', 'upgrade')} {said.get('id')}: {said.get('what')}",
    "declared": lambda said: (
        "written: "
        + join_names(f"{each['file']}:{each['line']}" for each in said.get("files") or ())
    ),
    "locked": lambda said: f"{count_of(len(said.get('nodes') or ()), 'node')} locked",
    "planned": lambda said: count_of(len(said.get("waves") or ()), "wave") + " planned",
    "confirmed": lambda said: f"confirmed by {said.get('by')}",
    "preparing": lambda said: _logged("preparing all nodes before the first wave", said),
    "prepared": lambda said: _logged("prepared: no unit has changed yet", said),
    "baseline": "the baseline of the replicas is recorded",
    "wave": "begins",
    "paused": lambda said: _with("paused", said.get("why")),
    "aborting": lambda said: _with("the groups in progress are rolled back", said.get("why")),
    "resumed": lambda said: f"resumed by {said.get('by')}",
    "finishing": lambda said: _logged("verifying that everything is as declared", said),
    "unlocked": "nodes unlocked",
    "finished": "finished: everything is as declared",
    "stopped": lambda said: _with("stopped", said.get("why")),
    "noted": lambda said: str(said.get("text", "")),
    "draining": "drains: gets no new requests",
    "drained": _drained,
    "changing": lambda said: _logged("changes the layers below vLLM", said),
    "changed": lambda said: _logged("the layers below vLLM are changed", said),
    "switching": "switches to the new units",
    "switched": "switched, and loads its model",
    "ready": _ready,
    "judged": _judged,
    "undraining": "gets requests again",
    "undrained": "serves, and gpufleet watches it",
    "soaked": lambda said: "watched" + _in(said).replace(" in ", " for "),
    "done": "done",
    "failed": lambda said: _with("failed", said.get("why")),
    "restoring": "is rolled back",
    "restored": "has its former units again, and loads its model",
    "returned": "serves as before",
    "stuck": lambda said: _with("stuck: repair it by hand", said.get("why")),
}
