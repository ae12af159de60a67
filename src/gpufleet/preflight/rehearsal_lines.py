"""Report on rehearsals, and on whether the settings have a copy elsewhere. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpufleet.formatting import count_of, join_names
from gpufleet.preflight.line import Line, Status, Verdict
from gpufleet.upgrade.run.journal_entry import Entry
from gpufleet.upgrade.run.upgrade_state import State, fold


def rehearsal_lines(
    journals: Sequence[Sequence[Entry]],
    problems: Sequence[str],
    drained: Sequence[str],
    inventory: Path,
    now: dt.datetime,
) -> Iterator[Line]:
    """
    Yield lines on whether there is a record of a drain and of a rollback of this inventory.

    `journals` are the journals of upgrades, and `problems` are those that could not be read.
    `drained` are the replicas that are drained now. After `undrain`, a drain by hand leaves no
    record.
    """
    drains: list[tuple[float, str]] = []
    rollbacks: list[tuple[float, str]] = []
    mine: list[State] = []
    for entries in journals:
        state = fold(entries)
        if Path(state.inventory).resolve() != inventory.resolve():
            continue
        mine.append(state)
        drains += [
            (each.at, f"{each.group} by {state.id}") for each in entries if each.what == "drained"
        ]
        if state.kind == "rollback" and state.finished:
            rollbacks.append((state.finished, f"{state.id}, of {state.of}"))
        rollbacks += [
            (each.at, f"{each.group} in {state.id}") for each in entries if each.what == "returned"
        ]
    if mine:
        yield from _unfinished(max(mine, key=lambda each: each.started), inventory)
    unread = f"; not read: {join_names(problems)}" if problems else ""
    many = count_of(len(journals), "journal")
    if drains:
        verdict = _done("a drain is on record", drains, now)
    elif drained:
        verdict = Verdict(Status.OK, "a drain is going on", f"{join_names(drained)} drained now")
    else:
        remedy = f'gpufleet drain {inventory} NODE --why "rehearsal", then gpufleet undrain'
        proof = (
            f"no drain in {many}{unread}; a drain by hand leaves no record, only the drain "
            f"of an upgrade does"
        )
        verdict = Verdict(Status.WARN, "no drain is on record", proof, remedy)
    yield Line("rehearsal", "drain", verdict)
    if rollbacks:
        verdict = _done("a rollback is on record", rollbacks, now)
    else:
        remedy = f"gpufleet upgrade {inventory}, then gpufleet rollback {inventory}"
        proof = f"no rollback in {many}{unread}"
        verdict = Verdict(Status.WARN, "no rollback is on record", proof, remedy)
    yield Line("rehearsal", "rollback", verdict)


def _unfinished(last: State, inventory: Path) -> Iterator[Line]:
    """Yield a line if the last upgrade or rollback has not finished."""
    stuck = {name: each for name, each in last.groups.items() if each.phase == "stuck"}
    if stuck:
        why = "; ".join(f"{name}: {'; '.join(each.why)}" for name, each in stuck.items())
        what = f"the last {last.kind} left {join_names(stuck)} out of service"
    elif not last.is_over:
        why, what = f"{last.id}, {last.what}", f"the last {last.kind} has not ended"
    else:
        return
    remedy = f"gpufleet upgrade {inventory} --resume, or gpufleet rollback {inventory}"
    yield Line("rehearsal", f"last {last.kind}", Verdict(Status.FAIL, what, why, remedy))


def _done(what: str, found: Sequence[tuple[float, str]], now: dt.datetime) -> Verdict:
    at, name = max(found)
    when = dt.datetime.fromtimestamp(at, dt.UTC)
    days = max(0, (now - when).days)
    proof = f"last: {name}, {when:%Y-%m-%d}, {count_of(days, 'day')} ago"
    return Verdict(Status.OK, what, proof)


@dataclass(frozen=True)
class GitState:
    """The state of the project's directory in git."""

    commit: str = ""
    """The abbreviated hash of the last commit, with its date. "" if there is no commit."""
    changed: tuple[str, ...] = ()
    """The files with changes that are not committed."""
    remotes: tuple[str, ...] = ()
    """The names of the remotes."""
    unpushed: int | None = None
    """
    The number of commits that were not pushed to any remote, according to this checkout. None if it
    is unknown.
    """
    problem: str = ""
    """Why git could not be queried, for example because the directory is not a checkout."""
    commit_id: str = ""
    """The full hash of the last commit."""
    secrets: tuple[str, ...] = ()
    """The files that the settings name as secrets, but that are committed."""


def backup_line(found: GitState, folder: str) -> Line:
    """Return a line on whether the project's settings are committed and have a copy elsewhere."""
    add = f"run git -C {folder} init, add and commit; then add a remote and push"
    if found.problem:
        proof = f"{folder}: {found.problem}"
        return Line("backup", "project", Verdict(Status.WARN, "is not in git", proof, add))
    if not found.commit:
        proof = f"{folder} has no commit"
        return Line("backup", "project", Verdict(Status.WARN, "is not committed", proof, add))
    if found.secrets:
        untrack = (
            f"git -C {folder} rm --cached {' '.join(found.secrets)}, and add a line to "
            f".gitignore; then replace the secrets, because the old ones stay in git's history"
        )
        remotes = join_names(found.remotes) or "none"
        proof = f"committed: {join_names(found.secrets)}; remotes: {remotes}"
        return Line("backup", "project", Verdict(Status.FAIL, "has secrets in git", proof, untrack))
    wrong, remedy = [], []
    if found.changed:
        wrong.append(f"not committed: {join_names(found.changed)}")
        remedy.append(f"git -C {folder} commit")
    if not found.remotes:
        wrong.append("git has no remote, so there is no copy elsewhere")
        remedy.append(f"git -C {folder} remote add origin URL, and push")
    elif found.unpushed:
        wrong.append(f"{count_of(found.unpushed, 'commit')} not pushed to any remote")
        remedy.append(f"git -C {folder} push")
    at = f"commit {found.commit}"
    if wrong:
        verdict = Verdict(
            Status.WARN,
            "has no complete copy on a remote",
            f"{'; '.join(wrong)}; {at}",
            "; ".join(remedy),
        )
        return Line("backup", "project", verdict)
    proof = f"{at}, on {join_names(found.remotes)}; everything is committed"
    return Line("backup", "project", Verdict(Status.OK, "is committed", proof))
