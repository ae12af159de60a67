"""RUNS ON THE NODE: watch the progress of the node's vLLM servers, and act as configured.

    gpufleet-watchdog [CONFIGURATION]        by default /etc/gpufleet/watchdog.json

The configuration (roles/watchdog.py) is {"schema": 1, "listen": null or {"address", "port"},
"stages": [{...}]}. The watchdog answers gateways at `listen` (agent.py). If `listen` is null, no
gateway asks. Each stage has these keys:
  stage, unit   names of the stage and its unit, for example llama-0 and vllm-llama-0.service
  mode          off | warn | act
  seconds       time without any progress after which a server counts as stalled
  idle_seconds  interval of the requests for one token to an idle engine; 0: no such requests
  servers       ["http://127.0.0.1:8000", ...]; empty if this rank has no server
  served_name   the model's name in requests
  key_file      the path of the API key on this node; null if there is no key
  group, rank   whether the stage is a rank of a multi-node replica, and its rank
  pins          whether the stage's release honours X-data-parallel-rank
  py_spy        paths where py-spy may be
The watchdog writes its metrics to /var/lib/gpufleet/textfile/watchdog.prom, for the node exporter,
and its state to its state directory. Both are written atomically.

The program needs only Python 3.8 and the standard library. It has one thread, and nothing in its
loop blocks. It notices when it was paused.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, Iterator

from gpufleet.on_node.common import linux_facts, textfile
from gpufleet.on_node.common.http import Exchange
from gpufleet.on_node.watchdog.agent import Agent
from gpufleet.on_node.watchdog.stage_watch import Stage

CONFIGURATION = "/etc/gpufleet/watchdog.json"
STATE = "/var/lib/gpufleet/watchdog/state.json"
METRICS = "watchdog.prom"
PREFIX = "gpufleet_watchdog_"

TURN_SECONDS = 1.0
WRITE_SECONDS = 15.0
"""Seconds between two writes of the metrics if nothing has changed."""
LINE_BYTES = 4096
STDERR = 2


class Watchdog:
    """The watchdog's loop, with its metrics and state files."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        self.stages = [Stage(about, self.say) for about in configuration["stages"]]
        self._watched = [each for each in self.stages if each.about["mode"] != "off"]
        listen = configuration.get("listen")
        self.agent = (
            Agent(listen["address"], listen["port"], self.word, self.say) if listen else None
        )
        self._wrote: tuple[str, str] = ("", "")
        self._next_write = 0.0
        self._next_turn = 0.0
        self._told = ""
        self.over = False
        before = self._before()
        for stage in self.stages:
            if stage.name in before:
                with contextlib.suppress(TypeError, ValueError):  # a file of another release
                    stage.remember(before[stage.name])

    def run(self) -> None:
        """Watch the stages until the watchdog is stopped."""
        notify("READY=1")
        while not self.over:
            self.step()

    def step(self) -> None:
        """Wait for the next event, for at most one second, and handle the event."""
        self._exchange()
        now = time.monotonic()
        if now >= self._next_turn:
            self._next_turn = now + TURN_SECONDS
            for stage in self._watched:
                stage.turn(now)
            if self.agent is not None:
                self.agent.turn(now)
            self._write(now)
            notify("WATCHDOG=1")

    def word(self, name: str) -> str:
        """Return the answer to the gateway about a stage, or "" if its state is unknown."""
        stage = next((each for each in self._watched if each.name == name), None)
        return "" if stage is None else stage.word(time.monotonic())

    def _exchange(self) -> None:
        waiting: list[Exchange] = [
            exchange
            for stage in self._watched
            for exchange in stage.exchanges()
            if exchange.answer is None
        ]
        # Not `select`, because file descriptors may be above 1024.
        poll = select.poll()
        for exchange in waiting:
            poll.register(exchange, select.POLLOUT if exchange.wants_write else select.POLLIN)
        for descriptor in self.agent.descriptors() if self.agent is not None else ():
            poll.register(descriptor, select.POLLIN)
        wait = max(0.0, self._next_turn - time.monotonic())
        with contextlib.suppress(InterruptedError):
            ready = {descriptor for descriptor, _ in poll.poll(wait * 1000)}
            now = time.monotonic()
            for exchange in waiting:
                if exchange.fileno() in ready or now >= exchange.deadline:
                    exchange.advance(now)
            if self.agent is not None:
                self.agent.advance(ready, now)

    def _write(self, now: float) -> None:
        document = {each.name: each.document() for each in self.stages}
        state = json.dumps({"schema": 1, "stages": document}, sort_keys=True)
        said = "".join("%s%d%d%d" % (e.name, e.stalled, e.stalls, e.restarts) for e in self.stages)
        changed = (state, said) != self._wrote
        if not changed and now < self._next_write:
            return
        self._wrote, self._next_write = (state, said), now + WRITE_SECONDS
        try:
            textfile.write(
                METRICS, textfile.text(samples(self.stages, time.time())), linux_facts.ROOT
            )
            if changed:
                replace(linux_facts.ROOT + STATE, state)
            self._told = ""
        except OSError as error:
            if str(error) != self._told:
                self._told = str(error)
                self.say("cannot write: %s" % error, 3)

    def _before(self) -> dict[str, Any]:
        try:
            with open(linux_facts.ROOT + STATE, encoding="utf-8") as file:
                document = json.loads(file.read(1 << 20))
            found = document["stages"] if document["schema"] == 1 else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return found if isinstance(found, dict) else {}

    def say(self, text: str, level: int) -> None:
        """Log a line with syslog's `level`. If the journal's pipe is full, the line is lost."""
        with contextlib.suppress(OSError):
            if select.select([], [STDERR], [], 0)[1]:
                line = "<%d>%s" % (level, text.replace("\n", " "))
                os.write(STDERR, line.encode(errors="replace")[: LINE_BYTES - 1] + b"\n")


def samples(stages: list[Stage], now: float) -> Iterator[textfile.Sample]:
    """Yield the samples for the node exporter (described in metric_families.py)."""
    yield PREFIX + "timestamp_seconds", {}, int(now)
    for each in stages:
        labels = {"stage": each.name}
        yield PREFIX + "mode_info", {**labels, "mode": each.about["mode"]}, 1
        if each.about["mode"] == "off":
            continue
        yield PREFIX + "stalled", labels, int(each.stalled)
        yield PREFIX + "idle_seconds", labels, round(each.idle, 1)
        yield PREFIX + "stalls_total", labels, each.stalls
        yield PREFIX + "restarts_total", labels, each.restarts


def replace(path: str, text: str) -> None:
    """
    Write a file that only root can read. Readers see either the whole old or the whole new file.
    """
    temporary = path + ".tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    os.rename(temporary, path)


def notify(text: str) -> None:
    """Notify systemd if the unit has a notify socket."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    with contextlib.suppress(OSError), line:
        line.sendto(text.encode(), "\0" + address[1:] if address[0] == "@" else address)


def main(argv: list[str]) -> int:
    """Watch the stages until the watchdog is stopped; return the exit status."""
    path = argv[0] if argv else CONFIGURATION
    try:
        with open(path, encoding="utf-8") as file:
            configuration = json.load(file)
    except (OSError, ValueError) as error:
        print("gpufleet-watchdog: %s: %s" % (path, error), file=sys.stderr)
        return 2
    if configuration.get("schema") != 1:
        print("gpufleet-watchdog: %s is from another release" % path, file=sys.stderr)
        return 2
    watchdog = Watchdog(configuration)

    def stop(*_: Any) -> None:
        watchdog.over = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    watchdog.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
