"""RUNS ON THE NODE, as root: run one package transaction completely or undo it.

Takes (`PARAMETERS`): what gpufleet.converge.package_commands.parameters() returns.
Prints one JSON document {"schema": 1, "changed": [[name, before, after]], "notes": [sentence]};
on a problem it prints a sentence on stderr and exits with status 1.

Promises:
  * it waits for other package managers, and names them when that takes too long;
  * it simulates first, and refuses a transaction with an unrequested removal, downgrade or release
    of a hold, with packages that would no longer match, without enough disk space, or with a source
    that cannot be reached or is not signed by its key;
  * afterwards it reads versions, holds and configuration from the database;
  * if a package's own script fails, the previous versions are installed again, if they can be
    downloaded; after a power cut or a kill, the next run first completes the transaction.
Python 3.8, standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from functools import partial
from typing import Any, Dict, List, Union

from gpufleet.on_node.packages import locks, steps
from gpufleet.on_node.packages.apt_transaction import Apt
from gpufleet.on_node.packages.dnf_transaction import Dnf
from gpufleet.on_node.packages.outcome import Change, accepts, judge, out_of_step
from gpufleet.on_node.packages.steps import Output, RefusedError

PARAMETERS = globals().get("PARAMETERS") or {}

Manager = Union[Apt, Dnf]

LOCK = "/var/lib/gpufleet/packages/lock"
UNTOUCHED = "nothing was touched"


def transact(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Run the transaction. Raises `RefusedError` or `LockedError` with a sentence."""
    os.umask(0o022)
    root, seconds = asked["root"], asked["lock_seconds"]
    lock = locks.take(root + LOCK, seconds)
    try:
        # apt fetches as its own user, which has to get through.
        os.chmod(os.path.dirname(os.path.dirname(root + LOCK)), 0o755)
        steps.begin_log(root)
        manager: Manager = Dnf(asked) if asked["manager"] == "dnf" else Apt(asked)
        locks.wait(root, manager.kind, seconds, partial(report_progress, root))
        steps.record_step(root, "reads what is installed")
        write_files(asked["files"])
        manager.prepare()
        notes: List[str] = []
        changes: List[Change] = []
        if asked["install"] or asked["remove"]:
            notes += repair_packages(manager, asked)
            changes = change(manager, asked, notes)
        else:
            manager.mark()
        verify(manager, asked)
        return {"schema": 1, "changed": [list(one) for one in changes], "notes": notes}
    finally:
        steps.stop_watcher(root)
        os.close(lock)


def say(text: str) -> None:
    """Print progress at once, even if no one reads it."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def report_progress(root: str, text: str) -> None:
    """Report progress to the caller, and to `transaction_progress.py`."""
    steps.record_step(root, text)
    say(text)


def write_files(files: Dict[str, str]) -> None:
    """Write the configuration files of the steps atomically."""
    for path, text in files.items():
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        with open(path + ".new", "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".new", path)


def repair_packages(manager: Manager, asked: Dict[str, Any]) -> List[str]:
    """Finish interrupted work, unpack half-installed packages again, and return the notes."""
    half = manager.unfinished()
    if not half:
        return []
    steps.record_step(asked["root"], "completes an interrupted change")
    output = manager.finish()
    while output.status and "locked by another process" in output.text:
        wait = partial(report_progress, asked["root"])
        locks.wait(asked["root"], manager.kind, asked["lock_seconds"], wait)
        output = manager.finish()
    if asked["install"] and any(one.torn for one in manager.installed().values()):
        fetch(manager, asked)
        manager.repair()
    left = manager.unfinished()
    # What this transaction replaces may stay broken until then.
    ours = {name for name, _ in asked["install"]} | set(asked["remove"])
    ours |= {name for names in asked["lockstep"] for name in names}
    if strangers := [name for name in left if name not in ours]:
        raise RefusedError(
            "%s is half installed, and completing it fails: %s. Fix it on the node (dpkg "
            "--configure -a), then run again" % (", ".join(strangers), output.last)
        )
    return ["completed unfinished work: %s" % ", ".join(half)] if not left else []


def change(manager: Manager, asked: Dict[str, Any], notes: List[str]) -> List[Change]:
    """Install, change and remove packages after all checks against the simulation."""
    root = asked["root"]
    foul = fetch(manager, asked) if asked["install"] else []
    before = manager.installed()
    try:
        changes = manager.simulate()
    except RefusedError as refused:
        raise RefusedError("%s; %s" % ("; ".join([str(refused), *foul]), UNTOUCHED)) from None
    problems = judge(changes, asked, before, manager.older)
    needs = manager.needs(changes)
    problems += space_problems(root, needs)
    if problems:
        raise RefusedError("%s; %s" % ("; ".join(problems), UNTOUCHED))
    notes += ["the node's own package sources: %s" % line for line in foul]
    cache = next((folder for folder in needs if folder != "/usr"), "")
    steps.record_step(root, "downloads packages", cache, needs.get(cache, 0))
    output = manager.download()
    if output.status:
        raise RefusedError("packages could not be downloaded: %s; %s" % (output.last, UNTOUCHED))
    steps.record_step(root, "changes %d package%s" % (len(changes), "s"[: len(changes) - 1]))
    output = manager.install()
    held = [one.name for one in changes if one.name in before and before[one.name].held]
    if output.status or broken_packages(manager, asked):
        raise RefusedError(restore(manager, changes, output, held))
    left = manager.installed()
    manager.renew_holds([name for name in held if name in left and name not in asked["release"]])
    manager.mark()
    manager.clean()
    return changes


def fetch(manager: Manager, asked: Dict[str, Any]) -> List[str]:
    """Fetch the indexes, and return the errors of the node's own sources."""
    steps.record_step(asked["root"], "fetches the indexes of the package sources")
    for source in asked["sources"]:
        if not os.path.isfile(asked["root"] + source["key"]):
            raise RefusedError(
                "the key %s of the package source %s is not on the node: run the role "
                "that installs it first; %s" % (source["key"], source["id"], UNTOUCHED)
            )
    try:
        return manager.fetch()
    except RefusedError as refused:
        raise RefusedError("%s; %s" % (refused, UNTOUCHED)) from None


def broken_packages(manager: Manager, asked: Dict[str, Any]) -> List[str]:
    """Return the requested packages that are incomplete, regardless of the exit status."""
    found = manager.installed()
    return [name for name, _ in asked["install"] if name not in found or not found[name].whole]


def space_problems(root: str, needs: Dict[str, int]) -> List[str]:
    """Return a sentence for each file system that lacks room for the new content."""
    total: Dict[int, List[Any]] = {}
    for folder, size in needs.items():
        path = root + folder
        while not os.path.isdir(path):
            path = os.path.dirname(path)
        entry = total.setdefault(os.stat(path).st_dev, [path, 0])
        entry[1] += size
    sentences = []
    for path, size in total.values():
        status = os.statvfs(path)
        free = status.f_bavail * status.f_frsize
        if size > free:
            sentences.append(
                "the file system of %s has %d MB free, and %d MB are needed: make room"
                % (path, free // 10**6, -(-size // 10**6))
            )
    return sentences


def restore(manager: Manager, changes: List[Change], output: Output, held: List[str]) -> str:
    """
    Restore the previous state after a package's script failed; return the result as a sentence.
    """
    found = manager.installed()
    failed = sorted(one.name for one in changes if one.name in found and not found[one.name].whole)
    said = "the installation of %s failed: %s" % (
        ", ".join(failed) or ", ".join(sorted(one.name for one in changes)),
        output.last,
    )
    steps.record_step(manager.root, "restores the packages after a failure")
    back = manager.restore(changes)
    now = manager.installed()
    wrong = [
        one.name
        for one in changes
        if (now[one.name].version if one.name in now else None) != one.before
        or (one.name in now and not now[one.name].whole)
    ]
    if wrong:
        return (
            "%s. It could not be restored (%s): %s in the state after the failure; the next run "
            "begins by completing it" % (said, back.last, ", ".join(sorted(wrong)))
        )
    manager.renew_holds(held)
    return "%s. Restored: every package is as it was before (%s)" % (
        said,
        ", ".join("%s %s" % (one.name, one.before or "not installed") for one in changes),
    )


def verify(manager: Manager, asked: Dict[str, Any]) -> None:
    """Verify the result in the package database. Raises `RefusedError` for a difference."""
    found = manager.installed()
    wrong = []
    for name, version in asked["install"]:
        state = found.get(name)
        if state is None:
            wrong.append("%s is not installed" % name)
        elif not state.whole:
            wrong.append("%s %s is not configured" % (name, state.version))
        elif version and not accepts(version, state.version):
            wrong.append("%s is %s, wanted %s" % (name, state.version, version))
    wrong += ["%s is still installed" % name for name in asked["remove"] if name in found]
    wrong += [
        "%s is not held" % name for name in asked["hold"] if name in found and not found[name].held
    ]
    wrong += [
        "%s is still held" % name for name in asked["release"] if name in found and found[name].held
    ]
    wrong += out_of_step(asked["lockstep"], {name: state.version for name, state in found.items()})
    if wrong:
        raise RefusedError(
            "the package manager reported success, but %s; its output is in %s"
            % ("; ".join(wrong), asked["root"] + steps.LOG)
        )


def main() -> None:
    """Run the transaction; report a problem in one sentence."""
    steps.ignore_hangup()
    try:
        document = transact(PARAMETERS)
    except (RefusedError, locks.LockedError) as refused:
        sys.exit(str(refused))
    except Exception as error:
        sys.exit("the package transaction failed: %s: %s" % (type(error).__name__, error))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
