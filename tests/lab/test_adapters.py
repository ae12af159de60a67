"""LoRA adapters on real servers: two replicas behind the gateway, vLLM's CPU build.

They are deployed, answer by their names, are changed and removed by an upgrade while clients ask,
and no name that a client thinks of is a path. Long.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import pytest

from lab import fake_hub, package_mirror, tiny_adapter
from tests.lab.environment import NODES, OneRelease
from tests.lab.upgrade_fleet import NEW, upgrade_fleet
from tests.lab.upgrade_load import summary
from tests.lab.walk import UNI, UNI_FLAGS
from tests.support.checkout import own_lab

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]

LAB_ID = own_lab("gfad")
SERVER_PORT = 8000
CANARY = "/srv/canary"

# Opens of the canary's files, told by the kernel: IN_OPEN of inotify(7).
WATCH = f"""
import ctypes, os, struct
libc = ctypes.CDLL(None)
notes = libc.inotify_init()
assert libc.inotify_add_watch(notes, {CANARY!r}.encode(), 0x20) >= 0
with open("/run/canary.opened", "w") as out:
    while True:
        os.read(notes, 4096)
        out.write("opened\\n")
        out.flush()
"""

_PLACES = (
    "/etc/passwd",
    CANARY,
    f"..{CANARY}",
    f"../../../..{CANARY}",
    "../../etc",
    "..",
    ".",
    "/",
)
TRICKS = tuple(
    dict.fromkeys(
        (
            *_PLACES,
            *(quote(each, safe="") for each in _PLACES),
            *(quote(quote(each, safe=""), safe="") for each in _PLACES[:4]),
            *(f"sql/{each}" for each in _PLACES),
            *(f"{each}\0" for each in _PLACES[:4]),
            f"sql\0{CANARY}",
            f"file://{CANARY}",
            f"\u2025/\u2025{CANARY}",
            CANARY.replace("/", "\u2215"),
            CANARY.replace("/", "\uff0f"),
            CANARY.replace("/", "\\"),
            f"~{CANARY}",
            "sql ",
            "SQL",
            "s\u200bql",
            "sql\n",
            "lab/tiny-sql",
            "x" * 5000,
        )
    )
)


@dataclass
class AdapterFleet(OneRelease):
    """Two replicas of the tiny model, and adapters of it on the lab's hub."""

    def adapter(self, name: str) -> dict[str, str]:
        """Return an adapter of the hub, made of its name, as settings have it."""
        folder = self.state.dir / package_mirror.MODELS / f"lab/tiny-{name}"
        tiny_adapter.write(folder, name)
        return {"source": f"lab/tiny-{name}", "revision": fake_hub.revision_of(folder)}

    def adapter_at_a_path(self, name: str) -> dict[str, str]:
        """Return an adapter that lies at a path of every node, with its hash."""
        source = f"srv/adapters/{name}"
        for node in NODES:
            folder = tiny_adapter.write(self.lab.root(node) / source, name)
        weights = (folder / "adapter_model.safetensors").read_bytes()
        return {"source": f"/{source}", "sha256": hashlib.sha256(weights).hexdigest()}

    def server(self, node: str) -> str:
        return f"http://{self.address(node)}:{SERVER_PORT}/v1"

    def ask(self, model: str, url: str = "") -> tuple[int, str]:
        """Ask the gateway, or a server, for a greedy completion: its status, and text or error."""
        body = {"model": model, "prompt": "0123456789", "max_tokens": 12, "temperature": 0}
        status, found = self.send("/completions", url, body)
        return status, str(found["choices"][0]["text"] if status == 200 else found)

    def models(self, url: str = "") -> dict[str, str | None]:
        """Return the models that the gateway, or a server, lists, each with its parent."""
        status, found = self.send("/models", url)
        assert status == 200, found
        return {each["id"]: each.get("parent") for each in found["data"]}

    def send(self, path: str, url: str, body: Any = None) -> tuple[int, Any]:
        key = self.key if url else self.key_of_clients
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request((url or self.url) + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return int(answer.status), json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")[:300]

    @contextmanager
    def listing(self, name: str) -> Iterator[list[str]]:
        """
        Look, while this lasts, for the gateway listing a name that a server has unloaded.

        Servers are asked first: a name that is gone there must be gone at the gateway after that.
        """
        found: list[str] = []

        def look() -> None:
            gone = []
            for node in NODES:
                with suppress(OSError, AssertionError):
                    gone += [node] if name not in self.models(self.server(node)) else []
            with suppress(OSError, AssertionError):
                if gone and name in self.models():
                    found.append(f"{gone} unloaded {name}, and the gateway listed it")

        with again_and_again(look, 0.2):
            yield found

    @contextmanager
    def asking(self, model: str) -> Iterator[Asked]:
        """Ask the gateway by one name, again and again, while this lasts."""
        asked = Asked()

        def ask() -> None:
            try:
                asked.answers.append((time.time(), *self.ask(model)))
            except OSError as error:
                asked.answers.append((time.time(), 0, str(error)))

        with again_and_again(ask, 0.5):
            yield asked


@contextmanager
def again_and_again(task: Callable[[], None], pause: float) -> Iterator[None]:
    """Do something while this lasts, with a pause of seconds behind each time."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            task()
            over.wait(pause)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=150)


@dataclass
class Asked:
    """What one client was answered: when, status, text."""

    answers: list[tuple[float, int, str]] = field(default_factory=list)

    @property
    def failed(self) -> list[tuple[float, int, str]]:
        return [each for each in self.answers if each[1] != 200]

    @property
    def texts(self) -> list[str]:
        """Return the different answers in the order in which they came first."""
        return list(dict.fromkeys(each[2] for each in self.answers if each[1] == 200))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterFleet]:
    project = tmp_path_factory.mktemp("adapters")
    with upgrade_fleet(LAB_ID, project, NODES, also=(), kind=AdapterFleet) as found:
        found.declare_release(NEW)
        adapters = {"sql": found.adapter("sql")}
        found.declare_model(flags=UNI_FLAGS, environment=UNI, adapters=adapters)
        found.deploy()
        yield found


def test_every_replica_answers_by_an_adapters_name_and_a_second_run_changes_nothing(
    fleet: AdapterFleet,
) -> None:
    for url in ("", *map(fleet.server, NODES)):
        assert fleet.models(url) == {"tiny": None, "sql": "tiny"}
        (_, own), (status, adapted) = fleet.ask("tiny", url), fleet.ask("sql", url)
        assert status == 200, adapted
        assert own != adapted
    files = fleet.ssh(NODES[0], "stat -c '%U %a %n' /var/lib/vllm/models/lab--tiny-sql/*/*")
    assert {line.split()[0] for line in files.splitlines()} == {"root"}
    assert "adapter_model.safetensors" in files

    for deploy in ("deploys/vllm.py", "deploys/gateway.py"):
        again = fleet.pyinfra("-y", "--json", deploy=deploy)
        assert (again.status, again.changed) == (0, {}), again.output


def test_no_name_of_a_client_is_a_path(fleet: AdapterFleet) -> None:
    assert len(TRICKS) >= 40
    for node in NODES:
        fleet.ssh(node, f"mkdir -p {CANARY} && cat > {CANARY}/adapter_config.json", stdin="{}")
        fleet.ssh(node, "cat > /run/canary.py", stdin=WATCH)
        fleet.ssh(node, "systemd-run -qG --unit canary python3 /run/canary.py")
        fleet.ssh(node, "until test -e /run/canary.opened; do sleep 0.1; done")
    for url in ("", *map(fleet.server, NODES)):
        answered = {trick: fleet.ask(trick, url)[0] for trick in TRICKS}
        assert set(answered.values()) == {404}, answered

    for node in NODES:
        opened = fleet.ssh(node, "cat /run/canary.opened")
        fleet.ssh(node, f"cat {CANARY}/adapter_config.json; sleep 1")
        after = fleet.ssh(node, "cat /run/canary.opened; systemctl stop canary")
        assert (opened, after) == ("", "opened\n")


def test_an_adapter_that_no_server_loads_stops_the_first_wave_and_reaches_no_other(
    fleet: AdapterFleet,
) -> None:
    broken = fleet.adapter_at_a_path("broken")
    for node in NODES:
        file = fleet.lab.root(node) / broken["source"].lstrip("/") / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:100])
    weights = file.read_bytes()
    sql = fleet.wanted["serving"]["tiny"]["adapters"]["sql"]
    broken["sha256"] = hashlib.sha256(weights).hexdigest()
    before, pids = fleet.models(), fleet.pids()
    fleet.declare_model(adapters={"sql": sql, "broken": broken})
    with fleet.asking("sql") as asked:
        run = fleet.upgrade()
    assert run.returncode != 0, run.stdout
    assert asked.failed == []
    assert "broken" in run.stdout, run.stdout
    touched = [name for name, pid in fleet.pids().items() if pids[name] != pid]
    assert len(touched) == 1, (pids, fleet.pids())
    for url in ("", *map(fleet.server, NODES)):
        assert fleet.models(url) == before
    fleet.declare_model(adapters={"sql": sql})
    fleet.changes_nothing()


def test_an_upgrade_changes_adds_and_removes_adapters_and_loses_no_request(
    fleet: AdapterFleet,
) -> None:
    before = fleet.ask("sql")[1]
    changed = {"sql": fleet.adapter("other"), "chat": fleet.adapter_at_a_path("chat")}
    fleet.declare_model(adapters=changed)
    with fleet.load("adapters", rate=1.0) as load, fleet.asking("sql") as asked:
        run = fleet.upgrade()
        assert run.returncode == 0, run.stdout
        load.stop()
    assert summary(load.requests()).failed == 0
    assert asked.failed == []
    assert asked.texts[0] == before
    assert len(asked.texts) == 2
    assert fleet.models() == {"tiny": None, "sql": "tiny", "chat": "tiny"}
    texts = {name: fleet.ask(name)[1] for name in ("tiny", "sql", "chat")}
    assert len({*texts.values(), before}) == 4, (texts, before)
    for node in NODES:
        copied = fleet.ssh(node, "stat -c '%U %a' /var/lib/vllm/models/adapters/*/adapter_*")
        # Of those that were brought before, too: a copy stays as a model's files do.
        assert {*copied.splitlines()} == {"root 644"}

    # The gateway forgets a name before a server does.
    fleet.declare_model(adapters={"sql": changed["sql"]})
    with fleet.asking("sql") as asked, fleet.listing("chat") as early:
        run = fleet.upgrade()
        assert run.returncode == 0, run.stdout
    assert asked.failed == []
    assert early == []
    assert fleet.models() == {"tiny": None, "sql": "tiny"}
    assert fleet.ask("chat")[0] == 404
    for node in NODES:
        assert fleet.models(fleet.server(node)) == {"tiny": None, "sql": "tiny"}
    fleet.changes_nothing()
