"""RUNS ON THE NODE, as root: list the kernels that have NVIDIA's module, and build it for others.

Takes (`PARAMETERS`):
  action   look or build
  kernels  for `build`: kernel releases, as `uname -r` prints them
  version  for `build`: the driver's version or branch; its newest sources are built
  sysroot  prefix of all paths; "" on a real machine
Prints one JSON document {"schema": 1, "error": sentence or "", ...}:
  kernels      [{"kernel", "running", "newest", "nvidia": version, "signer"}] for every kernel
  secure_boot  whether the firmware allows only signed modules
  enrolled     whether the firmware trusts the key with which DKMS signs modules
  said         for `build`: {kernel: the last lines of DKMS} for the kernels whose build failed
A package's maintainer script may succeed although DKMS has built nothing (because headers are
missing). It may also fail although all modules exist. So only the modules on disk count. The
program needs only Python 3.8 and the standard library.
"""

from __future__ import annotations

import json
import re
from typing import Any, Iterator, Optional, Tuple

from gpufleet.on_node.common import driver_files, linux_facts, system
from gpufleet.on_node.common.answers import CannotRead, is_missing, read, to_json_types
from gpufleet.on_node.common.commands import run
from gpufleet.on_node.common.linux_facts import directory_names, line

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

SOURCES = "/usr/src"
# Building the modules of one kernel takes 1 to 5 minutes on a server. A busy node needs more time.
BUILD_SECONDS = 1800
LINES = 8  # the lines that are returned of DKMS's output, and of its log
# The public keys for the keys with which DKMS signs: first Debian's and Red Hat's, then Ubuntu's.
KEYS = ("/var/lib/dkms/mok.pub", "/var/lib/shim-signed/mok/MOK.der")
MOKUTIL_SECONDS = 10


def look() -> dict[str, Any]:
    """Return the module of every kernel, the state of secure boot, and the state of DKMS's key."""
    found = read(driver_files.kernels)
    return {
        "kernels": found if is_missing(found) else found["kernels"],
        "secure_boot": read(system.secure_boot),
        "enrolled": read(enrolled),
    }


def enrolled() -> bool:
    """
    Return whether the firmware trusts DKMS's key.

    Raises `CannotRead` if there is no key, or if mokutil does not answer.
    """
    for key in KEYS:
        if is_missing(read(line, key)):
            continue
        # The status of mokutil(1) is not used, because its meaning has changed between releases.
        said = run("mokutil", "--test-key", linux_facts.ROOT + key, seconds=MOKUTIL_SECONDS).out
        if "not enrolled" not in said and "already enrolled" not in said:
            raise CannotRead("refused", detail=said.strip()[-200:])
        return "already enrolled" in said
    raise CannotRead("absent", detail="DKMS has not made a key yet")


def build(kernels: list[str], version: str) -> dict[str, Any]:
    """Build the newest sources of a version for these kernels. Return the kernels' new state."""
    source = newest_source(version)
    said = {}
    for kernel in kernels:
        if source is None:
            said[kernel] = "%s has no sources of NVIDIA's modules of %s" % (SOURCES, version)
            continue
        answer = read(dkms, "-m", source[0], "-v", source[1], "-k", kernel)
        if is_missing(answer):
            answer = answer.get("detail") or answer["missing"]
        if answer:
            said[kernel] = answer
    return {**look(), "said": said}


def dkms(*words: str) -> str:
    """
    Return "" if DKMS has installed a module, or else the last lines of its output and its log.
    """
    output = run("dkms", "install", *words, seconds=BUILD_SECONDS)
    if not output.status:
        return ""
    rows = (output.out + output.err).strip().splitlines()[-LINES:]
    for log in re.findall(r"/var/lib/dkms/\S+/make\.log", output.out + output.err)[:1]:
        text = read(line, log)
        rows += [] if is_missing(text) else text.splitlines()[-LINES:]
    return "\n".join(rows) or "status %d" % output.status


def newest_source(version: str) -> Optional[Tuple[str, str]]:
    """Return the name and version of the newest sources for a version or a branch, or None."""
    found = [each for each in sources() if each[1] == version or each[1].startswith(version + ".")]
    return max(found, key=lambda each: driver_files.version_key(each[1]), default=None)


def sources() -> Iterator[Tuple[str, str]]:
    """Yield the name and version of each of NVIDIA's modules that DKMS can build."""
    for folder in directory_names(SOURCES):
        text = read(line, "%s/%s/dkms.conf" % (SOURCES, folder))
        if folder.startswith("nvidia") and not is_missing(text):
            pairs = dict(re.findall(r'^PACKAGE_(NAME|VERSION)="?([\w.-]+)"?', text, re.MULTILINE))
            if len(pairs) == 2:
                yield pairs["NAME"], pairs["VERSION"]


def main() -> dict[str, Any]:
    """Run the requested action."""
    linux_facts.ROOT = PARAMETERS["sysroot"]
    try:
        if PARAMETERS["action"] == "build":
            return {"error": "", **build(PARAMETERS["kernels"], PARAMETERS["version"])}
        return {"error": "", **look()}
    except Exception as error:
        return {"error": "the kernels' modules could not be read: %s" % error}


if __name__ == "__main__":
    print(json.dumps(to_json_types({"schema": 1, **main()})))
