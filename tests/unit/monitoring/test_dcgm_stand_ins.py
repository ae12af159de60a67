"""The lab's stand-ins of DCGM serve what the simulated GPUs are in, and faults move their series.

Both programs run as they run on lab nodes, against the built simulated NVML; pages are read by
Prometheus' own client library.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
import urllib.error
from contextlib import ExitStack

import bcrypt
import pytest
import yaml

from gpufleet.monitoring import dcgm_counters
from gpufleet.monitoring.metrics import dcgm_metrics
from gpufleet.monitoring.rules.files import groups
from lab import nvml
from lab.faults import FAULTS
from tests.support.checkout import ROOT
from tests.unit.monitoring import dcgm
from tests.unit.monitoring.dcgm import INTERVAL, ON_NODE

pytestmark = pytest.mark.slow

LINK_STATE = "DCGM_FI_DEV_NVLINK_GET_STATE"
LINKS = f"{LINK_STATE}, gauge, State of one NVLink\n"
LAST_XID = "DCGM_FI_DEV_XID_ERRORS"
XIDS = "DCGM_EXP_XID_ERRORS_COUNT"
CLOCKS = "DCGM_EXP_CLOCK_EVENTS_COUNT"
WITH_DCGM = ("a100x8", "h100x8", "b200x8", "t4x1")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def h100(library, tmp_path_factory):
    """Eight H100 that every test leaves healthy; what happened to a GPU is not forgotten."""
    asked = dcgm_counters.counters(profiling=True) + LINKS.encode()
    with dcgm.node(tmp_path_factory.mktemp("h100"), library, "h100x8", csv=asked) as node:
        yield node


@pytest.fixture
def healthy(h100):
    """The same; broken only for one test."""
    yield h100
    h100.breaks()


def refused(directory, *options):
    """What the exporter says when it ends at its start."""
    _, exporter = dcgm.installed(directory)
    done = subprocess.run(
        [sys.executable, "-I", exporter, *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def state(node):
    """All series but those that count what has happened."""
    return {
        (name, labels): value
        for (name, labels), value in node.series().items()
        if name not in (XIDS, CLOCKS, LAST_XID)
    }


# --- the list of counters


def test_the_whole_list_is_served_or_says_where_it_is(library, tmp_path):
    """
    A metric without `only` is on every healthy node, one with it on some; a dead alert is one whose
    metric nobody serves. Only profiling is nowhere in the lab.
    """
    with ExitStack() as nodes:
        served = {}
        for profile in WITH_DCGM:
            (home := tmp_path / profile).mkdir()
            running = nodes.enter_context(dcgm.node(home, library, profile))
            running.series()
            time.sleep(2 * INTERVAL)  # a bandwidth needs two samples
            served[profile] = {name for name, _ in running.series()}
    somewhere = set.union(*served.values())
    for metric in dcgm_metrics.METRICS:
        if metric.name == LAST_XID:  # before the first one there is none
            assert metric.name not in somewhere
        elif metric.name.startswith("DCGM_FI_PROF_"):
            assert metric.only
            assert metric.name not in somewhere
        elif metric.only:
            assert metric.name in somewhere, metric.name
        else:
            missing = [profile for profile, names in served.items() if metric.name not in names]
            assert not missing, (metric.name, missing)


def test_every_metric_of_the_list_is_a_field_of_the_exporter():
    """By the names that dcgm-exporter 4.8.2 was built with; else it would not start."""
    known = set((ON_NODE / "dcgm-fields.txt").read_text().split())
    ours = {metric.name for metric in dcgm_metrics.METRICS}

    assert {name for name in ours if not name.startswith("DCGM_EXP_")} <= known


def test_a_field_that_nobody_knows_ends_the_exporter(tmp_path):
    (asked := tmp_path / "counters.csv").write_text("DCGM_FI_DEV_GPU_TEMPERATURE, gauge, x\n")

    assert "DCGM_FI_DEV_GPU_TEMPERATURE" in refused(tmp_path, "-f", asked)


def test_a_field_that_is_not_simulated_is_absent(library, tmp_path):
    """Not 0: an alert that rests on it must be seen to have nothing to rest on."""
    asked = b"DCGM_FI_DEV_GPU_TEMP, gauge, t\nDCGM_FI_DEV_VGPU_LICENSE_STATUS, gauge, v\n"
    with dcgm.node(tmp_path, library, "t4x1", csv=asked) as node:
        assert {name for name, _ in node.series()} == {"DCGM_FI_DEV_GPU_TEMP"}
        assert "VGPU" not in node.get()


@pytest.mark.parametrize("name", ["nv_hostengine.py", "dcgm_exporter.py"])
def test_programs_run_on_the_oldest_python_of_nodes(name):
    ast.parse((ON_NODE / name).read_text(), feature_version=(3, 8))


def test_the_document_names_faults_series_and_alerts_that_there_are():
    """docs/develop/lab.md, "Which fault moves which series"."""
    document = (ROOT / "docs/develop/lab.md").read_text()
    table = document.partition("### Which fault moves which series")[2].partition("\n## ")[0]
    fields = set((ON_NODE / "dcgm-fields.txt").read_text().split()) | {XIDS, CLOCKS}
    alerts = {alert.name for group in groups({}) for alert in group.alerts}
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| `")]

    assert len(rows) > 20
    for faults, series, alert in rows:
        assert set(re.findall(r"`([^`]+)`", faults)) <= set(FAULTS)
        assert set(re.findall(r"DCGM_\w+", series)) <= fields
        named = set(re.findall(r"\b[A-Z]\w+[a-z]\b", alert))
        assert named
        assert named <= alerts


# --- healthy


def test_a_healthy_node_says_what_its_profile_says(healthy):
    """Asked of the profile, not of the library."""
    profile = healthy.healthy.profile
    units = {
        "DCGM_FI_DEV_GPU_TEMP": ("temp.gpu", 1),
        "DCGM_FI_DEV_MEMORY_TEMP": ("temp.mem", 1),
        "DCGM_FI_DEV_SLOWDOWN_TEMP": ("temp.slowdown", 1),
        "DCGM_FI_DEV_POWER_USAGE": ("power.draw_mw", 1000),
        "DCGM_FI_DEV_SM_CLOCK": ("clocks.sm", 1),
        "DCGM_FI_DEV_FB_RESERVED": ("mem.reserved_mib", 1),
    }
    for metric, (key, per) in units.items():
        wanted = {str(gpu): float(profile.gpu(gpu, key)) / per for gpu in range(8)}
        assert healthy.values(metric) == wanted
    assert set(healthy.values("DCGM_FI_DEV_FABRIC_MANAGER_STATUS").values()) == {3}


def test_labels_say_which_gpu_it_is(healthy):
    found = {dict(labels)["UUID"] for name, labels in healthy.series() if name == XIDS}

    assert found == {healthy.healthy.profile.gpu(gpu, "uuid") for gpu in range(8)}


# --- faults that change what is


MOVED = {
    "ecc-uncorrected": {"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 2, "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL": 2},
    "ecc-corrected-flood": {"DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": 60000000},
    "remap-pending": {
        "DCGM_FI_DEV_ROW_REMAP_PENDING": 1,
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": 1,
    },
    "remap-failed": {"DCGM_FI_DEV_ROW_REMAP_FAILURE": 1},
    "hot": {"DCGM_FI_DEV_GPU_TEMP": 90, "DCGM_FI_DEV_GPU_TEMP_LIMIT": -1},
    "hot-memory": {"DCGM_FI_DEV_MEMORY_TEMP": 96},
    "throttle-hw-thermal": {"DCGM_FI_DEV_CLOCKS_EVENT_REASONS": 0x48},
    "throttle-power-brake": {"DCGM_FI_DEV_CLOCKS_EVENT_REASONS": 0x88},
    "power-capped": {"DCGM_FI_DEV_ENFORCED_POWER_LIMIT": 200},
    "foreign-memory": {"DCGM_FI_DEV_FB_USED": 40779},
    "fabric-resources": {"DCGM_FI_DEV_FABRIC_MANAGER_STATUS": 4},
}


@pytest.mark.parametrize("first", range(0, len(MOVED), 6))
def test_a_fault_moves_the_series_of_its_gpu_and_clearing_it_moves_them_back(healthy, first):
    """Six at once, each on a GPU of its own; two GPUs stay as they are."""
    before, on = state(healthy), dict(enumerate(list(MOVED)[first : first + 6], 1))

    healthy.breaks(*((fault, gpu) for gpu, fault in on.items()))
    for gpu, fault in on.items():
        for metric, value in MOVED[fault].items():
            healthy.until(lambda m=metric, v=value, g=gpu: healthy.values(m).get(str(g)) == v)
    moved = {
        dict(labels)["gpu"]
        for (name, labels), value in state(healthy).items()
        if before[name, labels] != value
    }
    healthy.breaks()

    assert moved == {str(gpu) for gpu in on}
    healthy.until(lambda: state(healthy) == before)


@pytest.mark.parametrize(
    ("fault", "status"), [("fabric-not-started", 1), ("fabric-in-progress", 2)]
)
def test_the_fabric_is_that_of_all_gpus(healthy, fault, status):
    healthy.breaks((fault, 0))

    metric = "DCGM_FI_DEV_FABRIC_MANAGER_STATUS"
    healthy.until(lambda: healthy.values(metric) == dict.fromkeys(map(str, range(8)), status))


def test_a_dead_nvlink_is_a_series_of_that_link(healthy):
    """Under the labels that the exporter gives links, which are not those of GPUs."""
    healthy.breaks(("nvlink-dead-link", 2))

    healthy.until(lambda: healthy.values(LINK_STATE, nvlink="7")["2"] == 0)
    down = [dict(labels) for (name, labels), value in healthy.series().items()
            if name == LINK_STATE and value == 0]  # fmt: skip
    assert down == [{"nvlink": "7", "gpu": "2", "gpu_uuid": healthy.healthy.profile.gpu(2, "uuid")}]


RISING = {
    "nvlink-errors": "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "nvlink-errors-fatal": "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    "pcie-replays": "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
    "throttle-hw-thermal": "DCGM_FI_DEV_THERMAL_VIOLATION",
    "throttle-sw-cap": "DCGM_FI_DEV_POWER_VIOLATION",
}


def test_counters_rise_as_long_as_a_fault_lasts(healthy):
    """So that a rate is seen; other GPUs' stay."""
    before = healthy.series()
    on = {str(gpu): (fault, RISING[fault]) for gpu, fault in enumerate(RISING, 1)}
    healthy.breaks(*((fault, int(gpu)) for gpu, (fault, _) in on.items()))
    for gpu, (_, metric) in on.items():
        healthy.until(lambda m=metric, g=gpu: healthy.values(m)[g] > 0)

    for _ in range(2):
        now = {gpu: healthy.values(metric)[gpu] for gpu, (_, metric) in on.items()}
        for gpu, (_, metric) in on.items():
            healthy.until(lambda m=metric, g=gpu, n=now: healthy.values(m)[g] > n[g])

    after = healthy.series()
    for gpu, (_, metric) in on.items():
        others = [key for key in after if key[0] == metric and ("gpu", gpu) not in key[1]]
        assert all(after[key] == before[key] for key in others)
        assert len(others) == 7


@pytest.mark.long
def test_nvlink_5_counts_in_series_of_its_own(library, tmp_path):
    with dcgm.node(tmp_path, library, "b200x8") as node:
        node.breaks(("nvlink-errors", 6))
        errors = "DCGM_FI_DEV_NVLINK_COUNT_RX_ERRORS"
        node.until(lambda: node.values(errors)["6"] > 70000)

        assert node.values(errors)["0"] == 0


# --- Xids


def test_an_xid_is_counted_and_stays_the_last_one(healthy):
    """The gauge keeps it when the fault is over: that is why no alert may rest on it."""
    assert healthy.values(XIDS, window_size_in_ms="300000")["3"] == 0
    assert "3" not in healthy.values(LAST_XID)

    healthy.breaks(("xid-79", 3))
    healthy.until(lambda: healthy.values(XIDS, xid="79") == {"3": 1})
    healthy.until(lambda: healthy.values(LAST_XID, err_code="79") == {"3": 79})

    healthy.breaks()
    healthy.breaks(("xid-31-info", 3))
    healthy.until(lambda: healthy.values(XIDS, xid="31") == {"3": 1})
    healthy.breaks()
    time.sleep(2 * INTERVAL)
    healthy.until(lambda: healthy.values(LAST_XID, err_code="31") == {"3": 31})
    assert healthy.values(XIDS, xid="79") == {"3": 1}


def test_the_same_xid_again_is_counted_again(healthy):
    for times in (1, 3):
        healthy.breaks(lines=f"gpu.4.xid.63 = {times}")
        healthy.until(lambda times=times: healthy.values(XIDS, xid="63") == {"4": times})


def test_an_xid_leaves_the_window(library, tmp_path):
    """-x is its length; a GPU without any has one series of 0 that names none."""
    with dcgm.node(tmp_path, library, "t4x1", "-x", "2000") as node:
        node.breaks(("xid-79", 0))
        node.until(lambda: node.values(XIDS, xid="79") == {"0": 1})
        node.until(lambda: not node.values(XIDS, xid="79"))

        assert node.values(XIDS, window_size_in_ms="2000") == {"0": 0}
        node.until(lambda: node.values(LAST_XID) == {"0": 79})


@pytest.mark.long
def test_what_happened_before_the_engine_started_is_not_told(library, tmp_path):
    """The kernel log has it; DCGM has not."""
    with dcgm.node(tmp_path, library, "t4x1", broken=(("xid-79", 0),)) as node:
        assert node.values(LAST_XID) == {}
        node.breaks(("xid-79", 0), ("xid-31-info", 0))
        node.until(lambda: node.values(XIDS, xid="31") == {"0": 1})

        assert node.values(XIDS) == {"0": 1}


def test_after_a_fatal_xid_nothing_is_read_any_more(library, tmp_path):
    """DCGM 4.6 leaves the driver alone after a 119, until its engine is restarted."""
    with dcgm.node(tmp_path, library, "h100x8") as node:
        node.breaks(("xid-119", 2))
        node.until(lambda: not node.values("DCGM_FI_DEV_GPU_TEMP"))
        node.breaks()

        assert node.values(XIDS, xid="119") == {"2": 1}
        assert {name for name, _ in node.series()} == {XIDS, CLOCKS}


def test_clock_events_are_counted_by_name(healthy):
    assert "6" not in healthy.values(CLOCKS, clock_event="hw_thermal")
    healthy.breaks(("throttle-hw-thermal", 6))

    healthy.until(lambda: healthy.values(CLOCKS, clock_event="hw_thermal").get("6", 0) >= 2)
    assert "0" not in healthy.values(CLOCKS, clock_event="hw_slowdown")
    assert healthy.values(CLOCKS, clock_event="gpu_idle")["0"] > 0


# --- what is lost, hung or gone


@pytest.mark.parametrize(
    "faults", [(("gpu-lost", 1), ("gpu-lost-999", 6)), (("gpu-missing", 1),)], ids=["lost", "gone"]
)
def test_a_lost_gpu_has_no_values_until_it_is_back(healthy, faults):
    """By its UUID: the others keep their numbers, even where NVML counts them anew."""
    before = healthy.values("DCGM_FI_DEV_GPU_TEMP")
    left = set(before) - {str(gpu) for _, gpu in faults}
    healthy.breaks(*faults)

    healthy.until(lambda: set(healthy.values("DCGM_FI_DEV_GPU_TEMP")) == left)
    names = {name for name, labels in healthy.series() if ("gpu", "1") in labels}
    assert names == {XIDS, CLOCKS}

    healthy.breaks()
    healthy.until(lambda: healthy.values("DCGM_FI_DEV_GPU_TEMP") == before)


@pytest.mark.long
def test_a_hung_driver_hangs_a_scrape_and_not_the_programs(library, tmp_path):
    """As it does with DCGM: Prometheus gives up first, and `up` is 0."""
    with dcgm.node(tmp_path, library, "t4x1") as node:
        node.breaks(("gpu-hang", 0))
        time.sleep(3 * INTERVAL)

        with pytest.raises(OSError, match="timed out"):
            node.get(timeout=2)
        assert node.engine.poll() is None
        assert node.exporter.poll() is None


@pytest.mark.long
def test_a_driver_that_was_upgraded_is_served_until_the_engine_restarts(library, tmp_path):
    """The engine has the old library open, as the real one has; a new one meets the mismatch."""
    with dcgm.node(tmp_path, library, "t4x1") as node:
        node.breaks(("mismatch", 0))
        time.sleep(3 * INTERVAL)

        assert node.values("DCGM_FI_DEV_GPU_TEMP")

    with (
        pytest.raises(AssertionError, match="it ended with 1"),
        dcgm.node(tmp_path, library, "t4x1", broken=(("mismatch", 0),)),
    ):
        pass


def test_the_exporter_ends_with_its_engine(library, tmp_path):
    """systemd starts it again; one that went on would serve nothing for ever."""
    with dcgm.node(tmp_path, library, "t4x1") as node:
        node.engine.kill()
        node.engine.wait()
        with pytest.raises(OSError):  # noqa: PT011  # reset or closed, by chance
            node.get()

        assert node.exporter.wait(timeout=60) == 1


@pytest.mark.long
def test_an_exporter_without_an_engine_to_ask_runs_its_own(library, tmp_path):
    with dcgm.node(tmp_path, library, "t4x1", remote=False) as node:
        node.breaks(("hot", 0))

        node.until(lambda: node.values("DCGM_FI_DEV_GPU_TEMP")["0"] > 80)


# --- who may ask


@pytest.fixture(scope="module")
def credentials(tmp_path_factory):
    """A certificate of this machine's own with its key, and a file that says who may ask."""
    home = tmp_path_factory.mktemp("credentials")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "1", "-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", home / "key.pem", "-out", home / "certificate.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    hashed = bcrypt.hashpw(b"right: secret", bcrypt.gensalt(4)).decode()
    config = {
        "tls_server_config": {"cert_file": "certificate.pem", "key_file": "key.pem"},
        "basic_auth_users": {"prometheus": hashed},
    }
    (home / "web-config.yml").write_text("# Who may ask\n" + yaml.safe_dump(config))
    return home


def test_tls_and_a_password_are_asked_for(library, tmp_path, credentials):
    """The same file as node exporter takes; a scrape without either is refused."""
    config, trust = credentials / "web-config.yml", credentials / "certificate.pem"
    with dcgm.node(
        tmp_path, library, "t4x1", "--web-config-file", str(config), scheme="https"
    ) as node:
        assert "DCGM_FI_DEV_GPU_TEMP" in node.get(trust=trust, login="prometheus:right: secret")
        for login in ("prometheus:wrong", "nobody:right: secret", ""):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                node.get("/health", trust=trust, login=login)
        node.scheme = "http"
        with pytest.raises(OSError):  # noqa: PT011  # no answer at all
            node.get()


@pytest.mark.parametrize(
    "text",
    [
        "tls_server_config:\n  cert_file: certificate.pem\n",
        "tls_server_config:\n  cert_file: gone.pem\n  key_file: gone.pem\n",
        "tls_server_config:\n  cert: certificate.pem\n",
        "basic_auth_users:\n  prometheus: plain\n",
        "basic_auth: {prometheus: x}\n",
        "web\n",
    ],
)
def test_a_file_that_cannot_be_followed_ends_the_exporter(tmp_path, text):
    """One that went on would serve everybody."""
    (wrong := tmp_path / "wrong.yml").write_text(text)

    assert "wrong.yml: " in refused(tmp_path, "--web-config-file", wrong)
