"""RUNS ON THE NODE, as root: run one package transaction completely or undo it.

Takes (`PARAMETERS`): the result of gpufleet.converge.package_commands.parameters().
Prints one JSON document {"schema": 1, "changed": [[name, before, after]], "notes": [sentence]}.
On a problem, it prints a sentence on stderr and exits with status 1.

The program guarantees:
  * It waits for other package managers. If that takes too long, it reports which process it waits
    for.
  * It first simulates the transaction. It refuses a transaction
      - that would remove or downgrade a package, or release a hold, without a request
      - after which packages that must match would no longer match
      - for which there is not enough disk space
      - with a source that cannot be reached or is not signed by its key
  * After the transaction, it verifies versions, holds and configuration in the database.
  * If a package's own script fails, it installs the previous versions again, if they can be
    downloaded.
  * After a power cut or a kill, the next run first completes the interrupted transaction.
It needs only Python 3.8 and the standard library.
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
    """Run the transaction. Raises `RefusedError` or `LockedError` with a sentence as text."""
    os.umask(0o022)
    root, seconds = asked["root"], asked["lock_seconds"]
    lock = locks.take(root + LOCK, seconds)
    try:
        # apt fetches files as its own user, which must be able to enter this folder.
        os.chmod(os.path.dirname(os.path.dirname(root + LOCK)), 0o755)
        steps.begin_log(root)
        manager: Manager = Dnf(asked) if asked["manager"] == "dnf" else Apt(asked)
        locks.wait(root, manager.kind, seconds, partial(report_progress, root))
        steps.record_step(root, "reads the installed packages")
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
    """Print progress at once, even if no process reads it."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def report_progress(root: str, text: str) -> None:
    """Report progress to the caller and to `transaction_progress.py`."""
    steps.record_step(root, text)
    say(text)


def write_files(files: Dict[str, str]) -> None:
    """Write the configuration files that the steps use. Each file is written atomically."""
    for path, text in files.items():
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        with open(path + ".new", "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".new", path)


def repair_packages(manager: Manager, asked: Dict[str, Any]) -> List[str]:
    """Finish an interrupted run, unpack half-installed packages again, and return notes on it."""
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
    # Packages that this transaction replaces may stay broken until they are replaced.
    ours = {name for name, _ in asked["install"]} | set(asked["remove"])
    ours |= {name for names in asked["lockstep"] for name in names}
    if strangers := [name for name in left if name not in ours]:
        raise RefusedError(
            "%s is half installed, and its installation cannot be completed: %s. Fix this on the "
            "node (dpkg --configure -a), then run again" % (", ".join(strangers), output.last)
        )
    return ["completed unfinished work: %s" % ", ".join(half)] if not left else []


def change(manager: Manager, asked: Dict[str, Any], notes: List[str]) -> List[Change]:
    """Check the simulated transaction, then install, change and remove packages."""
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
    """Return the requested packages that are incomplete, whatever the exit status was."""
    found = manager.installed()
    return [name for name, _ in asked["install"] if name not in found or not found[name].whole]


def space_problems(root: str, needs: Dict[str, int]) -> List[str]:
    """Return a sentence for each file system that has not enough free space."""
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
                "the file system of %s has %d MB free, but %d MB are needed: free some space"
                % (path, free // 10**6, -(-size // 10**6))
            )
    return sentences


def restore(manager: Manager, changes: List[Change], output: Output, held: List[str]) -> str:
    """
    Restore the previous state after a package's script failed. Return the result as a sentence.
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
            "%s. The previous state could not be restored (%s). In the state after the failure: "
            "%s. The next run first completes the installation"
            % (said, back.last, ", ".join(sorted(wrong)))
        )
    manager.renew_holds(held)
    return "%s. Restored: every package is as it was before (%s)" % (
        said,
        ", ".join("%s %s" % (one.name, one.before or "not installed") for one in changes),
    )


def verify(manager: Manager, asked: Dict[str, Any]) -> None:
    """Verify the result in the package database. Raises `RefusedError` if the result differs."""
    found = manager.installed()
    wrong = []
    for name, version in asked["install"]:
        state = found.get(name)
        if state is None:
            wrong.append("%s is not installed" % name)
        elif not state.whole:
            wrong.append("%s %s is not configured" % (name, state.version))
        elif version and not accepts(version, state.version):
            wrong.append("%s has version %s instead of %s" % (name, state.version, version))
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
    """Run the transaction. Report a problem as one sentence."""
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
