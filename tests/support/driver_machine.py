"""A machine in a folder: a driver that loads and unloads, systemd's units, processes with devices.

Programs of its own (`systemctl`, `rmmod`, `modprobe`, `modinfo`) keep its state in files, so that
`on_node/gpu_software/driver_reload.py` runs as it does on a node, below another root. `die_at`
ends the one who runs the Nth program that changes something, before or after it has: a power cut
at any moment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpufleet.gpu_software.driver_activation import STOP_ORDER, UNLOAD_ORDER
from gpufleet.remote import payload

KERNEL = "6.8.0-45-generic"
MODULES = {
    "nvidia": ("nvidia_uvm", "nvidia_modeset"),
    "nvidia_modeset": ("nvidia_drm",),
    "nvidia_uvm": (),
    "nvidia_drm": (),
}
"""Each module of the driver, with those that use it."""

_PROGRAM = f"""#!{sys.executable} -ISE
import json, os, signal, sys
root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(sys.argv[0]))))
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
at = os.path.join(root, "machine.json")
state = json.load(open(at))
def save():
    json.dump(state, open(at + ".new", "w")); os.replace(at + ".new", at)
    path = root + "/proc/modules"
    open(path, "w").write("".join(m + " 1 0 - Live 0x0\\n" for m in state["loaded"]))
    version = root + "/sys/module/nvidia/version"
    os.makedirs(os.path.dirname(version), exist_ok=True)
    if "nvidia" in state["loaded"]: open(version, "w").write(state["version"])
    elif os.path.exists(version): os.unlink(version)
    for unit, pid in state["processes"].items():
        there = state["units"][unit]["ActiveState"] == "active"
        process = root + "/proc/%d" % pid
        if not there and os.path.exists(process): os.rename(process, root + "/ended%d" % pid)
def no(text):
    sys.stderr.write(text + "\\n"); sys.exit(1)
def step(when):
    state["steps"] += when == "before"
    json.dump(state, open(at + ".new", "w")); os.replace(at + ".new", at)
    if state["die_at"] == [state["steps"], when]:
        os.kill(os.getppid(), signal.SIGKILL); sys.exit(9)
if name == "systemctl" and words[0] == "show":
    for unit in words[words.index("--") + 1:]:
        about = state["units"].get(unit, {{"LoadState": "not-found", "ActiveState": "inactive"}})
        print("\\n".join("%s=%s" % pair for pair in {{"Id": unit, **about}}.items()) + "\\n")
    sys.exit()
if name == "modinfo":
    if not state["disk"]: no("modinfo: ERROR: Module nvidia not found.")
    print("filename: /x/nvidia.ko\\nversion: " + state["disk"]); sys.exit()
state["log"].append(" ".join([name, *words])); step("before")
if name == "systemctl":
    verb, units = words[0], words[words.index("--") + 1:] if "--" in words else []
    for unit in units:
        about = state["units"][unit]
        if verb == "stop": about["ActiveState"] = "inactive"
        if verb == "start" and unit in state["failing"]: no("Job for %s failed." % unit)
        if verb == "start":
            marked = os.path.exists(root + "/var/lib/gpufleet/unchecked")
            barred = marked and unit.startswith("vllm-")
            about["ConditionResult"] = "no" if barred else "yes"
            about["ActiveState"] = "inactive" if barred else "active"
elif name == "rmmod":
    users = {MODULES!r}.get(words[0], ())
    if words[0] not in state["loaded"]: no("rmmod: Module is not loaded")
    busy = [u for u in users if u in state["loaded"]]
    if busy or words[0] in state["busy"]: no("rmmod: ERROR: Module %s is in use" % words[0])
    state["loaded"].remove(words[0])
elif name == "modprobe":
    if not state["disk"]: no("modprobe: FATAL: Module %s not found" % words[0])
    if words[0] == "nvidia" and "nvidia" not in state["loaded"]: state["version"] = state["disk"]
    if words[0] not in state["loaded"]: state["loaded"].append(words[0])
save(); step("after")
"""

STAGE = "vllm-llama-0.service"
STARTED = "[Service]\nExecStartPre=+/bin/sh -c 'printf x > /run/gpufleet/started/%n'\n"
HELD_BY_UNITS = {STAGE: 4001, "nvidia-persistenced.service": 4002}


class Machine:
    """One machine; what it is stands in `machine.json`, which its programs write."""

    def __init__(self, root: Path, *, loaded: str | None = "580.95.05", disk: str = "580.178.04"):
        self.root = root
        for directory in ("proc/sys/kernel/random", "sys/module", "etc/systemd/system", "usr/bin"):
            (root / directory).mkdir(parents=True)
        self.write("proc/sys/kernel/osrelease", KERNEL)
        self.write("proc/sys/kernel/random/boot_id", "11111111-0000-4000-8000-000000000000")
        self.write(f"lib/modules/{KERNEL}/modules.dep", "")
        program = root / "usr/bin/program"
        program.write_text(_PROGRAM)
        program.chmod(0o755)
        for name in ("systemctl", "rmmod", "modprobe", "modinfo", "nvidia-modprobe"):
            os.link(program, root / "usr/bin" / name)
        modules = ["nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"] if loaded else []
        units = {
            STAGE: {"LoadState": "loaded", "ActiveState": "active", "UnitFileState": "enabled"},
            "nvidia-persistenced.service": {"LoadState": "loaded", "ActiveState": "active"},
            "nvidia-dcgm.service": {"LoadState": "loaded", "ActiveState": "active"},
            "nvidia-fabricmanager.service": {"LoadState": "loaded", "ActiveState": "inactive"},
        }
        self.write(f"etc/systemd/system/{STAGE}", STARTED)
        self.write("etc/systemd/system/vllm-router.service", "[Service]\nExecStart=/bin/true\n")
        self.state = {
            "loaded": modules,
            "version": loaded,
            "disk": disk,
            "units": units,
            "processes": HELD_BY_UNITS,
            "busy": [],
            "failing": [],
            "log": [],
            "steps": 0,
            "die_at": None,
        }
        self.set()
        self.write("proc/modules", "".join(f"{name} 1 0 - Live 0x0\n" for name in modules))
        if loaded:
            self.write("sys/module/nvidia/version", loaded)
        for unit, pid in HELD_BY_UNITS.items():
            self.process(pid, "held", unit)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def set(self, **values: Any) -> None:
        """Change what the machine is."""
        self.state.update(values)
        (self.root / "machine.json").write_text(json.dumps(self.state))

    def process(self, pid: int, name: str, unit: str | None) -> None:
        """Add a process that has a GPU open."""
        at = f"proc/{pid}"
        self.write(f"{at}/comm", name)
        self.write(f"{at}/cgroup", f"0::/system.slice/{unit}\n" if unit else "0::/\n")
        self.write(f"{at}/maps", "7f00-7f01 rw-s 00000000 00:05 500  /dev/nvidiactl\n")
        (self.root / at / "fd").mkdir()
        (self.root / at / "fd/3").symlink_to("/dev/nvidia0")

    def run(self, action: str, **parameters: Any) -> dict[str, Any] | None:
        """Run the program; None: it was killed. Reads the machine's state afterwards."""
        text = payload.program(
            "gpu_software/driver_reload",
            action=action,
            order={"unload": UNLOAD_ORDER, "services": STOP_ORDER},
            stop_seconds=5,
            sysroot=str(self.root),
            answers={"library": {"file": "libnvidia-ml.so", "version": self.state["disk"]}},
            **parameters,
        )
        done = subprocess.run(
            [sys.executable, "-I", "-"],
            input=text.encode(),
            capture_output=True,
            check=False,
            timeout=60,
        )
        self.state = json.loads((self.root / "machine.json").read_text())
        if done.returncode < 0:
            return None
        assert done.returncode == 0, done.stderr.decode()
        found: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
        return found

    @property
    def up(self) -> set[str]:
        """The units that run."""
        return {u for u, about in self.state["units"].items() if about["ActiveState"] == "active"}

    @property
    def changes(self) -> list[str]:
        """The commands that have changed something, in order."""
        return list(self.state["log"])
