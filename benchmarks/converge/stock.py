"""The same state as playbook.yml through pyinfra's own operations, one a value."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyinfra import host
from pyinfra.facts.files import File, FindFiles
from pyinfra.facts.server import Command
from pyinfra.operations import apt, files, server, systemd

from benchmarks.converge.declared import FOLDER, GPUS_ANSWER, UNIT_DIRECTORY, read

folder = Path(os.environ[FOLDER])
node = read(folder, host.name)

counted = host.get_fact(Command, shlex.join(["/usr/bin/python3", "-c", GPUS_ANSWER]))
if counted != str(node["gpu_count"]):
    raise RuntimeError(f"{host.name} has {counted} GPUs, declared are {node['gpu_count']}")

apt.packages(name="packages", packages=node["packages"])
for group in node["groups"]:
    server.group(name=f"group {group['name']}", group=group["name"], system=group["system"])
for user in node["users"]:
    server.user(
        name=f"user {user['name']}",
        user=user["name"],
        group=user["group"],
        home=user["home"],
        shell=user["shell"],
        system=user["system"],
        create_home=False,
        ensure_home=False,
    )
for each in node["directories"]:
    files.directory(
        name=f"directory {each['path']}",
        path=each["path"],
        user=each["owner"],
        group=each["group"],
        mode=each["mode"],
    )
read_by: dict[str, list[Any]] = {}
for each in node["files"]:
    put = files.put(
        name=f"file {each['path']}",
        src=str(folder / "files" / each["sha256"]),
        dest=each["path"],
        user=each["owner"],
        group=each["group"],
        mode=each["mode"],
    )
    read_by.setdefault(each["reader"], []).append(put)

release = node["release"]
if not host.get_fact(File, release["mark"]):
    server.script(name="release", src=str(folder / "files" / release["script"]))
if host.get_fact(File, node["firewall_rules"]):
    server.shell(name="no table", commands="nft delete table inet gpufleet")

gone = []
for unit in node["units_gone"]:
    path = f"{UNIT_DIRECTORY}/{unit}"
    if host.get_fact(File, path):
        systemd.service(name=f"no {unit}", service=unit, running=False, enabled=False)
        gone.append(path)
keep = [f"{UNIT_DIRECTORY}/{unit['name']}" for unit in node["units"]]
for each in node["only_units"]:
    for path in host.get_fact(FindFiles, UNIT_DIRECTORY, fname=each["pattern"], maxdepth=1) or []:
        if path not in keep:
            unit = path.rpartition("/")[2]
            systemd.service(name=f"no {unit}", service=unit, running=False, enabled=False)
            gone.append(path)
for path in (*node["absent"], *gone):
    read_by.setdefault("none", []).append(files.file(name=f"no {path}", path=path, present=False))


def changed(*readers: str) -> Callable[[], bool]:
    """Return, during the run, whether a file has changed that one of these reads."""
    puts = [put for reader in readers for put in read_by.get(reader, ())]
    return lambda: any(put.did_change() for put in puts)


systemd.daemon_reload(name="reload systemd", _if=changed(*read_by))
for unit in node["units"]:
    name = unit["name"]
    reader = (
        "server" if name.startswith("vllm-") else "watchdog" if "watchdog" in name else "exporter"
    )
    if not name.endswith(".timer"):
        systemd.service(name=f"restart {name}", service=name, restarted=True, _if=changed(reader))
    systemd.service(
        name=f"unit {name}", service=name, running=unit["running"], enabled=unit["enabled"]
    )

if not host.get_fact(File, node["facts_file"]):
    server.shell(name="facts are there", commands="systemctl start gpufleet-facts.service")
for each in node["only_files"]:
    found = host.get_fact(FindFiles, each["directory"], fname=each["pattern"], maxdepth=1)
    for path in found or []:
        if path not in each["keep"]:
            files.file(name=f"no {path}", path=path, present=False)

# The key is read on the node: it is in no command line.
for each in node["endpoints"]:
    asked = (
        f'printf \'header = "Authorization: Bearer %s"\' "$(cat {each["key_file"]})"'
        " | curl -fsS -K - --retry 60 --retry-delay 1 --retry-all-errors -o /dev/null"
        " -H 'Content-Type: application/json'"
        f' -d \'{{"model": "{each["name"]}", "prompt": "1", "max_tokens": 1}}\''
        f" {each['url']}/v1/completions"
    )
    server.shell(name="check of the endpoint", commands=asked)
