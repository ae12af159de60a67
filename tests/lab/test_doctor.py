"""
Failures that are played on a node with real vLLM servers, and how `gpufleet doctor` names them.

`make test-long PART=doctor` writes what it measured into docs/measured/doctor.md.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from tests.lab.conftest import Fleet, standing
from tests.lab.group_faults import wait
from tests.support.checkout import own_lab
from tests.support.measured import note

LAB_ID = own_lab("gfdo")
NODE, UNIT = "gpu-01", "vllm-tiny-0.service"
DROP_IN = f"/run/systemd/system/{UNIT}.d/50-broken.conf"
PAGE = "measured/doctor.md"
# A start with two cores to its first error: imports alone take 20 s beside another server.
FAILS_SECONDS = 180
NAMED_SECONDS = 10

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


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


CONFIG = "cp $MODEL/config.json /root/config.json"
BACK = "cp /root/config.json $MODEL/config.json"


def edited(what: str) -> dict[str, str]:
    """Return how the model's config is changed by a statement on `c`, and put back."""
    program = (
        "import json,sys; p=sys.argv[1]+'/config.json'; c=json.load(open(p)); "
        f"{what}; json.dump(c, open(p,'w'))"
    )
    return {
        "before": f'{CONFIG} && python3 -c {shlex.quote(program)} "$MODEL"',
        "after": BACK,
    }


FAILURES = (
    Failure("a flag that vLLM does not know", "does not know", "flags", "--no-such-flag 1"),
    Failure(
        "max-model-len beyond the model's",
        "longer than",
        "",
        "--max-model-len 900000",
    ),
    Failure(
        "a tool parser that does not exist",
        "parser",
        "",
        "--enable-auto-tool-choice --tool-call-parser nosuch",
    ),
    Failure(
        "a KV cache below one request",
        "Weights, activations",
        "max-num-seqs",
        "--kv-cache-memory-bytes 4096",
    ),
    Failure(
        "the port is taken",
        "process has the port",
        "ss -ltnp",
        before="systemctl stop $UNIT; systemd-run -q --unit=thief python3 -c "
        "\"import socket,time; s=socket.socket(); s.setsockopt(1,2,1); s.bind(('0.0.0.0',$PORT));"
        ' s.listen(); time.sleep(9999)"',
        after="systemctl stop thief; systemctl reset-failed thief 2>/dev/null || true",
    ),
    Failure(
        "the model's config is gone",
        "",
        "",
        before="mv $MODEL/config.json /root/config.json",
        after="mv /root/config.json $MODEL/config.json",
    ),
    Failure(
        "a model type that Transformers lacks",
        "older than",
        "",
        **edited("c.update(model_type='nosuch')"),
    ),
    Failure(
        "an architecture that vLLM lacks",
        "model",
        "",
        **edited("c.update(architectures=['NoSuchForCausalLM'])"),
    ),
    Failure(
        "heads that tensor_parallel does not divide",
        "heads",
        "tensor_parallel",
        **edited("c.update(num_attention_heads=1, num_key_value_heads=1, head_dim=128)"),
    ),
    Failure(
        "weights that are cut off",
        "",
        "",
        before="cd $MODEL; cp model.safetensors /root/weights; truncate -s 1000 model.safetensors",
        after="cp /root/weights $MODEL/model.safetensors",
    ),
    Failure("a limit of memory that is too low", "memory", "memory", unit="MemoryMax=300M"),
    Failure(
        "/dev/shm is full",
        "/dev/shm",
        "/dev/shm",
        unit="TemporaryFileSystem=/dev/shm:size=64k,mode=1777",
    ),
    Failure(
        "a disk without space",
        "full",
        "df",
        unit="TemporaryFileSystem=/var/cache/vllm:size=16k,mode=1777 /tmp:size=16k,mode=1777\n"
        "Environment=TMPDIR=/tmp",
    ),
    Failure(
        "the API key's file is gone",
        "credential",
        "",
        before="mv /etc/vllm/credentials/api-key /root/api-key",
        after="mv /root/api-key /etc/vllm/credentials/api-key",
    ),
    Failure("it was stopped by hand", "stopped", "systemctl start", before="systemctl stop $UNIT"),
    Failure("the server was killed", "KILL", "logs", before="systemctl kill -s KILL $UNIT"),
    *(
        Failure(f"hardware: {fault}", says, do, fault=fault, serves=True)
        for fault, says, do in (
            ("gpu-lost", "fallen off the bus", "dmesg"),
            ("gpu-missing", "does not list", "lspci"),
            ("recovery-reset", "asks to reset the GPU", "nvidia-smi -r"),
            ("recovery-reboot", "asks to reboot the node", "reboot"),
            ("ecc-uncorrected", "uncorrectable memory errors", "stop"),
            ("remap-pending", "row remap is pending", "nvidia-smi -r"),
            ("remap-failed", "could not be remapped", "stop"),
            ("nvlink-dead-link", "1 of 18 links down", "nvidia-smi nvlink"),
            ("throttle-hw-thermal", "heat throttles it", "TEMPERATURE"),
            ("pcie-x8", "8 PCIe lanes", "lspci"),
            ("mig-on", "MIG is on", "stop"),
            ("foreign-memory", "no process is listed", "check again"),
            ("mismatch", "different versions", "modprobe"),
            ("fabric-unhealthy", "bandwidth is degraded", "nvidia-fabricmanager"),
            ("xid-48", "Xid 48", "stop"),
        )
    ),
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One node with two replicas of a model."""
    with standing(LAB_ID, {NODE: "h100x8"}, tmp_path_factory.mktemp("doctor")) as found:
        path = found.project / "group_vars/lab.yml"
        data = yaml.safe_load(path.read_text())
        del data["dcgm"]
        data["gpus"] = {"reserved": list(range(4, 8))}
        path.write_text(yaml.safe_dump(data))
        run = found.pyinfra("-y", seconds=1200)
        assert run.status == 0, run.output
        yield found


def doctor(fleet: Fleet) -> tuple[dict[str, Any], float]:
    """Return what it says, and the seconds that it took."""
    begun = time.monotonic()
    run = fleet.gpufleet("doctor", fleet.inventory, "--json")
    assert run.status in (0, 1, 2), run.output
    return json.loads(run.stdout), time.monotonic() - begun


def shell(fleet: Fleet, commands: str) -> None:
    unit = fleet.ssh(NODE, f"cat /etc/systemd/system/{UNIT}")
    model = re.search(r"^    (/var/lib/vllm/models/\S+)", unit, re.MULTILINE)
    port = re.search(r"--port (\d+)", unit)
    assert model
    assert port
    fleet.ssh(NODE, f"export MODEL={model[1]} PORT={port[1]} UNIT={UNIT}\n{commands}")


def break_it(fleet: Fleet, failure: Failure) -> None:
    if failure.before:
        shell(fleet, failure.before)
    lines = failure.unit
    if failure.flags:
        unit = fleet.ssh(NODE, f"cat /etc/systemd/system/{UNIT}")
        _, _, rest = unit.partition("\nExecStart=")
        command, _, _ = rest.partition("\n\n")
        lines += f"\nExecStart=\nExecStart={command} \\\n    {failure.flags}"
    if lines:
        fleet.ssh(
            NODE,
            f"mkdir -p $(dirname {DROP_IN}) && cat > {DROP_IN} && systemctl daemon-reload",
            stdin=f"[Service]\n{lines}\n",
        )
    if failure.fault:
        fleet.lab.fault(NODE, failure.fault)
    elif not failure.before.endswith("$UNIT"):
        fleet.ssh(NODE, f"systemctl restart --no-block {UNIT}")


def mend(fleet: Fleet, failure: Failure) -> None:
    if failure.fault:
        fleet.lab.clear(NODE)
        return
    if failure.after:
        shell(fleet, failure.after)
    # A server that starts ends by SIGTERM only after its deadline.
    fleet.ssh(NODE, f"rm -f {DROP_IN}; systemctl daemon-reload; systemctl stop --no-block {UNIT}")
    fleet.ssh(NODE, f"systemctl kill -s KILL {UNIT} || true; systemctl stop {UNIT}")
    fleet.ssh(NODE, f"systemctl reset-failed {UNIT} || true")


def has_failed(fleet: Fleet) -> bool:
    said = fleet.ssh(NODE, f"systemctl show -p ActiveState,NRestarts {UNIT}")
    restarts = re.search(r"NRestarts=(\d+)", said)
    assert restarts
    return bool(re.search("=(failed|inactive)", said)) or int(restarts[1]) > 0


@pytest.mark.parametrize("failure", FAILURES, ids=lambda each: each.name)
def test_a_failure_is_named_with_its_cause_and_what_to_do(fleet: Fleet, failure: Failure) -> None:
    break_it(fleet, failure)
    try:
        if not failure.serves:
            wait(lambda: has_failed(fleet), FAILS_SECONDS, f"{failure.name}: it fails")
        found, seconds = doctor(fleet)
    finally:
        mend(fleet, failure)
    about = [
        each
        for each in found["problems"]
        if (each["subject"].startswith("check ") if failure.serves else each["subject"] == "tiny-0")
    ]
    assert about, found
    texts = [f"{each['what']} {each['cause']} {' '.join(each['evidence'])}" for each in about]
    assert any(
        failure.says.lower() in text.lower() and failure.do.lower() in str(each["do"]).lower()
        for text, each in zip(texts, about, strict=True)
    ), json.dumps(about, indent=1)
    note(
        PAGE,
        failure.name,
        about[0]["cause"] or about[0]["what"],
        str(about[0]["do"] or "").partition("\n")[0],
        f"{seconds:.1f} s",
    )
    assert seconds < NAMED_SECONDS


def test_a_fleet_that_was_mended_has_no_problem(fleet: Fleet) -> None:
    run = fleet.pyinfra("-y", seconds=1200)
    assert run.status == 0, run.output
    found, _ = doctor(fleet)
    left = [each for each in found["problems"] if each["impact"] in ("outage", "degraded")]
    assert left == []
