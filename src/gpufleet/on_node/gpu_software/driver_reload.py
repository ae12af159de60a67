"""RUNS ON THE NODE, as root: replace the loaded NVIDIA driver with the one on disk, in one step.

Takes (`PARAMETERS`):
  action        look, mark, fail, reload, start, reboot or clear
  reason        of mark and fail: why the node is unchecked
  version       of reload: the version of the module that must be loaded afterwards
  order         unload: the modules, each before those that it uses; services: the driver's own
                units, in the order in which they are stopped
  load          of reload: the modules to load, in order
  stop_seconds  how long the slowest stage may take to stop
  sysroot       prefix of every path: "" is the real machine
Prints one JSON document {"schema": 1, "error": sentence or "", ...}:
  look    `driver`, `system`, `kernel` and `boot_id` as the probe has them, and
          holders  processes that have the device files open
          used_by  modules that use the module nvidia
          active   units that a reload would stop: gpufleet's stages, and the driver's own
          kept     {"units", "modules"} that an earlier run stopped and that were not started again
          barred   stages that systemd did not start because of the mark, at boot or after a crash
          mark     the mark's text, null if there is none
  mark    writes the mark to disk; an existing mark keeps its text. Records which of the driver's
          own units run
  fail    replaces the mark's text by the reason
  reload  stops, unloads, loads, starts; `loaded`, `started`. If it fails, `held`: the processes
          that use the driver, or `busy`: the kernel itself holds the module
  start   loads the modules and starts the driver's own units that a reload has left; `started`
  reboot  records the running units, stops the stages, and has systemd reboot
  clear   removes the mark, then starts every unit that was stopped or barred; `started`
Running units are recorded before the first is stopped, and removed from the record when they run
again, so that the next run can continue after a kill at any point. If the driver cannot be
unloaded, the driver's own units are started again; stages wait for the node's check. The program
survives the end of its connection. A lock admits one program at a time on a node. Python 3.8,
standard library.
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
# Another run's reload: its stages drain first, which `stop_seconds` covers.
LOCK_SECONDS = 60
# A module of 100 MB is read, checked and initialises 8 GPUs: seconds; on a stuck GPU never.
MODULE_SECONDS = 180
# A process that was killed closes its files when the kernel has freed its GPU memory: seconds.
RELEASE_SECONDS = 20
PUT_BACK = "the driver's own services were started again"


# What is


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


# What is done


def mark_unchecked(reason: str) -> dict[str, Any]:
    """
    Mark the node as unchecked, and reload systemd so that the mark keeps stages from starting.
    """
    if text_of(MARK) is None:
        write(MARK, reason)
    # Packages stop their services while they are exchanged, and not all start them again.
    keep([unit for unit in active(SERVICES) if unit in SERVICES], [])
    run_program("systemctl", "daemon-reload", seconds=SERVICE_SECONDS)
    return {}


def record_failed_check(reason: str) -> dict[str, Any]:
    """Record in the mark why the node failed its check."""
    write(MARK, reason)
    return {}


def reload_driver() -> dict[str, Any]:
    """Load the module on disk; stop nothing while another program uses the driver."""
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
    # A service without privileges cannot make them, and ours have none.
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
            "driver %s is loaded, and these do not start with it: %s" % (version, "; ".join(failed))
        )
    return {"loaded": version, "started": started}


def refuse_others(found: list[dict[str, Any]], ours: Sequence[str], so: str) -> None:
    """
    Raise `FailedError` that names processes outside the units in `ours`, and the consequence `so`.
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
    Wait until no process has the devices open. Raises `FailedError` with the remaining processes.
    """
    deadline = time.monotonic() + RELEASE_SECONDS
    while True:
        left = holders()
        if not left:
            return
        if time.monotonic() > deadline:
            refuse_others(left, ours, PUT_BACK)
            raise FailedError(
                "%s was stopped, and its process %d %s still holds %s after %d s: a process in "
                "state D ends only with a reboot"
                % (left[0]["unit"], left[0]["pid"], left[0]["name"], left[0]["devices"][0],
                   RELEASE_SECONDS),
                busy=True,
            )  # fmt: skip
        time.sleep(0.5)


def refuse_busy(loaded: Sequence[str]) -> None:
    """
    Raise `FailedError` if a module has users other than the modules that are unloaded before.

    This is checked before the first unload, because new modules on disk would not match the loaded
    modules that stay.
    """
    for module in loaded:
        count = text_of("/sys/module/%s/refcnt" % module)
        users = read(directory_names, "/sys/module/%s/holders" % module)
        if count and not is_missing(users) and int(count) > len(users):
            raise FailedError(
                "module %s is used %d times beside the %d modules above it, and by no process: a "
                "console's frame buffer, or what is stuck in the kernel"
                % (module, int(count) - len(users), len(users)),
                busy=True,
            )


def unload(module: str) -> None:
    """
    Unload a module; the error has `busy` if it is in use without a process that could be stopped.
    """
    try:
        run_program("rmmod", module, seconds=MODULE_SECONDS)
    except FailedError as error:
        if module not in loaded_modules():
            return  # gone with another, or by another
        refuse_others(holders(), (), PUT_BACK)
        raise FailedError(
            "%s, and no process has its devices open: the kernel itself uses it (a console's frame "
            "buffer, another module)" % error,
            busy=True,
        ) from None


def start_again(units: Sequence[str]) -> dict[str, Any]:
    """Start stopped units, and remove them from the record once they run."""
    started, failed = start(units)
    if failed:
        raise FailedError("these do not start: %s" % "; ".join(failed), started=started)
    forget_units(units)
    return {"started": started}


def start_services() -> dict[str, Any]:
    """Load the modules and start the units that a killed reload left."""
    loaded = loaded_modules()
    for module in reversed(PARAMETERS["order"]["unload"]):
        if module in stopped_units()["modules"] and module not in loaded:
            run_program("modprobe", module, seconds=MODULE_SECONDS)
    return start_again(services_kept(SERVICES))


def reboot() -> dict[str, Any]:
    """
    Record running units, stop the stages, and reboot.

    The stages are stopped first, because a shutdown would wait less long for them.
    """
    running = active(SERVICES)
    keep(running, [])
    stages_up = [unit for unit in running if unit not in SERVICES]
    stop(stages_up, SERVICES, PARAMETERS["stop_seconds"])
    # In a moment, so that our answer still arrives.
    run_program("systemd-run", "--quiet", "--on-active=2", "systemctl", "--no-block", "reboot")
    return {}


def clear_unchecked() -> dict[str, Any]:
    """Remove the mark, and start the waiting units."""
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
    refusal = "another run has been changing this node's driver for too long"
    with file_lock.hold(at, seconds, lambda: FailedError(refusal)):
        yield


def main() -> None:
    """Run the requested action and print the document."""
    linux_facts.ROOT = PARAMETERS.get("sysroot", "")
    linux_facts.ANSWERS = PARAMETERS.get("answers", {})
    action = PARAMETERS["action"]
    if action != "look":
        # Half a reload is worse than one without a waiting caller.
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
