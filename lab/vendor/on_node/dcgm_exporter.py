#!/usr/bin/python3 -I
"""A stand-in for dcgm-exporter: the metrics that its CSV names, one series a GPU or an NVLink.

Runs on the node: standard library only, Python 3.8.  It takes the real program's options and
environment, and like the real one it asks a running host engine only when `-r` (or its variable)
is given; otherwise it runs an engine of its own.  What it needs and cannot have ends it with a
non-zero exit code, at its start; an engine that goes away ends it as well.

What it does as the real one does was read in the sources of dcgm-exporter 4.5.3-4.8.2
(internal/pkg/collector, internal/pkg/counters, internal/pkg/rendermetrics), never tried with it:

* A blank value has no series, and a metric without series has neither HELP nor TYPE.  A field that
  the engine does not simulate is blank.
* Profiling fields are left out with a warning: the engine does not say that it has them.
* The Xid gauge carries its value in labels, too; without any Xid so far there is none.
* DCGM_EXP_XID_ERRORS_COUNT and DCGM_EXP_CLOCK_EVENTS_COUNT count what was seen in a window.  A GPU
  of which nothing was seen has one series without the label, and its value is 0.
"""

from __future__ import annotations

import argparse
import base64
import csv
import ctypes
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections import Counter as Tally
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

VERSION = "@VERSION@"
ENGINE = "@ENGINE@"
FIELDS = "@FIELDS@"  # the names that the real one knows
TIMEOUT = 60.0  # seconds for an answer of the engine, DCGM's limit for a request
TYPES = ("gauge", "counter", "histogram", "summary", "untyped")

XIDS = "DCGM_EXP_XID_ERRORS_COUNT"
CLOCKS = "DCGM_EXP_CLOCK_EVENTS_COUNT"
OWN = (XIDS, CLOCKS, "DCGM_EXP_GPU_HEALTH_STATUS", "DCGM_EXP_P2P_STATUS")
LAST_XID = "DCGM_FI_DEV_XID_ERRORS"
PROFILING = "DCGM_FI_PROF_"

# Bits of NVML's reasons as DCGM's exporter names them (clock_events_collector.go)
CLOCK_EVENTS = {
    0x1: "gpu_idle",
    0x2: "clocks_setting",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}

# A few of its texts (xid_errors.go); it has one for each, and this for what it does not know.
XID_TEXTS = {31: "GPU memory page fault", 79: "GPU has fallen off the bus"}
UNKNOWN_XID = "Unknown Error"


class Counter(NamedTuple):
    """A line of the CSV; a line of type "label" is a label of every series."""

    field: str
    type: str
    help: str


class Exporter:
    """The counters, and the source of their values."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.counters = read_counters(options.collectors)
        self.engine = Remote(options.remote) if options.remote is not None else Embedded()

    def metrics(self) -> str:
        """Return a page of the engine's values. Raises `OSError`."""
        windows = (self.options.xid_window, self.options.clock_window)
        question = " ".join(map(str, ("watch", self.options.interval, *windows)))
        answer = self.engine.ask(question)
        if "error" in answer:
            raise OSError(answer["error"])
        return self.render(answer)

    def render(self, answer: dict[str, Any]) -> str:
        """Return the readings in Prometheus' text format."""
        gpus = [gpu for gpu in answer["gpus"] if self.wants(gpu["gpu"])]
        lines = []
        for counter in self.counters:
            series = [one for gpu in gpus for one in self.series(counter, gpu, answer["labels"])]
            if counter.type != "label" and series:
                lines.append(f"# HELP {counter.field} {counter.help}")
                lines.append(f"# TYPE {counter.field} {counter.type}")
                lines += [f"{counter.field}{{{written(labels)}}} {n}" for labels, n in series]
        return "\n".join(lines) + "\n"

    def series(
        self, counter: Counter, gpu: dict[str, Any], texts: dict[str, str]
    ) -> list[tuple[dict[str, str], str]]:
        """Return a metric's series for one GPU as labels and value."""
        own = {**self.identity(gpu), **self.labels(gpu, texts)}
        if counter.field == XIDS:
            window = {**own, "window_size_in_ms": str(self.options.xid_window)}
            return counted(window, "xid", [str(xid) for xid in gpu["xids"]], seen=gpu["xids"])
        if counter.field == CLOCKS:
            window = {**own, "window_size_in_ms": str(self.options.clock_window)}
            return counted(window, "clock_event", clock_events(gpu), seen=gpu["reasons"])
        if counter.field in gpu["links"]:
            links = gpu["links"][counter.field].items()
            return [(self.identity_of_link(gpu, link), str(value)) for link, value in links]
        value = gpu["values"].get(counter.field)
        if value is None:
            return []
        if counter.field == LAST_XID:
            own["err_code"] = str(value)
            own["err_msg"] = XID_TEXTS.get(value, UNKNOWN_XID)
        return [(own, f"{value:f}" if isinstance(value, float) else str(value))]

    def wants(self, index: int) -> bool:
        """Return whether -d includes this GPU; "f" and "g" are all GPUs, "g:0,2" two."""
        _, colon, chosen = self.options.devices.partition(":")
        return not colon or str(index) in chosen.split(",")

    def labels(self, gpu: dict[str, Any], texts: dict[str, str]) -> dict[str, str]:
        """Return the labels that the CSV requests."""
        wanted = [counter.field for counter in self.counters if counter.type == "label"]
        return {name: {**texts, **gpu["texts"]}.get(name, "") for name in wanted}

    def identity(self, gpu: dict[str, Any]) -> dict[str, str]:
        """Return the identity labels of release 4.8."""
        blank = "-" if self.options.replace_blanks else " "
        identity = {
            "gpu": str(gpu["gpu"]),
            "UUID": gpu["uuid"],
            "pci_bus_id": gpu["pci_bus_id"],
            "device": "nvidia{}".format(gpu["gpu"]),
            "modelName": gpu["name"].replace(" ", blank),
        }
        return identity if self.options.no_hostname else {**identity, "Hostname": hostname()}

    def identity_of_link(self, gpu: dict[str, Any], link: str) -> dict[str, str]:
        """Return the labels of an NVLink, three of which have names other than a GPU's."""
        identity = {
            "nvlink": link,
            "gpu": str(gpu["gpu"]),
            "gpu_uuid": gpu["uuid"],
            "pci_bus_id": gpu["pci_bus_id"],
            "device": "nvidia{}".format(gpu["gpu"]),
            "model_name": gpu["name"],
        }
        return identity if self.options.no_hostname else {**identity, "hostname": hostname()}


def counted(
    labels: dict[str, str], label: str, found: list[str], seen: list[int]
) -> list[tuple[dict[str, str], str]]:
    """Count the found names, or return 0 if no sample was seen."""
    if not seen:
        return [(labels, "0")]
    return [({**labels, label: name}, str(n)) for name, n in sorted(Tally(found).items())]


def clock_events(gpu: dict[str, Any]) -> list[str]:
    """Return the name of each reason in each sample."""
    samples = gpu["reasons"]
    return [name for sample in samples for bit, name in CLOCK_EVENTS.items() if sample & bit]


def read_counters(path: str) -> list[Counter]:
    """Read the CSV of -f; end the program at its first mistake, like the real one."""
    with open(FIELDS) as file:  # noqa: PTH123  # as plain as the node's Python
        known = {line.strip() for line in file}
    try:
        with open(path, newline="") as file:  # noqa: PTH123
            rows = [row for row in csv.reader(file) if row and not row[0].startswith("#")]
    except OSError as error:
        sys.exit(f"could not read collectors file: {error}")
    counters = []
    for number, row in enumerate(rows):
        cells = [cell.strip() for cell in row]
        if len(cells) != 3:
            sys.exit(f"malformed CSV record; failed to parse line {row}, expected 3 fields")
        if cells[0] not in known and cells[0] not in OWN:
            sys.exit(f"could not find DCGM field; err: unknown ExporterCounter field '{cells[0]}'")
        if cells[0].startswith(PROFILING):
            say(f"Skipping line {number} ('{cells[0]}'): metric not enabled")
            continue
        if cells[1] not in (*TYPES, "label"):
            sys.exit(f"could not find Prometheus metric type '{cells[1]}'")
        counters.append(Counter(*cells))
    return counters


# ---- the engine ----------------------------------------------------------------------------------


class Remote:
    """The host engine at "host:port", without which the program ends."""

    def __init__(self, address: str) -> None:
        """Connect to the engine. Raises `OSError`."""
        host, _, port = address.rpartition(":")
        self.connection = socket.create_connection((host, int(port)), timeout=TIMEOUT)
        self.answers = self.connection.makefile()
        self.lock = threading.Lock()

    def ask(self, question: str) -> dict[str, Any]:
        """Return the engine's answer. Raises `OSError`."""
        with self.lock:
            try:
                self.connection.sendall(question.encode() + b"\n")
                line = self.answers.readline()
            except ConnectionError:
                line = ""
        if not line:
            give_up("Could not retrieve metrics: the host engine's connection is not valid")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Embedded:
    """An embedded engine."""

    def __init__(self) -> None:
        """Start the engine. Raises `OSError`."""
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([ENGINE, "--embedded"], stdin=pipe, stdout=pipe)
        self.lock = threading.Lock()

    def ask(self, question: str) -> dict[str, Any]:
        """Return the engine's answer, skipping its log. Raises `OSError`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self.lock:
            try:
                self.process.stdin.write(question.encode() + b"\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                give_up("Could not retrieve metrics: the embedded engine has ended")
            for line in self.process.stdout:
                if line.startswith(b"{"):
                    answer: dict[str, Any] = json.loads(line)
                    return answer
        give_up("Could not retrieve metrics: the embedded engine has ended")
        return {}


def give_up(reason: str) -> None:
    """End the program from any thread."""
    say(reason)
    os._exit(1)


def say(text: str) -> None:
    """Write a line to standard output, which systemd reads."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def written(labels: dict[str, str]) -> str:
    """Return labels in Prometheus' text format, quoted."""
    pairs = []
    for name, value in labels.items():
        safe = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        pairs.append(f'{name}="{safe}"')
    return ",".join(pairs)


def hostname() -> str:
    """Return the node's name; NODE_NAME has precedence, like in the real one."""
    return os.environ.get("NODE_NAME") or socket.gethostname()


# ---- the web server ------------------------------------------------------------------------------

# What of exporter-toolkit's file this program understands (docs/web-configuration.md of it).  All
# else is refused: a wish that is not fulfilled must not go unnoticed.
WEB_KEYS = {
    "tls_server_config": ("cert_file", "key_file", "min_version"),
    "http_server_config": ("http2",),
    "basic_auth_users": None,  # any name
}
TLS_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}


class WebConfig:
    """The file of --web-config-file, read at each use, like in exporter-toolkit."""

    def __init__(self, path: str) -> None:
        """Set the path; an empty path means neither TLS nor passwords."""
        self.path = path
        self.verified: dict[tuple[str, str, str], bool] = {}
        self.crypting = threading.Lock()

    def read(self) -> dict[str, dict[str, str]]:
        """Return the sections. Raises `ValueError` for an invalid file, and `OSError`."""
        if not self.path:
            return {}
        with open(self.path) as file:  # noqa: PTH123
            return web_config(file.read())

    def check(self) -> None:
        """Raise `ValueError` or `OSError` if the configuration is unusable."""
        self.tls()
        for user, wanted in self.read().get("basic_auth_users", {}).items():
            if not wanted.startswith(("$2a$", "$2b$", "$2y$")):
                raise ValueError(f"basic_auth_users: the password of {user!r} is no bcrypt hash")

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context of connections, or None without TLS."""
        section = self.read().get("tls_server_config")
        if section is None:
            return None
        for key in ("cert_file", "key_file"):
            if not section.get(key):
                raise ValueError(f"tls_server_config: missing {key}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        version = section.get("min_version", "TLS12")
        if version not in TLS_VERSIONS:
            raise ValueError(f"tls_server_config: unknown TLS version: {version}")
        context.minimum_version = TLS_VERSIONS[version]
        context.load_cert_chain(self.at(section["cert_file"]), self.at(section["key_file"]))
        return context

    def at(self, path: str) -> str:
        """Return a path in the file, which is relative to the file."""
        return str(Path(self.path).resolve().parent / path)

    def lets_in(self, authorization: str) -> bool:
        """Return whether a header has a valid user and password, or none is needed."""
        users = self.read().get("basic_auth_users")
        if not users:
            return True
        kind, _, encoded = authorization.partition(" ")
        try:
            user, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except ValueError:
            return False
        if kind.lower() != "basic" or user not in users:
            return False
        asked = (user, password, users[user])
        with self.crypting:  # crypt(3) writes into one place for all threads
            if asked not in self.verified:
                self.verified[asked] = crypted(password, users[user]) == users[user]
            return self.verified[asked]


def crypted(password: str, settings: str) -> str:
    """Return crypt(3)'s hash of a password; the settings are from a hash."""
    library = ctypes.CDLL("libcrypt.so.1")
    library.crypt.restype = ctypes.c_char_p
    made = library.crypt(password.encode(), settings.encode())
    return made.decode() if made else ""


def web_config(text: str) -> dict[str, dict[str, str]]:
    """
    Read sections of "key: value" lines: the part of YAML that such files need.

    >>> web_config("tls_server_config:\\n  cert_file: a.crt\\n")
    {'tls_server_config': {'cert_file': 'a.crt'}}

    Raises ValueError, with the line's number, for everything else.
    """
    sections: dict[str, dict[str, str]] = {}
    section: dict[str, str] | None = None
    known: tuple[str, ...] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if not bare or bare.startswith("#") or bare == "---":
            continue
        name, colon, rest = bare.partition(":")
        value, key = unquoted(rest.strip()), unquoted(name.strip())
        if not colon or value is None or not key or bare.startswith(("-", "{", "[")):
            raise ValueError(f'line {number}: expected "key: value", found {bare!r}')
        if line[0] not in " \t":
            if key not in WEB_KEYS or value:
                raise ValueError(f"line {number}: field {key} not found")
            section, known = sections.setdefault(key, {}), WEB_KEYS[key]
        elif section is None or line[0] == "\t":
            raise ValueError(f"line {number}: {bare!r} is in no section")
        elif known is not None and key not in known:
            raise ValueError(f"line {number}: field {key} not found")
        else:
            section[key] = value
    return sections


def unquoted(value: str) -> str | None:
    """Return a value without quotes and comment, or None if quotes are not closed."""
    if value[:1] in ("'", '"'):
        end = value.find(value[0], 1)
        after = value[end + 1 :].strip()
        return value[1:end] if end > 0 and (not after or after.startswith("#")) else None
    return value.partition(" #")[0].strip()


class Handler(BaseHTTPRequestHandler):
    """Handler of /metrics and /health."""

    exporter: Exporter
    web: WebConfig

    def setup(self) -> None:
        """Encrypt the connection if TLS is configured."""
        context = self.web.tls()
        if context is not None:
            self.request.settimeout(TIMEOUT)
            self.request = context.wrap_socket(self.request, server_side=True)
        super().setup()

    def do_GET(self) -> None:
        """Answer one scrape."""
        if not self.web.lets_in(self.headers.get("Authorization", "")):
            self.answer(401, "Unauthorized\n", {"WWW-Authenticate": "Basic"})
            return
        if self.path not in ("/metrics", "/health"):
            self.answer(404, "404 page not found\n")
            return
        try:
            page = self.exporter.metrics()
        except (OSError, ValueError) as error:
            say(f"Failed to gather metrics from collectors: {error}")
            self.answer(503 if self.path == "/health" else 500, f"KO: {error}\n")
            return
        self.answer(200, page if self.path == "/metrics" else "OK")

    def answer(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        """Send a page of plain text."""
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do nothing, because the real one logs no requests."""


class Server(ThreadingHTTPServer):
    """HTTP server with a thread for each connection."""

    daemon_threads = True

    def handle_error(self, _request: object, _address: object) -> None:
        """Log in one line why a connection failed, for example in its handshake."""
        say(f"http: {sys.exc_info()[1]}")


def arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the real program's options; a flag has precedence over its variable."""
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
    option("-x", "--xid-count-window-size", env="", default="300000", dest="xid_window")
    option("--clock-events-count-window-size", env="", default="300000", dest="clock_window")
    # Accepted, without a meaning here
    option("-s", "--switch-devices", env="", default="f", dest="switches")
    option("-p", "--cpu-devices", env="", default="f", dest="cpus")
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
    for name in ("interval", "xid_window", "clock_window"):
        value = getattr(options, name)
        try:
            setattr(options, name, int(value))
        except ValueError:
            sys.exit(f"invalid value {value!r}: expected milliseconds")
    return options


def listen_on(address: str) -> tuple[str, int]:
    """Split "host:port"; an empty host means every address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def main() -> None:
    """
    Collect once, so that missing parts are detected at the start; then serve until terminated.
    """
    options = arguments(sys.argv[1:])
    web = WebConfig(options.web_config)
    try:
        web.check()
    except (OSError, ValueError) as error:
        sys.exit(f"Failed to Listen and Server HTTP server: {options.web_config}: {error}")
    try:
        exporter = Exporter(options)
        exporter.metrics()
    except (OSError, ValueError) as error:
        sys.exit(f"failed to initialize DCGM: {error}")
    Handler.exporter, Handler.web = exporter, web
    server = Server(listen_on(options.address), Handler)
    say(f"Starting webserver on {options.address}")
    server.serve_forever()


if __name__ == "__main__":
    main()
