"""RUNS ON THE NODE, as root: replace the loaded NVIDIA driver with the one on disk, in one step.

Takes (`PARAMETERS`):
  action        look, mark, fail, reload, start, reboot or clear
  reason        for `mark` and `fail`: why the node is unchecked
  version       for `reload`: the version of the module that must be loaded at the end
  order         {"unload": the modules, each before the modules that it uses; "services": the
                driver's own units, in the order in which they are stopped}
  load          for `reload`: the modules to load, in order
  stop_seconds  time limit for stopping the slowest stage
  sysroot       prefix of every path; "" on the real machine
Prints one JSON document {"schema": 1, "error": sentence or "", ...}. The actions are:
  look    report `driver`, `system`, `kernel` and `boot_id` in the form of the probe, and:
          holders  processes that have the device files open
          used_by  modules that use the module nvidia
          active   units that a reload would stop: gpufleet's stages and the driver's own units
          kept     {"units", "modules"} that an earlier run stopped and that were not started again
          barred   stages that systemd did not start because of the mark, at boot or after a crash
          mark     the mark's text; null if there is no mark
  mark    write the mark to disk; an existing mark keeps its text. Also record which of the driver's
          own units run
  fail    replace the mark's text with the reason
  reload  stop the units, unload and load the modules, start the units; report `loaded` and
          `started`. On failure, report `held` (the processes that use the driver) or `busy` (the
          kernel itself uses the module)
  start   load the modules, and start the driver's own units, that an interrupted reload has left;
          report `started`
  reboot  record the running units, stop the stages, and make systemd reboot
  clear   remove the mark, then start every unit that was stopped or barred; report `started`
Running units are recorded before the first unit is stopped. A unit is removed from the record when
it runs again. So if the program is killed at any point, the next run can continue. If the driver
cannot be unloaded, the driver's own units are started again, but the stages wait for the node's
check. The program continues if its connection ends. A lock allows only one such program at a time
on a node. It needs only Python 3.8 and the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import Any, Iterator, List, Sequence

from gpufleet.on_node.common import driver_files, file_lock, linux_facts, system
from gpufleet.on_node.common.answers import is_missing, read, to_json_types
from gpufleet.on_node.common.linux_facts import directory_names, line
from gpufleet.on_node.gpu_software.device_holders import holders
from gpufleet.on_node.gpu_software.driver_units import (
    SERVICE_SECONDS,
    FailedError,
    active,
    blocked_stages,
    forget_units,
    keep,
    remove,
    run_program,
    services_kept,
    start,
    stop,
    stopped_units,
    text_of,
    write,
)

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

STATE = "/var/lib/gpufleet"
MARK = STATE + "/unchecked"
SERVICES: List[str] = PARAMETERS["order"]["services"] if PARAMETERS else []
LOCK = STATE + "/driver-reload.lock"
# Time to wait for the reload of a different run, without the time in which its stages drain. That
# time is in `stop_seconds`.
LOCK_SECONDS = 60
# Loading a module of 100 MB takes seconds: it is read and checked, and it initialises 8 GPUs. If a
# GPU is stuck, loading never ends.
MODULE_SECONDS = 180
# A process that was killed closes its files when the kernel has freed its GPU memory. This takes
# seconds.
RELEASE_SECONDS = 20
PUT_BACK = "the driver's own services were started again"


# The state


def look() -> dict[str, Any]:
    """Return the driver's state and the processes that block a reload."""
    kernels = read(driver_files.kernels)
    library = read(driver_files.library)
    gone = is_missing(kernels)
    return {
        "boot_id": read(line, "/proc/sys/kernel/random/boot_id"),
        "kernel": read(line, "/proc/sys/kernel/osrelease"),
        "driver": {
            "module": read(line, "/sys/module/nvidia/version"),
            "proc": read(lambda: line("/proc/driver/nvidia/version").splitlines()[0]),
            "disk": kernels if gone else kernels["disk"],
            "kernels": kernels if gone else kernels["kernels"],
            "library": library if is_missing(library) else library["library"],
            "nvml": library if is_missing(library) else library["nvml"],
        },
        "system": {
            "modules": read(system.modules),
            "reboot_required": read(system.reboot_required),
        },
        "holders": holders(),
        "used_by": used_by(),
        "active": active(SERVICES),
        "kept": stopped_units(),
        "barred": blocked_stages(),
        "mark": text_of(MARK),
    }


def used_by() -> list[str]:
    """Return the modules that use the module nvidia."""
    found = read(directory_names, "/sys/module/nvidia/holders")
    return [] if is_missing(found) else list(found)


# The actions


def mark_unchecked(reason: str) -> dict[str, Any]:
    """
    Mark the node as unchecked, and reload systemd, so that the mark prevents stages from starting.
    """
    if text_of(MARK) is None:
        write(MARK, reason)
    # Packages stop their services while they are replaced, and not all packages start them again.
    keep([unit for unit in active(SERVICES) if unit in SERVICES], [])
    run_program("systemctl", "daemon-reload", seconds=SERVICE_SECONDS)
    return {}


def record_failed_check(reason: str) -> dict[str, Any]:
    """Record in the mark why the node failed its check."""
    write(MARK, reason)
    return {}


def reload_driver() -> dict[str, Any]:
    """Load the module on disk. If another program uses the driver, stop nothing."""
    running = active(SERVICES)
    refuse_others(holders(), running, "nothing was stopped")
    loaded = loaded_modules()
    keep(running, loaded)
    own = services_kept(SERVICES)
    unloaded: list[str] = []
    try:
        stop(running, SERVICES, PARAMETERS["stop_seconds"])
        wait_for_release(running)
        refuse_busy(loaded)
        for module in loaded:
            unload(module)
            unloaded.append(module)
    except FailedError:
        with contextlib.suppress(FailedError):
            for module in reversed(unloaded):
                run_program("modprobe", module, seconds=MODULE_SECONDS)
        start(own)
        raise
    for module in PARAMETERS["load"]:
        run_program("modprobe", module, seconds=MODULE_SECONDS)
    # Create the device files here. Services without privileges cannot create them, and gpufleet's
    # services have none.
    with contextlib.suppress(FailedError):
        run_program("nvidia-modprobe", "-c0", "-u")
    version = text_of("/sys/module/nvidia/version")
    if version != PARAMETERS["version"]:
        raise FailedError(
            "module %s should be loaded, but %s is: `modinfo nvidia`, `dmesg | grep NVRM`"
            % (PARAMETERS["version"], version or "none")
        )
    started, failed = start(own)
    forget_units(own)
    if failed:
        raise FailedError(
            "driver %s is loaded, but these units do not start: %s" % (version, "; ".join(failed))
        )
    return {"loaded": version, "started": started}


def refuse_others(found: list[dict[str, Any]], ours: Sequence[str], so: str) -> None:
    """
    Raise `FailedError` if processes outside the units in `ours` use the driver.

    The error lists the processes and has `so`, the consequence.
    """
    others = [each for each in found if each["unit"] not in ours]
    if others:
        named = "; ".join(
            "process %d %s of %s" % (each["pid"], each["name"], each["unit"] or "no unit")
            for each in others[:4]
        )
        raise FailedError("the driver is in use by %s: %s" % (named, so), held=others)


def loaded_modules() -> list[str]:
    """Return the driver's loaded modules in the order of unloading."""
    loaded = system.modules()
    return [name for name in PARAMETERS["order"]["unload"] if name in loaded]


def wait_for_release(ours: Sequence[str]) -> None:
    """
    Wait until no process has the devices open.

    If processes remain, raises `FailedError` with these processes.
    """
    deadline = time.monotonic() + RELEASE_SECONDS
    while True:
        left = holders()
        if not left:
            return
        if time.monotonic() > deadline:
            refuse_others(left, ours, PUT_BACK)
            raise FailedError(
                "%s was stopped, but its process %d %s still has %s open after %d s: a process in "
                "state D ends only with a reboot"
                % (left[0]["unit"], left[0]["pid"], left[0]["name"], left[0]["devices"][0],
                   RELEASE_SECONDS),
                busy=True,
            )  # fmt: skip
        time.sleep(0.5)


def refuse_busy(loaded: Sequence[str]) -> None:
    """
    Raise `FailedError` if a module has users other than the modules that are unloaded before it.

    This is checked before the first module is unloaded. Otherwise, modules that stay loaded would
    not match the new modules on disk.
    """
    for module in loaded:
        count = text_of("/sys/module/%s/refcnt" % module)
        users = read(directory_names, "/sys/module/%s/holders" % module)
        if count and not is_missing(users) and int(count) > len(users):
            raise FailedError(
                "module %s has %d users besides the %d modules that use it, but no process uses "
                "it: the user is a console's frame buffer, or something that is stuck in the kernel"
                % (module, int(count) - len(users), len(users)),
                busy=True,
            )


def unload(module: str) -> None:
    """
    Unload a module.

    If the module is in use but no process that could be stopped uses it, the error has `busy`.
    """
    try:
        run_program("rmmod", module, seconds=MODULE_SECONDS)
    except FailedError as error:
        if module not in loaded_modules():
            return  # the module was unloaded with a different module, or by a different program
        refuse_others(holders(), (), PUT_BACK)
        raise FailedError(
            "%s, but no process has its devices open: the kernel itself uses the module (a "
            "console's frame buffer, or another module)" % error,
            busy=True,
        ) from None


def start_again(units: Sequence[str]) -> dict[str, Any]:
    """Start the stopped units. Remove each unit from the record when it runs."""
    started, failed = start(units)
    if failed:
        raise FailedError("these units do not start: %s" % "; ".join(failed), started=started)
    forget_units(units)
    return {"started": started}


def start_services() -> dict[str, Any]:
    """Load the modules, and start the units, that a killed reload has left."""
    loaded = loaded_modules()
    for module in reversed(PARAMETERS["order"]["unload"]):
        if module in stopped_units()["modules"] and module not in loaded:
            run_program("modprobe", module, seconds=MODULE_SECONDS)
    return start_again(services_kept(SERVICES))


def reboot() -> dict[str, Any]:
    """
    Record running units, stop the stages, and reboot.

    The stages are stopped before the reboot, because a shutdown would not wait long enough for
    them.
    """
    running = active(SERVICES)
    keep(running, [])
    stages_up = [unit for unit in running if unit not in SERVICES]
    stop(stages_up, SERVICES, PARAMETERS["stop_seconds"])
    # Reboot after a moment, so that this program's answer still arrives.
    run_program("systemd-run", "--quiet", "--on-active=2", "systemctl", "--no-block", "reboot")
    return {}


def clear_unchecked() -> dict[str, Any]:
    """Remove the mark, then start the units that wait for this."""
    stages_down = blocked_stages()
    keep(stages_down, [])
    remove(MARK)
    own = services_kept(SERVICES)
    return start_again([*own, *(unit for unit in stopped_units()["units"] if unit not in own)])


ACTIONS = {
    "look": look,
    "mark": lambda: mark_unchecked(PARAMETERS["reason"]),
    "fail": lambda: record_failed_check(PARAMETERS["reason"]),
    "reload": reload_driver,
    "start": start_services,
    "reboot": reboot,
    "clear": clear_unchecked,
}


@contextlib.contextmanager
def hold_lock() -> Iterator[None]:
    """Hold the lock, which the kernel releases if the process is killed."""
    at = linux_facts.ROOT + LOCK
    os.makedirs(os.path.dirname(at), mode=0o755, exist_ok=True)
    seconds = LOCK_SECONDS + PARAMETERS["stop_seconds"]
    refusal = "a different run has been changing this node's driver for too long"
    with file_lock.hold(at, seconds, lambda: FailedError(refusal)):
        yield


def main() -> None:
    """Run the requested action and print the document."""
    linux_facts.ROOT = PARAMETERS.get("sysroot", "")
    linux_facts.ANSWERS = PARAMETERS.get("answers", {})
    action = PARAMETERS["action"]
    if action != "look":
        # If the caller has gone, complete the reload, because half a reload is worse.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with contextlib.nullcontext() if action == "look" else hold_lock():
            found = dict(ACTIONS[action](), error="")
    except FailedError as error:
        found = dict(error.more, error=str(error))
    except (OSError, ValueError) as error:
        found = {"error": "%s: %s" % (type(error).__name__, error)}
    sys.stdout.write(json.dumps(to_json_types(dict(found, schema=1))) + "\n")


if __name__ == "__main__":
    main()
