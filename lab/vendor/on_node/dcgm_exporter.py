#!/usr/bin/python3 -I
"""A stand-in for dcgm-exporter: the metrics that its CSV names, one series a GPU.

Runs on the node: standard library only, Python 3.8.  It takes the real program's options and
environment, and like the real one it asks a running host engine only when `-r` (or its variable)
is given; otherwise it is an engine of its own.  What it needs and cannot have ends it with a
non-zero exit code, at its start.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

VERSION = "@VERSION@"
ENGINE = "/usr/bin/nv-hostengine"
TIMEOUT = 10.0  # seconds for an answer of the engine
TYPES = ("gauge", "counter", "histogram", "summary", "untyped")
KNOWN = ("DCGM_FI_", "DCGM_EXP_")


class Counter(NamedTuple):
    """A line of the CSV; with the type "label" it is a label of every series."""

    field: str
    type: str
    help: str


class Exporter:
    """The counters, where their values come from, and the last page made of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.counters = read_counters(options.collectors)
        self.lock = threading.Lock()
        self.page = ""
        self.made = 0.0

    def metrics(self) -> str:
        """Return the page, collected anew when it is older than the interval; raise OSError."""
        with self.lock:
            if not self.page or time.monotonic() - self.made >= self.options.interval / 1000:
                self.page = self.render(self.readings())
                self.made = time.monotonic()
            return self.page

    def readings(self) -> dict[str, Any]:
        """Ask the engine."""
        answer = ask(self.options.remote) if self.options.remote is not None else ask_embedded()
        if "error" in answer:
            raise OSError(answer["error"])
        return answer

    def render(self, answer: dict[str, Any]) -> str:
        """Write the readings in Prometheus' text format."""
        gpus = [gpu for gpu in answer["gpus"] if self.wants(gpu["gpu"])]
        labels = {
            counter.field: answer["labels"].get(counter.field, "")
            for counter in self.counters
            if counter.type == "label"
        }
        lines = []
        for counter in self.counters:
            if counter.type == "label":
                continue
            lines.append(f"# HELP {counter.field} {counter.help}")
            lines.append(f"# TYPE {counter.field} {counter.type}")
            for gpu in gpus:
                value = self.value(gpu, counter.field)
                if value is not None:
                    series = {**self.identity(gpu), **labels}
                    lines.append(f"{counter.field}{{{written(series)}}} {value}")
        return "\n".join(lines) + "\n"

    def wants(self, index: int) -> bool:
        """Whether -d asks for this GPU: "f" and "g" are all, "g:0,2" are two."""
        _, colon, chosen = self.options.devices.partition(":")
        return not colon or str(index) in chosen.split(",")

    def value(self, gpu: dict[str, Any], field: str) -> float | None:
        """A blank reading has no series; a field that the engine does not simulate is 0."""
        values: dict[str, float | None] = gpu["values"]
        return values.get(field, 0.0)

    def identity(self, gpu: dict[str, Any]) -> dict[str, str]:
        """The labels of 4.8."""
        blank = "_" if self.options.replace_blanks else " "
        identity = {
            "gpu": str(gpu["gpu"]),
            "UUID": gpu["uuid"],
            "pci_bus_id": gpu["pci_bus_id"],
            "device": "nvidia{}".format(gpu["gpu"]),
            "modelName": gpu["name"].replace(" ", blank),
        }
        return identity if self.options.no_hostname else {**identity, "Hostname": hostname()}


def read_counters(path: str) -> list[Counter]:
    """Read the CSV of -f; end the program at its first mistake, as the real one does."""
    counters = []
    try:
        with open(path, newline="") as file:  # noqa: PTH123  # as plain as the node's Python
            rows = [row for row in csv.reader(file) if row and not row[0].startswith("#")]
    except OSError as error:
        sys.exit(f"could not read collectors file: {error}")
    for row in rows:
        cells = [cell.strip() for cell in row]
        if len(cells) != 3:
            sys.exit(f"malformed CSV record; failed to parse line {row}, expected 3 fields")
        if not cells[0].startswith(KNOWN):
            sys.exit(f"could not find DCGM field; field: {cells[0]}")
        if cells[1] not in (*TYPES, "label"):
            sys.exit(f"could not find Prometheus metric type {cells[1]}")
        counters.append(Counter(*cells))
    return counters


def ask(remote: str) -> dict[str, Any]:
    """Return the readings of the host engine at "host:port"; raise OSError."""
    host, _, port = remote.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT) as connection:
        connection.sendall(b"readings\n")
        line = connection.makefile().readline()
    if not line:
        raise OSError("the host engine hung up")
    answer: dict[str, Any] = json.loads(line)
    return answer


def ask_embedded() -> dict[str, Any]:
    """Return the readings of an engine of our own; raise OSError."""
    try:
        printed = subprocess.run(
            [ENGINE, "--readings"], check=True, stdout=subprocess.PIPE, timeout=TIMEOUT
        ).stdout
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error
    answer: dict[str, Any] = json.loads(printed)
    return answer


def written(labels: dict[str, str]) -> str:
    """Labels as Prometheus' text format has them, quoted."""
    pairs = []
    for name, value in labels.items():
        safe = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        pairs.append(f'{name}="{safe}"')
    return ",".join(pairs)


def hostname() -> str:
    """The node's name; NODE_NAME wins, as it does for the real one."""
    return os.environ.get("NODE_NAME") or socket.gethostname()


class Handler(BaseHTTPRequestHandler):
    """/metrics and /health."""

    exporter: Exporter

    def do_GET(self) -> None:
        """Answer one scrape."""
        try:
            page = self.exporter.metrics()
        except (OSError, ValueError) as error:
            self.answer(503 if self.path == "/health" else 500, f"KO: {error}\n")
            return
        if self.path == "/metrics":
            self.answer(200, page)
        elif self.path == "/health":
            self.answer(200, "OK")
        else:
            self.answer(404, "404 page not found\n")

    def answer(self, status: int, text: str) -> None:
        """Send a page of plain text."""
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """The real one logs no requests."""


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the real program's options; each has its variable, and a flag wins over it."""
    parser = argparse.ArgumentParser(prog="dcgm-exporter", allow_abbrev=False)

    def option(*flags: str, env: str, default: str | None, dest: str) -> None:
        value = os.environ.get(env) or default
        parser.add_argument(*flags, dest=dest, default=value)

    def switch(*flags: str, env: str, dest: str) -> None:
        value = os.environ.get(env, "").lower() in ("1", "t", "true")
        parser.add_argument(*flags, dest=dest, action="store_true", default=value)

    counters = "/etc/dcgm-exporter/default-counters.csv"
    option(
        "-f", "--collectors", env="DCGM_EXPORTER_COLLECTORS", default=counters, dest="collectors"
    )
    option("-a", "--address", env="DCGM_EXPORTER_LISTEN", default=":9400", dest="address")
    option(
        "-c", "--collect-interval", env="DCGM_EXPORTER_INTERVAL", default="30000", dest="interval"
    )
    option(
        "-r",
        "--remote-hostengine-info",
        env="DCGM_REMOTE_HOSTENGINE_INFO",
        default=None,  # "localhost:5555" is printed as the default, and not used unless given
        dest="remote",
    )
    option("-d", "--devices", env="DCGM_EXPORTER_DEVICES_STR", default="f", dest="devices")
    option("--web-config-file", env="DCGM_EXPORTER_WEB_CONFIG_FILE", default="", dest="web_config")
    switch("--no-hostname", env="DCGM_EXPORTER_NO_HOSTNAME", dest="no_hostname")
    switch(
        "--replace-blanks-in-model-name",
        env="DCGM_EXPORTER_REPLACE_BLANKS_IN_MODEL_NAME",
        dest="replace_blanks",
    )
    # Accepted, without a meaning here
    option("-s", "--switch-devices", env="", default="f", dest="switches")
    option("-p", "--cpu-devices", env="", default="f", dest="cpus")
    option("-x", "--xid-count-window-size", env="", default="300000", dest="xid_window")
    option("--clock-events-count-window-size", env="", default="300000", dest="clock_window")
    option("--hpc-job-mapping-dir", env="DCGM_HPC_JOB_MAPPING_DIR", default="", dest="jobs")
    option("--dcgm-log-level", env="DCGM_EXPORTER_DCGM_LOG_LEVEL", default="NONE", dest="level")
    option("--log-format", env="DCGM_EXPORTER_LOG_FORMAT", default="text", dest="format")
    switch("--enable-dcgm-log", env="DCGM_EXPORTER_ENABLE_DCGM_LOG", dest="dcgm_log")
    switch("--enable-gpu-bind-unbind-watch", env="", dest="watch")
    switch("--disable-startup-validate", env="", dest="unvalidated")
    switch("--debug", env="DCGM_EXPORTER_DEBUG", dest="debug")
    parser.add_argument(
        "-v", "--version", action="version", version="DCGM Exporter version " + VERSION
    )
    options = parser.parse_args(argv)
    try:
        options.interval = int(options.interval)
    except ValueError:
        sys.exit(f"invalid value {options.interval!r} for the collect interval")
    if options.web_config:
        sys.exit("--web-config-file: the lab's stand-in has neither TLS nor passwords")
    return options


def listen_on(address: str) -> tuple[str, int]:
    """Split "host:port"; no host is every address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def main() -> None:
    """Collect once, so that what is missing is known now; then serve until terminated."""
    options = arguments(sys.argv[1:])
    exporter = Exporter(options)
    try:
        exporter.metrics()
    except (OSError, ValueError) as error:
        sys.exit(f"failed to initialize DCGM: {error}")
    Handler.exporter = exporter
    server = ThreadingHTTPServer(listen_on(options.address), Handler)
    server.daemon_threads = True
    sys.stdout.write(f"Starting webserver on {options.address}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
