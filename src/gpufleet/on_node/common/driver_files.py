"""RUNS ON THE NODE: read the driver's files on disk for each kernel.

The result does not depend on the loaded module.
"""

from __future__ import annotations

import os
import re
from typing import Any

from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.common.answers import REASONS, CannotRead, is_missing, missing, read
from gpufleet.on_node.common.commands import Output, refusal_of, run
from gpufleet.on_node.common.linux_facts import directory_names, line

SECONDS = 5  # for one kernel, because modinfo unpacks the module, which has tens of MB

LIBRARY = "libnvidia-ml.so.1"


def kernels() -> dict[str, Any]:
    """
    Return `kernels` (the installed kernels) and `disk` (the module file of the running kernel).
    """
    running = line("/proc/sys/kernel/osrelease")
    installed = sorted(filter(is_installed, directory_names("/lib/modules")), key=version_key)
    asked = {kernel: read(module, kernel) for kernel in {*installed, running}}
    return {
        "disk": asked[running],
        "kernels": [
            {
                "kernel": kernel,
                "running": kernel == running,
                "newest": kernel == installed[-1],
                **{
                    ours: asked[kernel] if is_missing(asked[kernel]) else asked[kernel][theirs]
                    for ours, theirs in (("nvidia", "version"), ("signer", "signer"))
                },
            }
            for kernel in installed
        ],
    }


def is_installed(kernel: str) -> bool:
    """
    Return whether a kernel's own modules exist.

    The directory alone is no proof, because DKMS leaves directories of removed kernels.
    """
    at = linux_facts.ROOT + "/lib/modules/" + kernel
    return any(os.path.exists(at + "/" + name) for name in ("modules.dep", "modules.builtin"))


def version_key(kernel: str) -> list[Any]:
    """Return the key by which boot loaders sort kernels, with 6.8.0-9 before 6.8.0-90."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in
            re.findall(r"\d+|[^\d.-]+", kernel)]  # fmt: skip


def module(kernel: str) -> dict[str, Any]:
    """
    Return version, signer and file of a kernel's nvidia module.

    Raises an exception if the kernel has no nvidia module.
    """
    output = run("modinfo", "-k", kernel, "nvidia", seconds=SECONDS)
    if "not found" in output.err:
        raise CannotRead("absent", detail="no nvidia module for %s" % kernel)
    if output.status:
        raise refusal_of("modinfo", output)
    return {
        "version": modinfo_field(output, "version"),
        "signer": modinfo_field(output, "signer"),
        "file": modinfo_field(output, "filename"),
    }


def modinfo_field(output: Output, name: str) -> Any:
    """
    Return one field of modinfo's output, or `missing`. An unsigned module has no field `signer`.
    """
    found = re.search(r"^%s:[ \t]*(\S.*)$" % name, output.out, re.MULTILINE)
    return found.group(1).strip() if found else missing("absent")


def library() -> dict[str, Any]:
    """
    Return `library`, the file of NVML's library, and `nvml`, the version that the library returns.

    The file's name includes a version too. NVML returns its own version without initialisation, so
    the version is known even if the driver does not work.
    """
    return {
        "library": linux_facts.recorded_or_call("library", lambda: read(library_loaded)),
        "nvml": read(nvml_version),
    }


def library_loaded() -> dict[str, Any]:
    """
    Return the NVML library file that the loader finds.

    Raises `CannotRead` with the loader's error if the library cannot be loaded.
    """
    library_itself()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        found = re.search(r"(/\S*/libnvidia-ml\.so\S*)", maps.read())
    if not found:
        raise CannotRead("absent", detail=LIBRARY)
    file = os.path.realpath(found.group(1))
    version = re.search(r"\.so\.(\d+\.\d[\d.]*)$", file)
    return {"file": file, "version": version.group(1) if version else missing("absent")}


def library_itself() -> Any:
    """Load NVML's library and return it without initialising it."""
    import ctypes

    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise CannotRead("library_not_found", detail=str(error)) from None


def nvml_version() -> bytes:
    """Return NVML's own version."""
    import ctypes

    text = ctypes.create_string_buffer(80)  # NVML_SYSTEM_NVML_VERSION_BUFFER_SIZE, nvml.h
    code = library_itself().nvmlSystemGetNVMLVersion(text, ctypes.c_uint(len(text)))
    if code:
        raise CannotRead(REASONS.get(code, "nvml_error"), code=code)
    return text.value
