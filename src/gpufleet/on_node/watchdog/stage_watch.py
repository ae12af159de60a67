"""RUNS ON THE NODE: watch the servers of one stage, and act if they are stalled.

The watchdog acts in steps. Each step has a time limit, and no step blocks:
  check   ask systemd whether the unit still runs, was not restarted and is not being stopped. In a
          multi-node replica, also check whether the group runs. If not, this is not a stall
  warn    log and count the stall. In mode `warn` this is the last step
  dump    let a separate process record the state of the unit's processes
  hold    in a multi-node replica, let the ranks other than rank 0 wait. Rank 0 acts first, and the
          other ranks end when rank 0 ends
  again   repeat the check, because a dump takes time. A server that makes progress is not killed
  kill    send SIGKILL to the whole unit. A normal stop would drain first, and on a frozen server a
          drain never ends
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import Any, Callable, Optional

from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.common.http import Exchange
from gpufleet.on_node.common.systemctl import properties
from gpufleet.on_node.serving import questions
from gpufleet.on_node.watchdog import dump, verdict
from gpufleet.on_node.watchdog.programs import Fork, Program
from gpufleet.on_node.watchdog.verdict import Sample, State, Verdict

LOOK_SECONDS = 3.0
"""Seconds between two reads of /metrics."""
CHECK_SECONDS = 10.0
CHECK_AGAIN_SECONDS = 15.0
"""Seconds to wait before the next check, if a suspected stall was not confirmed."""
KILL_SECONDS = 10.0
GONE_SECONDS = 30.0
"""Seconds after a kill until the processes that still exist are reported."""
# By then, rank 0 has written its dump (30 s) and killed, and its group has ended (16 s, decision
# 10).
HOLD_SECONDS = 50.0
RESTARTS = 3
WINDOW_SECONDS = 3600
"""
Period in seconds in which a stage is killed at most RESTARTS times, because more kills do not help.
"""
PROPERTIES = ("ActiveState", "SubState", "InvocationID", "Job", "ControlGroup")
RECALL_SECONDS = 10.0
"""A stall is found within `seconds + 2 * idle_seconds` and this margin in seconds."""
STATE_BYTES = 1 << 20
DUMPS = "/var/lib/gpufleet/dumps"
LIVES = "/run/systemd/units/invocation:"


class Server:
    """One server of a stage. vLLM has one server for each node, or one for each engine."""

    def __init__(self, url: str, about: dict[str, Any]) -> None:
        self.url = url
        self.about = about
        self.state = State()
        self.verdict = Verdict("down")
        self.text = b""
        """The last answer of /metrics."""
        self.problem = ""
        """The reason why no request for one token can be sent to the server, or ""."""
        self.looking: Optional[Exchange] = None
        self.asking: dict[str, Exchange] = {}
        self._next_look = 0.0

    def exchanges(self) -> list[Exchange]:
        """Return the open requests."""
        return [*([self.looking] if self.looking else []), *self.asking.values()]

    def turn(self, life: str, now: float) -> None:
        """Read the server's answers, judge its state, and send the next requests."""
        if life != self.state.life or not 0 <= now - self.state.seen <= verdict.PAUSE_SECONDS:
            self.drop()
        answered, withdrawn = self._canaries()
        engines = self._looked()
        asked = self._ask(now) if life and life == self.state.life else ()
        self.state, self.verdict = verdict.observe(
            self.state,
            Sample(life, engines, asked, answered, withdrawn),
            now,
            self.about["seconds"],
            pinned=self.about["pins"],
        )
        if life and self.looking is None and now >= self._next_look:
            self._next_look = now + min(LOOK_SECONDS, self.about["seconds"] / 4)
            # The deadline is long, because a busy server answers late but is not frozen.
            patience = max(5.0, self.about["seconds"] / 2)
            self.looking = self._begin("/metrics", now + patience)

    def drop(self) -> None:
        """Close the open requests."""
        for each in self.exchanges():
            each.close()
        self.looking, self.asking = None, {}

    def _looked(self) -> Any:
        if self.looking is None or self.looking.answer is None:
            return None
        answer, self.looking = self.looking.answer, None
        if answer.status != 200:
            return None
        self.text = answer.body
        return verdict.engines(answer.body.decode("utf-8", "replace"), self.about["progress"])

    def _canaries(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        answered, withdrawn = [], []
        for engine, exchange in list(self.asking.items()):
            answer = exchange.answer
            if answer is None:
                continue
            del self.asking[engine]
            if answer.status == 200:
                answered.append(engine)
                self.problem = ""
            elif not answer.silent:
                withdrawn.append(engine)
                self.problem = answer.why or "HTTP %d" % answer.status
        return tuple(answered), tuple(withdrawn)

    def _ask(self, now: float) -> tuple[str, ...]:
        wanted = verdict.engines_to_ask(self.state, now, self.about["idle_seconds"])
        names = sorted(self.state.engines, key=lambda name: (len(name), name))
        begun = []
        for engine in wanted:
            if engine in self.asking:
                continue
            headers = [("Authorization", "Bearer " + key) for key in self._key()]
            if len(names) > 1:  # vLLM numbers the engines of this server from 0
                headers.append(("X-data-parallel-rank", str(names.index(engine))))
            kind = self.about.get("kind", questions.GENERATE)
            put = questions.question(kind, self.about["served_name"])
            exchange = self._begin(
                put.path, now + self.about["seconds"], put.body, (*headers, *put.headers)
            )
            if exchange is not None:
                self.asking[engine] = exchange
                begun.append(engine)
        return tuple(begun)

    def _key(self) -> list[str]:
        if not self.about["key_file"]:
            return []
        try:
            with open(linux_facts.ROOT + self.about["key_file"], encoding="utf-8") as file:
                return [file.read(STATE_BYTES).strip()]
        except OSError:
            return []

    def _begin(self, path: str, deadline: float, body: Any = None, headers: Any = ()) -> Any:
        try:
            return Exchange(self.url, path, deadline, body=body, headers=headers)
        except OSError as error:  # no file descriptor is left, or no address
            self.problem = error.strerror or str(error)
            return None


class Stage:
    """A stage that is watched. `about` is the stage's entry in the configuration."""

    def __init__(
        self,
        about: dict[str, Any],
        say: Callable[[str, int], None],
    ) -> None:
        self.about = about
        self.name: str = about["stage"]
        self.servers = [Server(url, about) for url in about["servers"]]
        self.life = ""
        self.stalled = False
        self.stalls = 0
        self.restarts = 0
        self.killed: list[float] = []
        """Times of kills in seconds since 1970."""
        self.step = ""
        """The current step: check, dump, hold, again, kill or gone; "" if no stall is suspected."""
        self._say = say
        self._found = 0.0
        self._why = ""
        self._group = ""
        self._program: Optional[Program] = None
        self._fork: Optional[Fork] = None
        self._folder = ""
        self._next_check = 0.0
        self._until = 0.0
        self._told = ""
        self._recalled = ""
        """The unit's run that was stalled when the watchdog ended or paused."""
        self._recalled_until = 0.0
        self._turned = 0.0

    # The state that survives a restart of the watchdog

    def remember(self, document: dict[str, Any]) -> None:
        """Restore the state from before a restart of the watchdog."""
        now = time.monotonic()
        self.stalls = int(document.get("stalls", 0))
        self.restarts = int(document.get("restarts", 0))
        self.killed = [float(each) for each in document.get("killed", [])]
        if document.get("stalled"):
            self._recall(str(document.get("life", "")), now)
        for each in self.servers:
            if each.url in document.get("ready", []):
                each.state = State(
                    life=str(document.get("life", "")), seen=now, ready=True, answered=now
                )

    def document(self) -> dict[str, Any]:
        """Return the state that must survive a restart of the watchdog."""
        return {
            "life": self.life,
            "ready": [each.url for each in self.servers if each.state.ready],
            "stalls": self.stalls,
            "restarts": self.restarts,
            "killed": self.killed,
            "stalled": self.stalled,
        }

    def word(self, now: float) -> str:
        """
        Return the answer to the gateway about this stage: "up", "down #stalled", or "" if unknown.

        The state of a stopped unit is unknown, because the gateway's own checks detect the stop.
        After the watchdog was restarted or paused, the state of a unit that was stalled before is
        unknown too. It stays unknown for the time in which the watchdog would find the stall again.
        """
        if self.stalled:
            return "down #stalled"
        recalls = self._recalled == self.life and now < self._recalled_until
        return "" if not self.life or recalls else "up"

    def _recall(self, life: str, now: float) -> None:
        patience = self.about["seconds"] + 2 * self.about["idle_seconds"] + RECALL_SECONDS
        self._recalled, self._recalled_until = life, now + patience

    @property
    def idle(self) -> float:
        """Return the longest time that any server has had work without progress, in seconds."""
        return max((each.verdict.idle for each in self.servers), default=0.0)

    def exchanges(self) -> list[Exchange]:
        """Return the open requests of all servers."""
        return [exchange for each in self.servers for exchange in each.exchanges()]

    # Every second

    def turn(self, now: float) -> None:
        """Observe the servers, judge their state, and do the next step."""
        if self._fork is not None:
            self._fork.advance(now)
        if self.stalled and now - self._turned > verdict.PAUSE_SECONDS:
            self._recall(self.life, now)
        self._turned = now
        life = self._lives()
        if life != self.life:
            self._over(now, "the unit was restarted" if life else "the unit ended")
            self.life = life
        for each in self.servers:
            each.turn(life, now)
            if each.problem:
                self._once(
                    "%s: cannot send it a request for one token: %s" % (self.name, each.problem)
                )
        worst = next((each for each in self.servers if each.verdict.kind == "stalled"), None)
        if worst is None:
            if self.stalled or self.step in ("check", "dump", "hold", "again"):
                self._over(now, "it moves again")
            if self.step not in ("kill", "gone"):
                return
        getattr(self, "_on_" + (self.step or "watch"))(worst, now)

    def _lives(self) -> str:
        """Return the unit's invocation id, which systemd stores as the target of a link."""
        try:
            return os.readlink("%s%s%s" % (linux_facts.ROOT, LIVES, self.about["unit"]))
        except OSError:
            return ""

    def _over(self, now: float, why: str) -> None:
        if self.stalled:
            self._say("%s: %s, after %d s" % (self.name, why, now - self._found), 5)
        if self._program is not None:
            self._program.close()
        self.stalled, self.step, self._program = False, "", None
        self._next_check = now

    def _once(self, text: str) -> None:
        """Log a text only once for as long as its condition lasts."""
        if text != self._told:
            self._told = text
            self._say(text, 5)

    # The steps

    def _on_watch(self, _: Server, now: float) -> None:
        acts = self.about["mode"] == "act"
        if now >= self._next_check and (not self.stalled or (acts and not self._exhausted())):
            self._check("check", now)

    def _check(self, step: str, now: float) -> None:
        self.step = step
        names = "--property=" + ",".join(PROPERTIES)
        argv = ("systemctl", "show", names, "--", self.about["unit"])
        self._program = Program(argv, now + CHECK_SECONDS)

    def _confirmed(self, now: float) -> Optional[str]:
        """
        Return "" if the stall is confirmed, the reason if it is not, or None if not known yet.
        """
        assert self._program
        if not self._program.advance(now):
            return None
        program = self._program
        if program.status != 0:
            return "systemctl: %s" % program.out.strip()
        known = properties(program.out)
        self._group = known.get("ControlGroup", "")
        state = (known.get("ActiveState", "unknown"), known.get("SubState", "unknown"))
        if state != ("active", "running"):
            return "the unit is %s (%s)" % state
        if known.get("InvocationID") != self.life:
            return "the unit was restarted"
        if known.get("Job") not in (None, "", "0"):
            return "systemd has a job for the unit"
        return self._group_runs()

    def _group_runs(self) -> str:
        """
        Return "" if this rank's state file shows that the group runs, or else the reason.
        """
        if not self.about["group"]:
            return ""
        try:
            path = "%s/run/vllm/%s/rank.json" % (linux_facts.ROOT, self.name)
            with open(path, encoding="utf-8") as file:
                phase = json.loads(file.read(STATE_BYTES)).get("phase")
        except (OSError, ValueError, AttributeError) as error:
            return "the state of its rank cannot be read: %s" % error
        return "" if phase == "running" else "its group is %s" % phase

    def _on_check(self, worst: Server, now: float) -> None:
        no = self._confirmed(now)
        if no is None:
            return
        self.step, self._next_check = "", now + CHECK_AGAIN_SECONDS
        if no:
            self._once("%s: not counted as stalled: %s" % (self.name, no))
            return
        if not self.stalled:
            self.stalled, self._found, self._why = True, now, worst.verdict.why
            self.stalls += 1
            where = "" if len(self.servers) == 1 else " (%s)" % worst.url
            begun = time.strftime("%H:%M:%S", time.gmtime(time.time() - worst.verdict.idle))
            self._say("%s%s is stalled since %s UTC: %s" % (self.name, where, begun, self._why), 3)
        if self.about["mode"] != "act":
            self._say("%s: left as it is (watchdog mode warn)" % self.name, 4)
        elif self._exhausted():
            self._say(
                "%s: left as it is: it was killed %d times within %d minutes, and another kill "
                "would not help" % (self.name, RESTARTS, WINDOW_SECONDS // 60),
                3,
            )
        else:
            self._dump(worst, now)

    def _exhausted(self) -> bool:
        """
        Return whether the watchdog now only warns, because it killed the unit too often recently.
        """
        now = time.time()
        # If a time is in the future, the clock was set back after it. Such a time counts as now.
        self.killed = [
            min(each, now) for each in self.killed if now - min(each, now) < WINDOW_SECONDS
        ]
        return len(self.killed) >= RESTARTS

    def _dump(self, worst: Server, now: float) -> None:
        self.step, self._until = "dump", now + (HOLD_SECONDS if self.about["rank"] else 0)
        self._fork = None
        try:
            no = dump.make_room(linux_facts.ROOT + DUMPS, self.name)
        except OSError as error:
            no = str(error)
        if no:
            self._say("%s: no dump: %s" % (self.name, no), 4)
            return
        self._folder = dump.folder(linux_facts.ROOT + DUMPS, self.name)
        asked = {
            "unit": self.about["unit"],
            "life": self.life,
            "group": self._group,
            "metrics": worst.text,
            "py_spy": self.about["py_spy"],
            "seen": {
                "at": time.time(),
                "stage": self.name,
                "unit": self.about["unit"],
                "life": self.life,
                "server": worst.url,
                "why": self._why,
                "seconds": self.about["seconds"],
                "engines": {
                    name: {
                        "work": each.engine.work,
                        "seconds_without_progress": round(now - each.moved, 1),
                        "seconds_asked": each.asked and round(now - each.asked, 1),
                    }
                    for name, each in worst.state.engines.items()
                },
            },
        }
        folder = self._folder
        try:
            self._fork = Fork(lambda: dump.dump(folder, asked), now + dump.SECONDS)
        except OSError as error:
            self._say("%s: no dump: %s" % (self.name, error), 4)

    def _on_dump(self, _: Server, now: float) -> None:
        if self._fork is not None:
            if not self._fork.advance(now):
                return
            cut = (
                ", incomplete: it reached its deadline of %d s" % dump.SECONDS
                if self._fork.killed
                else ""
            )
            self._say("%s: dumped to %s%s" % (self.name, self._folder, cut), 4)
        self.step = "hold"

    def _on_hold(self, _: Server, now: float) -> None:
        if now >= self._until:
            self._check("again", now)

    def _on_again(self, _: Server, now: float) -> None:
        no = self._confirmed(now)
        if no is None:
            return
        if no:
            self._once("%s: not killed: %s" % (self.name, no))
            self.step, self._until = "hold", now + CHECK_AGAIN_SECONDS
            return
        self._say("%s: SIGKILL to the whole of %s" % (self.name, self.about["unit"]), 3)
        self.killed.append(time.time())
        self.restarts += 1
        self.step, self._until = "kill", now + GONE_SECONDS
        argv = ("systemctl", "kill", "--signal=SIGKILL", "--", self.about["unit"])
        self._program = Program(argv, now + KILL_SECONDS)

    def _on_kill(self, _: Server, now: float) -> None:
        assert self._program
        if not self._program.advance(now):
            return
        if self._program.status:
            self._say("%s: systemctl kill: %s" % (self.name, self._program.out.strip()), 3)
            for pid in dump.members(self._group):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        self.step = "gone"

    def _on_gone(self, _: Server, now: float) -> None:
        """Wait for the unit's next run. Log once which processes still exist."""
        if self._until and now >= self._until:
            self._until = 0.0
            left = dump.members(self._group)
            self._say(
                "%s: after %d s the processes %s still exist; a process that hangs in the kernel, "
                "for example in a driver, cannot be killed" % (self.name, GONE_SECONDS, left),
                3,
            )
