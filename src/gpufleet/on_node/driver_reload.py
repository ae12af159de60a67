"""RUNS ON THE NODE, as root: unloads NVIDIA's driver and loads the one on the disk, as one act.

Takes (`PARAMETERS`):
  action        look, mark, fail, reload, start, reboot or clear
  reason        of mark and fail: why the node is unchecked
  version       of reload: of the module that has to be loaded in the end
  order         unload: modules, a user before what it uses; services: the driver's own units, as
                they stop
  load          of reload: modules, in their order
  stop_seconds  how long the slowest stage may take to stop
  sysroot       where the machine's files lie; "" on a real one
Prints one JSON document {"schema": 1, "error": sentence or "", ...}:
  look    `driver`, `system`, `kernel` and `boot_id` as the probe has them, and
          holders  who has the device files open
          used_by  modules that use nvidia's
          active   units that we would stop: stages of ours, and the driver's own
          kept     {"units", "modules"} that an earlier run stopped and that nobody started again
          barred   stages that systemd did not start because of the mark, at boot or after a crash
          mark     the mark's text, null if there is none
  mark    sets the mark, on disk when it is answered; one that is there stays as it is
  fail    gives the mark that is there another text
  reload  stops, unloads, loads, starts; `loaded`, `started`. If it fails, `held`: by whom, or
          `busy`: the kernel itself holds the module
  start   starts those of the driver's own units that were stopped and are not up; `started`
  reboot  writes down what runs, stops the stages, has systemd reboot
  clear   removes the mark, then starts everything that was stopped or barred; `started`
What runs is written down before the first unit is stopped, and forgotten when it runs again: who is
killed anywhere leaves the next run all that it needs. If the driver cannot be unloaded, the
driver's own units are started again; stages wait for the node's check. A connection that ends does
not end us. One at a time on a node: a lock. Python 3.8, standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, Iterator, Sequence

from gpufleet.on_node import driver_files, machine, system
from gpufleet.on_node.answers import CannotRead, is_missing, plain, read
from gpufleet.on_node.commands import ENVIRONMENT, path_of
from gpufleet.on_node.device_holders import holders
from gpufleet.on_node.machine import line, names

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

STATE = "/var/lib/gpufleet"
MARK = STATE + "/unchecked"
KEPT = STATE + "/driver-reload.json"
LOCK = STATE + "/driver-reload.lock"
UNITS = "/etc/systemd/system"
OURS = "/run/gpufleet/started/"  # in each unit of ours: wanted.started_line

# Another run's reload: its stages drain first, which `stop_seconds` covers.
LOCK_SECONDS = 60
SHORT_SECONDS = 60
# systemd's default for a stop and a start (DefaultTimeoutStopSec=), and the kill after it; the
# fabric manager trains every NVLink before it is up.
SERVICE_SECONDS = 180
# A module of 100 MB is read, checked and initialises 8 GPUs: seconds; on a stuck GPU never.
MODULE_SECONDS = 180
# A process that was killed closes its files when the kernel has freed its GPU memory: seconds.
RELEASE_SECONDS = 20


class FailedError(Exception):
    """One sentence for the operator, and facts for the document."""

    def __init__(self, sentence: str, **more: Any) -> None:
        super().__init__(sentence)
        self.more = more


# What is


def look() -> dict[str, Any]:
    """Return how the driver stands and who is in the way."""
    kernels = read(driver_files.kernels)
    library = read(driver_files.library)
    gone = is_missing(kernels)
    return {
        "boot_id": read(line, "/proc/sys/kernel/random/boot_id"),
        "kernel": read(line, "/proc/sys/kernel/osrelease"),
        "driver": {
            "module": read(line, "/sys/module/nvidia/version"),
            "disk": kernels if gone else kernels["disk"],
            "kernels": kernels if gone else kernels["kernels"],
            "library": library if is_missing(library) else library["library"],
            "nvml": library if is_missing(library) else library["nvml"],
        },
        "system": {
            "modules": read(system.modules),
            "reboot_required": dict(system.SYSTEM_FACTS)["reboot_required"](),
        },
        "holders": holders(),
        "used_by": used_by(),
        "active": active(),
        "kept": kept(),
        "barred": barred(),
        "mark": text_of(MARK),
    }


def used_by() -> list[str]:
    """Return the modules that use nvidia's."""
    found = read(names, "/sys/module/nvidia/holders")
    return [] if is_missing(found) else list(found)


def active() -> list[str]:
    """Return the units that we would stop and that are up, or on their way."""
    up = {"active", "activating", "reloading"}
    asked = [*stages(), *PARAMETERS["order"]["services"]]
    return [unit for unit, about in shown(asked).items() if about.get("ActiveState") in up]


def barred() -> list[str]:
    """Return the enabled stages that the guard of unchecked nodes keeps down."""
    return [
        unit
        for unit, about in shown(stages()).items()
        if about.get("ConditionResult") == "no"
        and about.get("ActiveState") == "inactive"
        and about.get("UnitFileState") == "enabled"
    ]


def shown(units: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return systemd's properties of units, those that nobody knows left out."""
    if not units:
        return {}
    wanted = "Id,LoadState,ActiveState,ConditionResult,UnitFileState"
    output = do("systemctl", "show", "--no-pager", "--property=" + wanted, "--", *units)
    blocks = [
        dict(row.split("=", 1) for row in block.splitlines() if "=" in row)
        for block in output.split("\n\n")
    ]
    return {about["Id"]: about for about in blocks if about.get("LoadState") == "loaded"}


def stages() -> list[str]:
    """Return the names of our stages' units; another's vllm-router.service is none."""
    found = read(names, UNITS)
    if is_missing(found):
        return []
    return [
        name
        for name in found
        if name.startswith("vllm-")
        and name.endswith(".service")
        and OURS in (text_of(UNITS + "/" + name) or "")
    ]


def text_of(path: str) -> str | None:
    """Return a file's text; None if there is no such file."""
    try:
        return line(path)
    except (FileNotFoundError, IsADirectoryError):
        return None


# What is written down


def kept() -> dict[str, list[str]]:
    """Return what was stopped and has to run again; after half a write, which cannot be, raises."""
    text = text_of(KEPT)
    return {"units": [], "modules": []} if text is None else dict(json.loads(text))


def keep(units: Sequence[str], modules: Sequence[str]) -> dict[str, list[str]]:
    """Add to what has to run again, on disk when this returns."""
    before = kept()
    now = {
        "units": sorted({*before["units"], *units}),
        "modules": sorted({*before["modules"], *modules}),
    }
    if now != before:
        write(KEPT, json.dumps(now))
    return now


def write(path: str, text: str) -> None:
    """Write a file whole, on disk when this returns."""
    at = machine.ROOT + path
    os.makedirs(os.path.dirname(at), mode=0o755, exist_ok=True)
    new = at + ".new"
    with open(new, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, at)
    directory = os.open(os.path.dirname(at), os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def remove(path: str) -> None:
    """Remove a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(machine.ROOT + path)


# What is done


def do(name: str, *arguments: str, seconds: float = SHORT_SECONDS) -> str:
    """Run a program; return what it printed. Raises `FailedError` with what it said."""
    try:
        done = subprocess.run(
            [path_of(name), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=seconds,
            check=False,
            env=ENVIRONMENT,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        words = " ".join((name, *arguments))
        raise FailedError("`%s` did not end within %d s" % (words, seconds)) from None
    except CannotRead:
        raise FailedError("the node has no program %s" % name) from None
    if done.returncode:
        said = " ".join(done.stderr.decode("utf-8", "replace").split())[:400]
        raise FailedError("`%s`: %s" % (" ".join((name, *arguments)), said or done.returncode))
    return done.stdout.decode("utf-8", "replace")


def mark(reason: str) -> dict[str, Any]:
    """Say that nobody has checked the node; have systemd heed what keeps stages from starting."""
    if text_of(MARK) is None:
        write(MARK, reason)
    do("systemctl", "daemon-reload", seconds=SERVICE_SECONDS)
    return {}


def fail(reason: str) -> dict[str, Any]:
    """Say why the node did not pass its check."""
    write(MARK, reason)
    return {}


def reload_driver() -> dict[str, Any]:
    """Bring the module on the disk into force; nothing is stopped while somebody is in the way."""
    running = active()
    refuse_others(holders(), running)
    loaded = loaded_modules()
    keep(running, loaded)
    own = own_kept()
    unloaded: list[str] = []
    try:
        stop(running)
        wait_for_release(running)
        refuse_busy(loaded)
        for module in loaded:
            unload(module)
            unloaded.append(module)
    except FailedError:
        with contextlib.suppress(FailedError):
            for module in reversed(unloaded):
                do("modprobe", module, seconds=MODULE_SECONDS)
        start(own)
        raise
    for module in PARAMETERS["load"]:
        do("modprobe", module, seconds=MODULE_SECONDS)
    # A service without privileges cannot make them, and ours have none.
    with contextlib.suppress(FailedError):
        do("nvidia-modprobe", "-c0", "-u")
    version = text_of("/sys/module/nvidia/version")
    if version != PARAMETERS["version"]:
        raise FailedError(
            "module %s was to be loaded, and %s is: `modinfo nvidia`, `dmesg | grep NVRM`"
            % (PARAMETERS["version"], version or "none")
        )
    started, failed = start(own)
    forget(own)
    if failed:
        raise FailedError(
            "driver %s is loaded, and these do not start with it: %s" % (version, "; ".join(failed))
        )
    return {"loaded": version, "started": started}


def refuse_others(found: list[dict[str, Any]], ours: Sequence[str]) -> None:
    """Raise `FailedError` naming processes that are in none of our units."""
    others = [each for each in found if each["unit"] not in ours]
    if others:
        named = "; ".join(
            "process %d %s%s" % (each["pid"], each["name"], " of " + (each["unit"] or "no unit"))
            for each in others[:4]
        )
        raise FailedError("the driver is held by %s; nothing was stopped" % named, held=others)


def loaded_modules() -> list[str]:
    """Return the driver's modules that are loaded, in the order in which they go."""
    loaded = system.modules()
    return [name for name in PARAMETERS["order"]["unload"] if name in loaded]


def stop(units: Sequence[str]) -> None:
    """Stop stages, all at once, then the driver's own services, one after the other."""
    services = PARAMETERS["order"]["services"]
    ours = [unit for unit in units if unit not in services]
    if ours:
        do("systemctl", "stop", "--", *ours, seconds=PARAMETERS["stop_seconds"] + SHORT_SECONDS)
    for unit in services:
        if unit in units:
            do("systemctl", "stop", "--", unit, seconds=SERVICE_SECONDS)


def wait_for_release(ours: Sequence[str]) -> None:
    """Wait until nobody has the devices open; raise `FailedError` naming who still has."""
    deadline = time.monotonic() + RELEASE_SECONDS
    while True:
        left = holders()
        if not left:
            return
        if time.monotonic() > deadline:
            refuse_others(left, ours)
            raise FailedError(
                "%s was stopped, and its process %d %s still holds %s after %d s: a process in "
                "state D goes with a reboot only"
                % (left[0]["unit"], left[0]["pid"], left[0]["name"], left[0]["devices"][0],
                   RELEASE_SECONDS),
                busy=True,
            )  # fmt: skip
        time.sleep(0.5)


def refuse_busy(loaded: Sequence[str]) -> None:
    """
    Raise `FailedError` if a module is used by more than the modules that go before it.

    Before the first is unloaded: what is on the disk does not fit those that would stay.
    """
    for module in loaded:
        count = text_of("/sys/module/%s/refcnt" % module)
        users = read(names, "/sys/module/%s/holders" % module)
        if count and not is_missing(users) and int(count) > len(users):
            raise FailedError(
                "module %s is used %d times beside the %d modules above it, and by no process: a "
                "console's frame buffer, or what is stuck in the kernel"
                % (module, int(count) - len(users), len(users)),
                busy=True,
            )


def unload(module: str) -> None:
    """Unload a module; `busy` says that nobody is left who could be stopped."""
    try:
        do("rmmod", module, seconds=MODULE_SECONDS)
    except FailedError as error:
        if module not in loaded_modules():
            return  # gone with another, or by another
        left = holders()
        refuse_others(left, ())
        raise FailedError(
            "%s, and no process has its devices open: the kernel itself uses it (a console's frame "
            "buffer, another module)" % error,
            busy=True,
        ) from None


def start(units: Sequence[str]) -> tuple[list[str], list[str]]:
    """Start units that are there and not up, in order; return those, and who failed with why."""
    # A later plan may have removed a stage.
    there, up = shown(units), active()
    started, failed = [], []
    for unit in units:
        if unit in up or unit not in there:
            continue
        try:
            with contextlib.suppress(FailedError):  # too many failures while there was no driver
                do("systemctl", "reset-failed", "--", unit)
            do("systemctl", "start", "--", unit, seconds=SERVICE_SECONDS)
            started.append(unit)
        except FailedError as error:
            failed.append("%s (%s; `journalctl -u %s`)" % (unit, error, unit))
    return started, failed


def forget(units: Sequence[str]) -> None:
    """Strike units, and the modules with them, off what has to run again."""
    left = [unit for unit in kept()["units"] if unit not in units]
    if left:
        write(KEPT, json.dumps({"units": left, "modules": []}))
    else:
        remove(KEPT)


def own_kept() -> list[str]:
    """Return those of the driver's own units that have to run again, as they start."""
    units = kept()["units"]
    return [unit for unit in reversed(PARAMETERS["order"]["services"]) if unit in units]


def start_again(units: Sequence[str]) -> dict[str, Any]:
    """Start what was stopped, and forget that it was when it runs."""
    started, failed = start(units)
    if failed:
        raise FailedError("these do not start: %s" % "; ".join(failed), started=started)
    forget(units)
    return {"started": started}


def reboot() -> dict[str, Any]:
    """Write down what runs, stop the stages, which a shutdown waits for less long, and reboot."""
    running = active()
    keep(running, [])
    stop([unit for unit in running if unit not in PARAMETERS["order"]["services"]])
    do("systemctl", "--no-block", "reboot")
    return {}


def clear() -> dict[str, Any]:
    """Remove the mark, and start what waited for that."""
    stages_down = barred()
    keep(stages_down, [])
    remove(MARK)
    own = own_kept()
    return start_again([*own, *(unit for unit in kept()["units"] if unit not in own)])


ACTIONS = {
    "look": look,
    "mark": lambda: mark(PARAMETERS["reason"]),
    "fail": lambda: fail(PARAMETERS["reason"]),
    "reload": reload_driver,
    "start": lambda: start_again(own_kept()),
    "reboot": reboot,
    "clear": clear,
}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the lock, which a killed process loses by itself."""
    at = machine.ROOT + LOCK
    os.makedirs(os.path.dirname(at), mode=0o755, exist_ok=True)
    lock = os.open(at, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_SECONDS + PARAMETERS["stop_seconds"]
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise FailedError(
                        "another run has been at this node's driver too long"
                    ) from None
                time.sleep(0.2)
        yield
    finally:
        os.close(lock)


def main() -> None:
    """Do what is asked and print the document."""
    machine.ROOT = PARAMETERS.get("sysroot", "")
    machine.ANSWERS = PARAMETERS.get("answers", {})
    action = PARAMETERS["action"]
    if action != "look":
        # Half a reload is worse than one that nobody waits for.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with contextlib.nullcontext() if action == "look" else alone():
            found = dict(ACTIONS[action](), error="")
    except FailedError as error:
        found = dict(error.more, error=str(error))
    except (OSError, ValueError) as error:
        found = {"error": "%s: %s" % (type(error).__name__, error)}
    sys.stdout.write(json.dumps(plain(dict(found, schema=1))) + "\n")


if __name__ == "__main__":
    main()
