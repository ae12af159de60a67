"""DCGM's stand-ins as they run on lab nodes, as processes of this machine over simulated GPUs."""

from __future__ import annotations

import base64
import os
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from gpufleet.monitoring import dcgm_counters
from lab import machine
from lab.faults import find_fault
from lab.machine import Machine
from lab.vendor.templates import program
from tests.support.checkout import ROOT

ON_NODE = ROOT / "lab/vendor/on_node"
INTERVAL = 0.2  # seconds from one reading to the next
SOON = 45.0  # seconds until something must have been seen, on a machine that is busy with all else

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Node:
    """A simulated machine with a host engine and an exporter, and where the exporter listens."""

    healthy: Machine
    profile: Path
    address: str
    engine: subprocess.Popen[bytes]
    exporter: subprocess.Popen[bytes]
    scheme: str = "http"

    def breaks(self, *faults: tuple[str, int], lines: str = "") -> None:
        """Let the machine have these faults and no others: (name, GPU); and lines of a profile."""
        text = machine.profile_text(with_faults(self.healthy, faults))
        write(self.profile, f"{text}\n{lines}\n")

    def get(
        self,
        path: str = "/metrics",
        *,
        trust: Path | None = None,
        login: str = "",
        timeout: float = SOON,
    ) -> str:
        """Return what the exporter answers; raises OSError, its kind of HTTPError too."""
        request = urllib.request.Request(f"{self.scheme}://{self.address}{path}")
        if login:
            word = base64.b64encode(login.encode()).decode()
            request.add_header("Authorization", f"Basic {word}")
        context = ssl.create_default_context(cafile=str(trust)) if trust else None
        with urllib.request.urlopen(request, timeout=timeout, context=context) as answer:
            text: str = answer.read().decode()
        return text

    def series(self) -> Series:
        """Return every series by its name and its labels, without those that name the machine."""
        return parsed(self.get())

    def values(self, name: str, **labels: str) -> dict[str, float]:
        """Return the values of a metric by GPU: of those series that have these labels."""
        wanted = set(labels.items())
        return {
            dict(found)["gpu"]: value
            for (metric, found), value in self.series().items()
            if metric == name and wanted <= found
        }

    def until(self, holds: Callable[[], object], seconds: float = SOON) -> None:
        """Wait until something holds; raises AssertionError with the last page if it does not."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, self.get()
            time.sleep(INTERVAL)


def with_faults(healthy: Machine, faults: tuple[tuple[str, int], ...]) -> Machine:
    """Return a machine with faults on it: (name, GPU)."""
    for name, gpu in faults:
        healthy = find_fault(name).on(healthy, gpu)
    return healthy


def parsed(text: str) -> Series:
    """Read a page as Prometheus' own client does."""
    drop = {"pci_bus_id", "device", "modelName", "model_name", "Hostname", "hostname"}
    # The client writes counters' names with a suffix that DCGM's have not.
    return {
        (
            sample.name.removesuffix("_total"),
            frozenset((k, v) for k, v in sample.labels.items() if k not in drop),
        ): (sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@contextmanager
def node(
    directory: Path,
    library: Path,
    profile: str,
    *options: str,
    scheme: str = "http",
    csv: bytes | None = None,
    python: str = sys.executable,
    remote: bool = True,
    broken: tuple[tuple[str, int], ...] = (),
) -> Iterator[Node]:
    """
    Run engine and exporter for a profile; the exporter has `options` beside those it needs.

    `broken` are faults that are there before either starts.
    """
    healthy = machine.of(profile)
    conf = directory / "nvml.conf"
    write(conf, machine.profile_text(with_faults(healthy, broken)))
    asked = directory / "counters.csv"
    asked.write_bytes(dcgm_counters.counters(profiling=True) if csv is None else csv)
    environment = environment_of(library, conf)
    engine_port, port = free_port(), free_port()
    engine_program, exporter_program = installed(directory)
    to_engine = ["-r", f"127.0.0.1:{engine_port}"] if remote else []
    with ExitStack() as running:

        def run(*command: object) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [python, "-I", *map(str, command)], env=environment, stdout=subprocess.DEVNULL
            )
            running.callback(process.wait)
            running.callback(process.kill)
            return process

        engine = run(engine_program, "-n", "-p", engine_port)
        answers(engine, engine_port)
        exporter = run(
            exporter_program, *to_engine, "-f", asked, "-a", f"127.0.0.1:{port}",
            "-c", int(INTERVAL * 1000), *options,
        )  # fmt: skip
        answers(exporter, port)
        yield Node(healthy, conf, f"127.0.0.1:{port}", engine, exporter, scheme)


def installed(directory: Path) -> tuple[Path, Path]:
    """Write both programs as their packages bring them; return where."""
    engine, exporter = directory / "nv-hostengine", directory / "dcgm-exporter"
    values = {"ENGINE": str(engine), "FIELDS": str(ON_NODE / "dcgm-fields.txt")}
    for path, name in ((engine, "nv_hostengine.py"), (exporter, "dcgm_exporter.py")):
        content = program(name, VERSION="4.5.3", **values).content
        path.write_text(content if isinstance(content, str) else content.decode())
        path.chmod(0o755)
    return engine, exporter


def environment_of(library: Path, profile: Path) -> Mapping[str, str]:
    """Return what programs need to meet this simulated NVML."""
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(library.parent),
        "GPUFLEET_NVML_PROFILE": str(profile),
    }


def write(path: Path, text: str) -> None:
    """Write a file in one step: it is being read."""
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.rename(path)


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def answers(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until a process listens; raises AssertionError when it ends instead."""
    end = time.monotonic() + SOON
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert process.poll() is None, f"it ended with {process.returncode}"
            assert time.monotonic() < end, "it does not listen"
            time.sleep(0.05)
        else:
            return
