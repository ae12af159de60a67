"""
Two gateways with one address: it moves, once, and clients are answered; real HAProxy, keepalived.

The servers are stand-ins. Seconds that are asserted are ten times those of a quiet machine; those
that were measured are printed, and stand in docs/traffic/gateway.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.lab.gateway_pair import GATEWAYS, GPU_NODES, PASSWORD, Pair, ask, pair, until
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfka")
UNIT = "gpufleet-gateway.service"
IN_FORCE = "gateway | virtual address in force"
# Longer than a gateway that comes back needs to be well, and then to take what it could take.
SETTLED_SECONDS = 12

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(LAB_ID, tmp_path_factory.mktemp("gateways")) as found:
        yield found


@pytest.fixture(scope="module")
def gateways(bare: Pair) -> Pair:
    """Both deployed at once, as the first time."""
    run = bare.deploy("-y", "--json")
    assert run.status == 0, run.output
    until(lambda: len(bare.holders()) == 1, "one has the address")
    until(lambda: ask(bare.shared) == "ok", "the servers are up")
    return bare


def test_one_of_both_has_the_address_and_a_second_deploy_changes_nothing(gateways: Pair) -> None:
    for arguments in (["--dry"], ["-y"]):
        again = gateways.deploy(*arguments, "--json")
        assert (again.status, again.changed) == (0, {}), again.output

    assert len(gateways.holders()) == 1
    # Both serve, whoever has the address.
    assert [ask(gateways.address(node)) for node in GATEWAYS] == ["ok", "ok"]


def test_nobody_else_may_read_the_password(gateways: Pair) -> None:
    for node in GATEWAYS:
        mode = gateways.ssh(node, "stat -c '%a %U' /etc/keepalived/keepalived.conf")
        readable = gateways.ssh(
            node,
            "find /etc /run /usr/local /var/lib/gpufleet /tmp -xdev -type f -perm /o=r "
            f"-exec grep -lF {PASSWORD} {{}} + || :",
        )
        assert (mode.split(), readable) == (["600", "root"], "")


@dataclass(frozen=True)
class Fault:
    """Something that happens to the gateway that has the address."""

    name: str
    strike: Callable[[Pair, str], object]
    mend: Callable[[Pair, str], object] | None
    """None: it mends itself."""
    moves: bool
    seconds: float
    """Ten times what requests have to wait for an answer on a quiet machine."""


FAULTS = [
    Fault(
        "killed",
        lambda lab, node: lab.ssh(node, f"kill -9 $(systemctl show -P MainPID {UNIT})"),
        None,
        moves=False,
        seconds=20,
    ),
    Fault(
        "stopped",
        lambda lab, node: lab.ssh(node, f"systemctl stop {UNIT}"),
        lambda lab, node: lab.ssh(node, f"systemctl start {UNIT}"),
        moves=True,
        seconds=15,
    ),
    Fault(
        "hangs",
        lambda lab, node: lab.ssh(node, f"systemctl kill -s STOP {UNIT}"),
        lambda lab, node: lab.ssh(node, f"systemctl kill -s CONT {UNIT}"),
        moves=True,
        seconds=60,
    ),
    Fault(
        "loses power",
        lambda lab, node: lab.lab.power(node, "off"),
        lambda lab, node: lab.lab.power(node, "on"),
        moves=True,
        seconds=40,
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=lambda each: each.name.replace(" ", "-"))
def test_requests_are_answered_again_and_the_address_is_not_given_back(
    gateways: Pair, fault: Fault
) -> None:
    until(lambda: len(gateways.holders()) == 1, "one has the address")
    before = gateways.holder()
    with gateways.asking() as asked:
        stream = gateways.stream(3000)
        until(lambda: stream.read, "the stream has begun")
        struck = time.monotonic()
        fault.strike(gateways, before)
        if fault.moves:
            until(lambda: gateways.holders() == [gateways.other(before)], "it has moved", 60)
        time.sleep(5)
        gap, ended = asked.gap(struck), stream.ended
        assert asked.answers[-1][1] == "ok", asked.answers[-5:]
        assert gap <= fault.seconds
        holder = gateways.holder()
        mended = time.monotonic()
        if fault.mend:
            fault.mend(gateways, before)
            time.sleep(SETTLED_SECONDS)

        # On its way back it has taken nothing, and no client has noticed it.
        assert gateways.holder() == holder
        assert asked.failed(mended) == []
        # Between two looks it may have moved; a split lasts.
        assert asked.both < 1
    until(lambda: ask(gateways.address(before)) == "ok", "the other one serves again")
    how = f"ended {ended - struck:.1f} s" if ended else "told nothing"
    print(
        f"{fault.name}: answered again after {gap:.1f} s; {len(asked.failed())} of "
        f"{len(asked.answers)} requests failed; the stream: {how}"
    )


def test_a_stopped_one_tells_its_clients(gateways: Pair) -> None:
    """A stream whose address has moved hears nothing: it has to be ended before."""
    before = gateways.holder()
    stream = gateways.stream(3000)
    until(lambda: stream.read, "the stream has begun")
    gateways.ssh(before, f"systemctl stop {UNIT}")

    assert not stream.whole(20)
    assert stream.ended is not None
    until(lambda: gateways.holders() == [gateways.other(before)], "it has moved")
    gateways.ssh(before, f"systemctl start {UNIT}")


def test_a_reload_moves_nothing_and_cuts_nothing(gateways: Pair) -> None:
    before = gateways.holder()
    with gateways.asking() as asked:
        stream = gateways.stream(50)
        for node in GATEWAYS:
            gateways.ssh(node, f"systemctl reload {UNIT}")
        assert stream.whole(60)
    assert (gateways.holder(), asked.failed()) == (before, [])


def test_a_drain_reaches_both(gateways: Pair) -> None:
    """The other one sends a drained server nothing either, when the address comes to it."""
    drained, stays = GPU_NODES
    run = gateways.gpufleet("drain", gateways.inventory, drained, "--why", "test", "--json")
    assert run.status == 0, run.output
    try:
        for node in GATEWAYS:
            kept = json.loads(gateways.ssh(node, "cat /var/lib/gpufleet/gateway/drained.json"))
            assert kept["drained"] == [f"tiny/{drained}.tiny-0"]
        before = gateways.holder()
        gateways.ssh(before, f"systemctl restart {UNIT}")
        until(lambda: gateways.holders() == [gateways.other(before)], "it has moved")
        count = requests(gateways, drained)
        for node in (*GATEWAYS, *GATEWAYS):
            until(lambda node=node: ask(gateways.address(node)) == "ok", f"{node} serves")
        assert requests(gateways, drained) == count
    finally:
        run = gateways.gpufleet("undrain", gateways.inventory, drained)
    assert run.status == 0, run.output

    def both_used() -> bool:
        for node in GATEWAYS:
            for _ in range(4):
                ask(gateways.address(node))
        return requests(gateways, drained) > count

    until(both_used, f"{drained} gets requests again")
    assert requests(gateways, stays) > 0


def requests(lab: Pair, node: str) -> int:
    """Return how many prompts a stand-in has had, as its journal says."""
    said = lab.ssh(node, "journalctl -q -o cat -u 'vllm-tiny-*' | grep -c asked: || :")
    return int(said)


def test_a_changed_setting_comes_into_force_on_both(gateways: Pair) -> None:
    """And a dry run says so before: what keepalived runs with is not only what its file says."""
    gateways.lay_out(router_id=52)
    dry = gateways.deploy("--dry", "--json")
    run = gateways.deploy("-y", "--json")

    assert sorted(dry.changed[IN_FORCE]) == sorted(GATEWAYS), dry.output
    assert run.status == 0, run.output
    assert sorted(run.changed) == sorted(dry.changed)
    for node in GATEWAYS:
        younger = (
            "test $(stat -c %Y /proc/$(systemctl show -P MainPID keepalived)) -ge "
            "$(stat -c %Y /etc/keepalived/keepalived.conf) && grep -c 52 /etc/keepalived/*.conf"
        )
        assert gateways.ssh(node, younger).strip() == "1"
    until(lambda: len(gateways.holders()) == 1, "one has the address")
    until(lambda: ask(gateways.shared) == "ok", "it answers")
    assert gateways.deploy("-y", "--json").changed == {}


def test_one_that_is_not_declared_any_more_goes_and_the_other_answers(gateways: Pair) -> None:
    stays, goes = GATEWAYS
    (gateways.project / "host_vars").mkdir()
    (gateways.project / f"host_vars/{goes}.yml").write_text("gateway: null\n")
    there = f"systemctl is-active -q {UNIT} keepalived || test -e /etc/systemd/system/{UNIT}"

    dry = gateways.deploy("--dry", "--json")
    assert dry.status == 0, dry.output
    assert gateways.ssh(goes, f"({there}) && echo there").strip() == "there"
    run = gateways.deploy("-y", "--json")

    assert run.status == 0, run.output
    # Under a condition: that nothing has failed before.
    plan = json.loads(dry.stdout)["plan"]
    foretold = {each["name"]: each["hosts_with_conditional_change"] for each in plan}
    assert {name: nodes for name, nodes in foretold.items() if nodes} == run.changed
    assert gateways.ssh(goes, f"({there}) || echo gone").strip() == "gone"
    until(lambda: gateways.holders() == [stays], "the one that stays has the address")
    until(lambda: ask(gateways.shared) == "ok", "it answers")
    assert gateways.deploy("-y", "--json").changed == {}


MONITORS = ("prometheus.service", "prometheus-alertmanager.service")


def test_the_last_one_and_the_last_monitoring_node_go_only_when_they_are_named(
    gateways: Pair,
) -> None:
    """Their group may be misspelt. What is recorded stays; a second run changes nothing."""
    first, second = GATEWAYS
    own = gateways.project / "host_vars"
    own.mkdir(exist_ok=True)
    (own / f"{first}.yml").write_text("")
    (own / f"{second}.yml").write_text("gateway: null\nmonitoring: {}\n")
    for deploy in ("gateway", "monitoring"):
        run = gateways.pyinfra("-y", deploy=f"deploys/{deploy}.py", seconds=600)
        assert run.status == 0, run.output
    watched = "systemctl is-active " + " ".join(MONITORS)
    assert gateways.ssh(second, watched).split() == ["active"] * 2
    recorded = "find /var/lib/prometheus -name wal -type d"
    assert gateways.ssh(second, recorded)

    for node in GATEWAYS:
        (own / f"{node}.yml").write_text("gateway: null\n")
    for node, deploy in ((first, "gateway"), (second, "monitoring")):
        refused = gateways.pyinfra("-y", deploy=f"deploys/{deploy}.py", seconds=600)
        assert refused.status != 0, refused.output
        assert f"{node}: `{deploy}` runs on this node" in refused.output
        assert f"`absent: {{parts: [{deploy}]}}`" in refused.output
        assert "Traceback" not in refused.output
    assert ask(gateways.address(first)) == "ok"
    assert gateways.ssh(second, watched).split() == ["active"] * 2

    (own / f"{second}.yml").write_text("gateway: null\nabsent: {parts: [monitoring]}\n")
    named = ("--data", 'absent={"parts": ["gateway"]}')
    for arguments, deploy in (((), "monitoring"), (named, "gateway")):
        run = gateways.pyinfra("-y", *arguments, deploy=f"deploys/{deploy}.py", seconds=600)
        assert run.status == 0, run.output
        again = gateways.pyinfra(
            *("-y", "--json", *arguments), deploy=f"deploys/{deploy}.py", seconds=600
        )
        assert (again.status, again.changed) == (0, {}), again.output
    assert gateways.ssh(second, recorded)
    installed = "dpkg-query -W -f '${db:Status-Status}\\n' haproxy keepalived prometheus || true"
    for node in GATEWAYS:
        assert "installed" not in gateways.ssh(node, installed).split()
        units = " ".join((UNIT, "keepalived.service", *MONITORS))
        assert "active" not in gateways.ssh(node, f"systemctl is-active {units} || true").split()
    kept = "ls -A /etc/gpufleet/gateway /etc/gpufleet/prometheus /var/lib/gpufleet/gateway"
    assert gateways.ssh(first, f"{kept} 2>/dev/null || true") == ""


def test_one_part_is_taken_from_one_node_by_hand(gateways: Pair) -> None:
    """With deploys/absent.py; the next deploy of a part that is still declared brings it again."""
    own = gateways.project / "host_vars"
    own.mkdir(exist_ok=True)
    for node in GATEWAYS:
        (own / f"{node}.yml").unlink(missing_ok=True)
    run = gateways.deploy("-y")
    assert run.status == 0, run.output
    until(lambda: ask(gateways.shared) == "ok", "they answer")
    stays, goes = GATEWAYS
    typed = ("--limit", goes, "--data", 'absent={"parts": ["gateway"]}')
    there = f"systemctl is-active -q {UNIT} keepalived"

    dry = gateways.pyinfra("--dry", *typed, deploy="deploys/absent.py")
    assert dry.status == 0, dry.output
    assert f"stop and remove unit {UNIT}" in dry.output
    gateways.ssh(goes, there)
    run = gateways.pyinfra("-y", *typed, deploy="deploys/absent.py")

    assert run.status == 0, run.output
    assert gateways.ssh(goes, f"{there} || echo gone").strip() == "gone"
    assert gateways.ssh(goes, "test -e /etc/gpufleet/gateway || echo gone").strip() == "gone"
    until(lambda: gateways.holders() == [stays], "the other one has the address")
    until(lambda: ask(gateways.shared) == "ok", "it answers")
    assert gateways.deploy("-y").status == 0
    gateways.ssh(goes, there)
