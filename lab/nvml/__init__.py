"""Build the simulated NVML: a libnvidia-ml.so.1 that answers from a text file.

`build` compiles the C sources beside this file together with what it derives from data:

* A stub for each function that the vendored binding can call and no C file defines. With a stub, a
  program gets "not supported", as on real boards, and never a missing symbol.
* The table of the first driver that has each function (`history.txt`). With this table, an older
  simulated driver returns "function not found".

The library needs only libc. docs/develop/lab-profiles.md describes the lines of a profile.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from gpufleet.errors import FleetError
from gpufleet.remote import payload

SOURCES = Path(__file__).parent
PROFILES = SOURCES.parent / "profiles"
BINDING = payload.binding()

SONAME = "libnvidia-ml.so.1"  # what every NVML client opens, by this name only

COMPILE = (
    "gcc", "-std=c11", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread",
    "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{SONAME}", "-Wl,-z,defs",
)  # fmt: skip
COMPILE_TIMEOUT = 120  # seconds; it takes about one


def build(out: Path) -> Path:
    """Compile the library into the directory `out` and return its path, `out/libnvidia-ml.so.1`.

    A file beside the library stores the hash of all inputs. If the hash is unchanged, `build` does
    nothing. Two builds at the same time are safe, because a rename puts the complete library in
    place.

    Raises `FleetError` if gcc is not installed or refuses the sources.
    """
    library, stamp = out / SONAME, out / f"{SONAME}.inputs"
    wanted = _fingerprint()
    if library.exists() and stamp.exists() and stamp.read_text() == wanted:
        return library
    if shutil.which("gcc") is None:
        raise FleetError(
            "gcc is not installed, but the lab compiles its simulated NVML on this machine; "
            "install gcc and the C library's headers (Debian, Ubuntu: apt install gcc libc6-dev)"
        )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".build-") as scratch:
        built = _compile(Path(scratch))
        built.chmod(0o755)
        built.replace(library)
        written = Path(scratch) / "inputs"
        written.write_text(wanted)
        written.replace(stamp)
    return library


def profile(name: str) -> Path:
    """Return the file of the healthy machine `name`, for example "h100x8".

    Raises `FleetError` with the known names.
    """
    if name not in profiles():
        raise FleetError(
            f"there is no hardware profile {name!r}: choose one of {', '.join(profiles())}, "
            f"or write {name}.conf in {PROFILES} (docs/develop/lab-profiles.md)"
        )
    return PROFILES / f"{name}.conf"


def profiles() -> tuple[str, ...]:
    """Return the names of all healthy machines, sorted: ("a100x4-pcie", "a100x8", ...)."""
    return tuple(sorted(path.stem for path in PROFILES.glob("*.conf")))


def functions(binding: Path = BINDING) -> tuple[str, ...]:
    """Return every C function that the Python binding uses, sorted."""
    return tuple(sorted(set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"', binding.read_text()))))


def history() -> dict[str, tuple[int, int]]:
    """Return the first driver with each function, as (branch, release).

    >>> history()["nvmlDeviceGetSramEccErrorStatus"]
    (535, 161)
    """
    first: dict[str, tuple[int, int]] = {}
    for line in (SOURCES / "history.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            driver, function = line.split()
            branch, _, release = driver.partition(".")
            first[function] = (int(branch), int(release or 0))
    return first


def _compile(scratch: Path) -> Path:
    (scratch / "history.inc").write_text(_history_table())
    (scratch / "stubs.c").write_text(_stubs())
    sources = [*_c_files(), scratch / "stubs.c"]
    built = scratch / SONAME
    command = [*COMPILE, f"-I{SOURCES}", f"-I{scratch}", "-o", str(built), *map(str, sources)]
    try:
        gcc = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT, check=False,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise FleetError(
            f"gcc did not finish the simulated NVML within {COMPILE_TIMEOUT} s; it usually takes "
            "one: check for a full disk or too little memory"
        ) from None
    if gcc.returncode != 0:
        raise FleetError(f"gcc refuses the simulated NVML in {SOURCES}:\n{gcc.stderr.strip()}")
    return built


def _c_files() -> list[Path]:
    return sorted(SOURCES.glob("*.c"))


def _written_by_hand() -> set[str]:
    definition = re.compile(
        r"^NVML_API (nvml\w+)\(|^[A-Z_]+\((nvml\w+), |const char \*(nvmlErrorString)\(",
        re.MULTILINE,
    )
    return {
        name
        for path in _c_files()
        for names in definition.findall(path.read_text())
        for name in names
        if name
    }


def _stubs() -> str:
    missing = sorted(set(functions()) - _written_by_hand())
    return "\n".join(
        [
            '#include "sim.h"',
            "",
            # Callers pass other arguments, which a callee may ignore by C's calling conventions.
            "#define STUB(function) \\",
            "    NVML_API function(const void *first); \\",
            "    NVML_API function(const void *first) { return answer_stub(__func__, first); }",
            "",
            *(f"STUB({function})" for function in missing),
            "",
        ]
    )


def _history_table() -> str:
    # strcmp order, as bsearch in library.c needs it: Python sorts ASCII names the same way.
    return "".join(
        f'{{"{function}", {branch}, {release}}},\n'
        for function, (branch, release) in sorted(history().items())
    )


def _fingerprint() -> str:
    inputs = [*_c_files(), *sorted(SOURCES.glob("*.h")), SOURCES / "history.txt", Path(__file__)]
    digest = hashlib.sha256()
    for path in inputs:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\n".join(functions()).encode())
    return digest.hexdigest()
