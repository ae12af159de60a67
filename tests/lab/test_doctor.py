"""
Failures that are played on a node with real vLLM servers, and how `gpufleet doctor` names them.

Those of hardware need no server: tests/lab/test_doctor_hardware.py.

`make test-long PART=doctor` writes what it measured into docs/measured/doctor.md.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import tarfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lab import fake_kernel_log
from lab.tiny_model import HIDDEN, LAYERS
from tests.lab.conftest import Fleet, standing
from tests.lab.group_faults import wait
from tests.support.checkout import own_lab
from tests.support.measured import note

LAB_ID = own_lab("gfdo")
NODE, UNIT = "gpu-01", "vllm-tiny-0.service"
DROP_IN = f"/run/systemd/system/{UNIT}.d/50-broken.conf"
GATEWAY = "mon-02"
PORT = 8443
PAGE = "measured/doctor.md"
CANARY = "canary-7d1f4e9b"
# A start with two cores to its first error: imports alone take 20 s beside another server.
FAILS_SECONDS = 400
SERVES_SECONDS = 600
DEPLOY_SECONDS = 1200
NAMED_SECONDS = 10
GONE_SECONDS = 120
# Longer than a deploy of the gateway: an expired certificate is refused.
VALID_SECONDS = 150
HOME = "/etc/gpufleet/gateway"
STARTED = "/run/gpufleet/started"
OOM = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,"
    f"task_memcg=/system.slice/{UNIT},task=python,pid=4242,uid=999"
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Failure:
    """One thing that is broken on the node, and what has to be said of it."""

    name: str
    says: str
    """Words of the cause, or of what is wrong."""
    do: str
    """Words of what to do."""
    flags: str = ""
    """Put behind the server's command line."""
    unit: str = ""
    """Lines of the unit's [Service]."""
    before: str = ""
    """Shell commands on the node; `$MODEL` is the model's folder, `$PORT` the server's port."""
    after: str = ""
    serves: bool = False
    """The server goes on: only the node is broken."""
    fault: str = ""
    """A fault of the simulated hardware."""
    node: str = NODE
    """Where it is broken."""
    subject: str = "tiny-0"
    """What the subject of the problem begins with."""
    net: str = ""
    """What happens to the node's link."""
    fix: str = ""
    """What doctor says to type, a command a line: `gpufleet` here, all else on the node."""


DEPLOY = "gpufleet deploy vllm"
# As told where files of the model are not as a deploy placed them.
PLACE_AGAIN = f"rm $MODEL/.complete\n{DEPLOY}"
# A KV cache of half a context: two numbers of two bytes a layer for each token.
HALF_A_CONTEXT = 512 // 2 * 2 * 2 * LAYERS * HIDDEN
UNDO = f"rm {DROP_IN}; systemctl daemon-reload && systemctl restart --no-block $UNIT"
KILL = "systemctl restart $UNIT; systemctl kill -s KILL $UNIT"
CONFIG = "cp -p $MODEL/config.json /root/config.json"
BACK = "cp -p /root/config.json $MODEL/config.json"


def edited(what: str) -> dict[str, Any]:
    """Return how the model's config is changed by a statement on `c`, and put back."""
    program = (
        "import json,sys; p=sys.argv[1]+'/config.json'; c=json.load(open(p)); "
        f"{what}; json.dump(c, open(p,'w'))"
    )
    return {
        "before": f'{CONFIG} && python3 -c {shlex.quote(program)} "$MODEL"',
        "after": BACK,
    }


INVENTORY = '''\
"""The lab's nodes, and the one without GPUs as the gateway in front of them."""

from gpufleet import inventory
from lab.inventory import MONITORING, groups, state

_groups = groups()
_groups["gateway"] = _groups.pop(MONITORING)
_gpu = [name for name in _groups if name != "gateway"]

globals().update(
    inventory.load(__file__, groups=_groups, children={"gpu": _gpu}, also=[state().dir])
)
'''

FAILURES = (
    Failure(
        "a flag that vLLM does not know",
        "does not know",
        "flags",
        "--no-such-flag 1",
        fix=UNDO,
    ),
    Failure(
        "max-model-len beyond the model's",
        "longer than",
        "systemctl cat",
        "--max-model-len 900000",
        fix=UNDO,
    ),
    Failure(
        "a tool parser that does not exist",
        "parser",
        "systemctl cat",
        "--enable-auto-tool-choice --tool-call-parser nosuch",
        fix=UNDO,
    ),
    Failure(
        "a KV cache below one request",
        "Weights, activations",
        "max-num-seqs",
        "--kv-cache-memory-bytes 4096",
        fix=UNDO,
    ),
    Failure(
        "a context that the KV cache does not hold",
        "the plan for each GPU: weights need",
        "context",
        f"--kv-cache-memory-bytes {HALF_A_CONTEXT}",
        fix=UNDO,
    ),
    Failure(
        "the port is taken",
        "process uses the port",
        "ss -ltnp",
        before="systemctl stop $UNIT; systemd-run -q --unit=thief python3 -c "
        "\"import socket,time; s=socket.socket(); s.setsockopt(1,2,1); s.bind(('0.0.0.0',$PORT));"
        ' s.listen(); time.sleep(9999)"',
        after="systemctl stop thief; systemctl reset-failed thief 2>/dev/null || true",
        fix="kill $(ss -ltnpH sport = :$PORT | grep -o 'pid=[0-9]*' | head -1 | cut -d= -f2)",
    ),
    Failure(
        "the model's config is gone",
        "does not contain config.json",
        "/.complete` on",
        before="mv $MODEL/config.json /root/config.json",
        after="mv -n /root/config.json $MODEL/config.json",
        fix=PLACE_AGAIN,
    ),
    Failure(
        "a model type that Transformers lacks",
        "config.json: changed after",
        "/.complete` on",
        **edited("c.update(model_type='nosuch')"),
        fix=PLACE_AGAIN,
    ),
    Failure(
        "an architecture that vLLM lacks",
        "does not know the model",
        "/.complete` on",
        **edited("c.update(architectures=['NoSuchForCausalLM'])"),
        fix=PLACE_AGAIN,
    ),
    Failure(
        "heads that tensor_parallel does not divide",
        "heads",
        "tensor_parallel",
        "--tensor-parallel-size 2",
        **edited("c.update(num_attention_heads=1, num_key_value_heads=1, head_dim=128)"),
        fix=f"{UNDO}\n{PLACE_AGAIN}",
    ),
    Failure(
        "weights that are cut off",
        "model.safetensors: changed after",
        "/.complete` on",
        before="cd $MODEL; cp -p model.safetensors /root/weights; "
        "truncate -s 1000 model.safetensors",
        after="cp -p /root/weights $MODEL/model.safetensors",
        fix=PLACE_AGAIN,
    ),
    Failure(
        "the file system of /run is full",
        "file system is full",
        "df -h /run",
        # A file system of its own: /run of a node is this machine's memory.
        before=f"mount -t tmpfs -o size=4k,mode=755 tmpfs {STARTED}; "
        f"head -c 4096 /dev/zero > {STARTED}/full",
        after=f"umount {STARTED}",
        fix=f"df -h {STARTED}; rm {STARTED}/full; systemctl restart --no-block $UNIT",
    ),
    Failure(
        "the API key's file is gone",
        "LoadCredential",
        "gpufleet deploy vllm",
        before="mv /etc/vllm/credentials/api-key /root/api-key",
        after="mv -n /root/api-key /etc/vllm/credentials/api-key",
        fix=DEPLOY,
    ),
    Failure(
        "it was stopped by hand",
        "stopped",
        "systemctl start",
        before="systemctl stop $UNIT",
        fix="systemctl start $UNIT",
    ),
    Failure("the server was killed", "KILL", "logs", before=KILL),
    Failure(
        "the kernel killed it for memory",
        "memory",
        "memory",
        before=KILL,
        subject="kernel of",
    ),
    Failure(
        "the gateway was stopped",
        "does not",
        "systemctl start gpufleet-gateway",
        before="systemctl stop gpufleet-gateway",
        after="systemctl start gpufleet-gateway",
        node=GATEWAY,
        subject=f"gateway {GATEWAY}",
        fix="systemctl start gpufleet-gateway",
    ),
    Failure(
        "an error in HAProxy's configuration",
        "configuration has an error",
        "gpufleet deploy gateway",
        before=f"cd {HOME} && cp haproxy.cfg /root/ && sed -i '1i nosuchword' haproxy.cfg; "
        "systemctl restart gpufleet-gateway || true",
        after=f"cp /root/haproxy.cfg {HOME}/; systemctl reset-failed gpufleet-gateway; "
        "systemctl restart gpufleet-gateway",
        node=GATEWAY,
        subject=f"gateway {GATEWAY}",
        fix="gpufleet deploy gateway",
    ),
    Failure(
        "a cordon that was left",
        "was cordoned",
        "gpufleet uncordon",
        before=f"gpufleet cordon {NODE} --why rehearsal",
        serves=True,
        subject=f"{NODE} (cordon)",
        fix=f"gpufleet uncordon {NODE}",
    ),
    Failure(
        "the network between the nodes is cut",
        "not reached",
        f"ssh {NODE}",
        net="cut",
        serves=True,
        subject=NODE,
    ),
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One node with two replicas of a model, and a gateway in front of them."""
    profiles = {NODE: "h100x8", GATEWAY: "none"}
    with standing(LAB_ID, profiles, tmp_path_factory.mktemp("doctor")) as found:
        (found.project / "inventories/lab.py").write_text(INVENTORY)
        variables = found.project / "group_vars"
        data = yaml.safe_load((variables / "lab.yml").read_text())
        del data["dcgm"]
        data["gpus"] = {"reserved": list(range(4, 8))}
        data["serving"]["tiny"]["tensor_parallel"] = 1  # half of the processes
        (variables / "lab.yml").write_text(yaml.safe_dump(data))
        (variables / "monitoring.yml").unlink()
        declare_gateway(found, days=30)
        for deploy in ("deploys/vllm.py", "deploys/gateway.py"):
            run = found.pyinfra("-y", deploy=deploy, seconds=1200)
            assert run.status == 0, run.output
        yield found


def declare_gateway(fleet: Fleet, **valid: float) -> None:
    """Declare the gateway with a certificate that is valid for so long."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(**valid))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (fleet.project / "tls.pem").write_bytes(certificate.public_bytes(pem))
    (fleet.project / "tls-key.pem").write_bytes(key.private_bytes(pem, *plain))
    (fleet.project / "tls-key.pem").chmod(0o600)
    tls = {
        f"{each}_file": str(fleet.project / f"{name}.pem")
        for each, name in (("certificate", "tls"), ("key", "tls-key"))
    }
    clients = [{"name": "load", "key_sha256": hashlib.sha256(CANARY.encode()).hexdigest()}]
    text = {"gpu_node": False, "gateway": {"port": PORT, "tls": tls, "clients": clients}}
    (fleet.project / "group_vars/gateway.yml").write_text(yaml.safe_dump(text))


def doctor(fleet: Fleet) -> tuple[dict[str, Any], float]:
    """Return what it says, and the seconds that it took."""
    begun = time.monotonic()
    run = fleet.gpufleet("doctor", fleet.inventory, "--json")
    assert run.status in (0, 1, 2), run.output
    return json.loads(run.stdout), time.monotonic() - begun


def shell(fleet: Fleet, commands: str, node: str = NODE) -> None:
    """Type commands: those of gpufleet here with the inventory, others on the node."""
    for line in commands.splitlines():
        if line.startswith("gpufleet "):
            _, *words = shlex.split(line)
            at = 2 if words[0] == "deploy" else 1
            sure = ["-y"] if words[0] == "deploy" else []
            typed = [*words[:at], fleet.inventory, *words[at:], *sure]
            run = fleet.gpufleet(*typed, seconds=DEPLOY_SECONDS)
            assert run.status == 0, run.output
        else:
            on_node(fleet, line, node)


def on_node(fleet: Fleet, commands: str, node: str) -> None:
    variables = ""
    if "$" in commands:
        unit = fleet.ssh(NODE, f"cat /etc/systemd/system/{UNIT}")
        model = re.search(r"^    (/var/lib/vllm/models/\S+)", unit, re.MULTILINE)
        port = re.search(r"--port (\d+)", unit)
        assert model
        assert port
        variables = f"export MODEL={model[1]} PORT={port[1]} UNIT={UNIT}\n"
    fleet.ssh(node, variables + commands)


def add_to_unit(fleet: Fleet, lines: str) -> None:
    fleet.ssh(
        NODE,
        f"mkdir -p $(dirname {DROP_IN}) && cat > {DROP_IN} && systemctl daemon-reload",
        stdin=f"[Service]\n{lines}\n",
    )


def kernel_says(fleet: Fleet, text: str) -> None:
    """Have the simulated kernel log of the GPU node say something, now."""
    root = fleet.lab.root(NODE)
    machine = root / fake_kernel_log.MACHINE
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME) - float((machine / "booted_at").read_text())
    with (machine / "kernel.log").open("a") as log:
        log.write(f"{uptime:.3f}\t{text}\n")
    fake_kernel_log.write(root)


def break_it(fleet: Fleet, failure: Failure) -> None:
    if failure.subject.startswith("kernel"):
        kernel_says(fleet, OOM)
    if failure.fault:
        fleet.lab.fault(NODE, failure.fault)
    if failure.before:
        shell(fleet, failure.before, failure.node)
    lines = failure.unit
    if failure.flags:
        unit = fleet.ssh(NODE, f"cat /etc/systemd/system/{UNIT}")
        _, _, rest = unit.partition("\nExecStart=")
        command, _, _ = rest.partition("\n\n")
        lines += f"\nExecStart=\nExecStart={command} \\\n    {failure.flags}"
    if lines:
        add_to_unit(fleet, lines)
    if failure.net:
        fleet.lab.net(failure.node, failure.net)
    if not failure.serves and failure.node == NODE and not failure.before.endswith("$UNIT"):
        fleet.ssh(NODE, f"systemctl restart --no-block {UNIT}")


def mend(fleet: Fleet, failure: Failure) -> None:
    """Put back what was broken, also where what was typed has done so."""
    if failure.net:
        fleet.lab.net(failure.node, "heal")
    if failure.fault or failure.subject.startswith("kernel"):
        fleet.lab.clear(NODE)
    if failure.after:
        shell(fleet, failure.after, failure.node)
    if failure.serves or failure.node != NODE:
        return
    # A server that starts ends by SIGTERM only after its deadline.
    fleet.ssh(NODE, f"rm -f {DROP_IN}; systemctl daemon-reload; systemctl stop --no-block {UNIT}")
    fleet.ssh(NODE, f"systemctl kill -s KILL {UNIT} || true; systemctl stop {UNIT}")
    fleet.ssh(NODE, f"systemctl reset-failed {UNIT} || true")


def fixed(fleet: Fleet, failure: Failure) -> str:
    """Type what doctor said; return what became of it, for the table."""
    simulated = not failure.fix and (failure.fault or failure.net)
    if not failure.fix and not simulated:
        return "not typed"
    if simulated:
        mend(fleet, failure)
    else:
        shell(fleet, failure.fix, failure.node)
    if not failure.serves and failure.node == NODE:
        wait(lambda: is_well(fleet), SERVES_SECONDS, f"{failure.name}: it serves again")
    wait(lambda: not about(doctor(fleet)[0], failure), GONE_SECONDS, f"{failure.name}: it is gone")
    return "gone after the simulated repair" if simulated else "works"


def is_well(fleet: Fleet) -> bool:
    look = f"curl -sf -m 5 http://127.0.0.1:$(grep -o -- '--port [0-9]*' /etc/systemd/system/{UNIT}"
    return "ok" in fleet.ssh(NODE, f"{look} | cut -d' ' -f2)/health && echo ok || true")


def about(found: dict[str, Any], failure: Failure) -> list[dict[str, Any]]:
    """Return the problems that a failure may be named by."""
    begins = "check " if failure.fault else failure.subject
    hurts = "risk", "degraded", "outage", "notice"
    return [
        each
        for each in found["problems"]
        if each["subject"].startswith(begins)
        and each["impact"] in hurts
        and failure.says.lower() in told(each).lower()
        and failure.do.lower() in str(each["do"]).lower()
    ]


def told(problem: dict[str, Any]) -> str:
    return f"{problem['what']} {problem['cause']} {' '.join(problem['evidence'])}"


def has_failed(fleet: Fleet) -> bool:
    said = fleet.ssh(NODE, f"systemctl show -p ActiveState,NRestarts {UNIT}")
    restarts = re.search(r"NRestarts=(\d+)", said)
    assert restarts
    return bool(re.search("=(failed|inactive)", said)) or int(restarts[1]) > 0


def play(fleet: Fleet, failure: Failure) -> None:
    """Break something, have it named, type what is said, and note what became of it."""
    break_it(fleet, failure)
    try:
        if not failure.serves and failure.node == NODE:
            wait(lambda: has_failed(fleet), FAILS_SECONDS, f"{failure.name}: it fails")
        found, seconds = doctor(fleet)
        named = about(found, failure)
        assert named, json.dumps(found, indent=1)
        became = fixed(fleet, failure)
    finally:
        mend(fleet, failure)
    note(
        PAGE,
        failure.name,
        named[0]["cause"] or named[0]["what"],
        str(named[0]["do"] or "").replace(fleet.inventory, "INVENTORY"),
        f"{seconds:.1f} s",
        became,
    )
    assert seconds < NAMED_SECONDS


@pytest.mark.parametrize("failure", FAILURES, ids=lambda each: each.name)
def test_a_failure_is_named_with_its_cause_and_what_to_do(fleet: Fleet, failure: Failure) -> None:
    play(fleet, failure)


def test_a_certificate_that_ended_is_named_and_a_deploy_of_another_one_helps(fleet: Fleet) -> None:
    declare_gateway(fleet, seconds=VALID_SECONDS)
    ends = time.time() + VALID_SECONDS
    assert fleet.pyinfra("-y", deploy="deploys/gateway.py").status == 0
    wait(lambda: time.time() > ends, VALID_SECONDS + 5, "it ends")
    failure = Failure("the certificate ended", "expired", "deploy gateway", subject="certificate")
    found, seconds = doctor(fleet)
    (named,) = about(found, failure)
    assert named["impact"] == "outage"
    declare_gateway(fleet, days=30)
    assert fleet.pyinfra("-y", deploy="deploys/gateway.py").status == 0
    assert about(doctor(fleet)[0], failure) == []
    note(PAGE, failure.name, named["cause"], named["do"], f"{seconds:.1f} s", "works")


def test_a_gateway_that_ended_by_its_configuration_is_started_by_its_deploy(fleet: Fleet) -> None:
    broken = next(each for each in FAILURES if each.name == "an error in HAProxy's configuration")
    break_it(fleet, broken)
    try:
        run = fleet.pyinfra("-y", deploy="deploys/gateway.py")
        assert run.status == 0, run.output
        assert about(doctor(fleet)[0], broken) == []
    finally:
        mend(fleet, broken)


def test_a_gateway_that_does_not_reach_a_server_is_named(fleet: Fleet) -> None:
    """Its packets go to a MAC address that no card has: there is no answer, and no refusal."""
    neighbour = (
        f"{fleet.address(NODE)} dev $(ip -o route get {fleet.address(NODE)} | awk '{{print $3}}')"
    )
    failure = Failure(
        "the network between gateway and server is cut",
        "cannot reach the server", "gpufleet drift", subject=f"gateway {GATEWAY}",
    )  # fmt: skip
    seconds = 0.0
    named: list[dict[str, Any]] = []

    def is_named() -> bool:
        nonlocal seconds, named
        found, seconds = doctor(fleet)
        named = about(found, failure)
        return bool(named)

    fleet.ssh(GATEWAY, f"ip neigh replace {neighbour} lladdr 02:00:00:00:de:ad nud permanent")
    try:
        # Three checks of HAProxy have to fail.
        wait(is_named, 90, "it is named")
    finally:
        fleet.ssh(GATEWAY, f"ip neigh del {neighbour}")
    wait(lambda: not about(doctor(fleet)[0], failure), 90, "it is gone")
    do = named[0]["do"].replace(fleet.inventory, "INVENTORY")
    note(PAGE, failure.name, named[0]["cause"], do, f"{seconds:.1f} s", "works")


STOPPED = Failure("tiny-1 stopped", "stopped", "systemctl start", subject="tiny-1")
GATEWAY_DOWN = Failure("", "does not", "systemctl start", subject=f"gateway {GATEWAY}")
LOST = Failure("", "fallen off the bus", "dmesg", fault="gpu-lost")
KILLED = Failure("", "memory", "memory", subject="kernel of")


def left(fleet: Fleet, failures: Iterable[Failure]) -> list[dict[str, Any]]:
    """Return what is still named of failures."""
    found, _ = doctor(fleet)
    return [problem for each in failures for problem in about(found, each)]


@pytest.mark.parametrize(
    "pair",
    [(LOST, STOPPED), (GATEWAY_DOWN, STOPPED), (KILLED, STOPPED)],
    ids=["GPU and server", "gateway and server", "kernel and server"],
)
def test_two_failures_at_once_are_both_named_and_causes_stand_before_effects(
    fleet: Fleet, pair: tuple[Failure, Failure]
) -> None:
    fleet.ssh(NODE, "systemctl stop vllm-tiny-1")
    try:
        if GATEWAY_DOWN in pair:
            fleet.ssh(GATEWAY, "systemctl stop gpufleet-gateway")
        if LOST in pair:
            fleet.lab.fault(NODE, "gpu-lost")
        if KILLED in pair:
            kernel_says(fleet, OOM)
            shell(fleet, KILL)
            wait(lambda: has_failed(fleet), 60, "it was killed")
        found, seconds = doctor(fleet)
    finally:
        fleet.lab.clear(NODE)
        fleet.ssh(NODE, "systemctl start --no-block vllm-tiny-1")
        fleet.ssh(GATEWAY, "systemctl start gpufleet-gateway")
    named = [about(found, each) for each in pair]
    assert all(named), json.dumps(found, indent=1)
    order = [each["subject"] for each in found["problems"]]
    for each in found["problems"]:
        if each["because"]:
            assert order.index(each["because"]) < order.index(each["subject"])
    became = "not typed"
    if GATEWAY_DOWN in pair:  # what it said of both is what was typed
        wait(lambda: not left(fleet, pair), SERVES_SECONDS, "both are gone")
        became = "works"
    if KILLED in pair:
        (killed,) = (each for each in found["problems"] if each["subject"] == "tiny-0")
        assert killed["because"] == f"kernel of {NODE}"
    what = " and ".join(problems[0]["what"] for problems in named)
    do = "; ".join(str(problems[0]["do"]) for problems in named)
    do = do.replace(fleet.inventory, "INVENTORY")
    note(PAGE, f"two at once: {what}", "both", do, f"{seconds:.1f} s", became)


def test_a_bundle_has_no_secret_of_the_node(fleet: Fleet, tmp_path: Path) -> None:
    """Canaries in the journal, the unit, its environment and a model's address."""
    add_to_unit(
        fleet,
        f"Environment=DB_PASSWORD={CANARY}-environment\n"
        f"ExecStartPre=/bin/echo marker with {CANARY}-environment\n"
        f"ExecStartPre=/bin/echo Authorization: Bearer {CANARY}-journal\n"
        f"ExecStartPre=/bin/echo --model https://user:{CANARY}-model@hub.example/m\n"
        f"ExecStartPre=/bin/echo --api-key {CANARY}-unit\n"
        f"ExecStartPre=/bin/false",
    )
    keys = [fleet.ssh(NODE, "cat /etc/vllm/credentials/api-key").strip(), fleet.hf_token]
    fleet.ssh(NODE, f"systemctl restart --no-block {UNIT}")
    file = tmp_path / "doctor.tar.gz"
    try:
        wait(lambda: has_failed(fleet), 60, "it fails")
        run = fleet.gpufleet("doctor", fleet.inventory, "--bundle", str(file))
        assert run.status == 1, run.output
    finally:
        mend(fleet, Failure("", "", ""))
    with tarfile.open(file) as archive:
        texts = {
            each.name: archive.extractfile(each).read().decode()  # type: ignore[union-attr]
            for each in archive
        }
    journal = next(text for name, text in texts.items() if name.endswith("tiny-0.log"))
    assert "marker with" in journal
    leaks = [
        (name, secret)
        for name, text in {**texts, "screen": run.output}.items()
        for secret in (CANARY, *keys)
        if secret in text
    ]
    assert leaks == []


def test_a_fleet_that_was_mended_has_no_problem(fleet: Fleet) -> None:
    for deploy in ("deploys/vllm.py", "deploys/gateway.py"):
        run = fleet.pyinfra("-y", deploy=deploy, seconds=1200)
        assert run.status == 0, run.output
    found, _ = doctor(fleet)
    left = [each for each in found["problems"] if each["impact"] in ("outage", "degraded")]
    assert left == []
