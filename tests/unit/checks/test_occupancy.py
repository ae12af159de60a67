"""Whether our replicas may have a GPU to themselves."""

from __future__ import annotations

import pytest

from gpufleet.checks.finding import Severity
from tests.support.rows import each_row

ABSENT = {"missing": "absent"}
UNREAD = {"missing": "unknown", "code": 999}
NOT_SUPPORTED = {"missing": "not_supported", "code": 3}
SERVES_LLAMA = {
    "vllm": {"version": "0.32.0", "lock": "locks/vllm-cuda.txt", "listen": "127.0.0.1"},
    "serving": {"llama": {"model": "/models/llama", "tensor_parallel": 1, "port": 8000}},
}
MIB = 1 << 20


def process(pid, name, unit, mib=1000, uid=1000):
    return {
        "pid": pid,
        "name": name,
        "unit": unit,
        "usedGpuMemory": None if mib is None else mib * MIB,
        "uid": uid,
    }


OURS = process(100, "VLLM::Worker", "vllm-llama-0.service", 30_000, uid=998)
TRAINING = process(4711, "python3", "session-3.scope", 20_000)
OLLAMA = process(4712, "ollama", "ollama.service", 20_000)
NOBODY = process(4713, ABSENT, ABSENT, 20_000, uid=ABSENT)
XORG = process(900, "Xorg", "display-manager.service", 60)
DESKTOP = process(901, "gnome-shell", "user@1000.service", 150)


# --- how it is set up


def test_persistence_mode_off_is_a_warning(document, judged):
    found = document("h100x8")
    found["gpus"][2]["persistence_mode"] = 0

    said = judged(found)

    assert said.troubles == {("persistence", "warn", 2)}
    assert "nvidia-persistenced" in said.text("persistence")


@pytest.mark.parametrize(
    ("mode", "severity", "words"),
    [
        ((1, 1), "block", "is on: the GPU is partitioned"),
        ((1, 0), "block", "until the GPU is reset"),
        ((0, 1), "warn", "next reset"),
    ],
)
def test_mig_makes_a_gpu_unfit_and_mig_to_come_is_a_warning(
    document, judged, mode, severity, words
):
    found = document("h100x8")
    found["gpus"][2]["mig_mode"] = dict(zip(("current", "pending"), mode, strict=True))

    said = judged(found)

    assert said.troubles == {("mig", severity, 2)}
    assert words in said.worst("mig").found
    assert "nvidia-smi -mig 0 -i 2" in said.text("mig")


def test_a_board_without_mig_passes(document, judged):
    assert judged(document("l40sx8")).worst("mig").severity is Severity.OK


@pytest.mark.parametrize(
    ("mode", "words"), [(1, "exclusive thread"), (2, "prohibited"), (3, "exclusive process")]
)
def test_a_compute_mode_that_turns_processes_away_makes_a_gpu_unfit(document, judged, mode, words):
    found = document("h100x8")
    found["gpus"][2]["compute_mode"] = mode

    said = judged(found)

    assert said.troubles == {("compute-mode", "block", 2)}
    assert words in said.worst("compute-mode").found


@pytest.mark.parametrize(
    ("fact", "check"),
    [("persistence_mode", "persistence"), ("mig_mode", "mig"), ("compute_mode", "compute-mode")],
)
def test_a_mode_that_could_not_be_read_is_unknown(document, judged, fact, check):
    found = document("h100x8")
    found["gpus"][2][fact] = UNREAD

    assert judged(found).troubles == {(check, "unknown", 2)}


# --- foreign-processes


def with_processes(document, computing=(), drawing=(), mps=(), gpu=2):
    facts = document["gpus"][gpu]
    facts.update(
        processes=list(computing), graphics_processes=list(drawing), mps_processes=list(mps)
    )
    facts["memory"]["used"] = sum(at["usedGpuMemory"] or 0 for at in (*computing, *drawing, *mps))
    return document


def test_our_own_units_are_at_home(document, judged):
    found = with_processes(document("h100x8"), [OURS, {**OURS, "pid": 101}])

    assert judged(found).troubles == set()


def test_servers_that_share_a_gpu_are_no_strangers_to_each_other(document, judged):
    units = [f"vllm-{name}-0.service" for name in ("chat", "embed", "rerank")]
    beside = [process(100 + at, "VLLM::EngineCore", unit) for at, unit in enumerate(units)]

    assert judged(with_processes(document("h100x8"), beside)).troubles == set()


@pytest.mark.parametrize(
    ("computing", "words"),
    [
        (TRAINING, ["pid 4711 python3 (session-3.scope, 20000 MiB)", "ps -fp 4711"]),
        (OLLAMA, ["ollama.service", "systemctl disable --now ollama.service"]),
        ({**NOBODY, "uid": 1000}, ["pid 4713 of unknown owner (20000 MiB)"]),
        (process(5, "python3", "session-3.scope", None), ["pid 5 python3 (session-3.scope)"]),
    ],
)
def test_whoever_else_computes_makes_a_gpu_unfit(document, judged, computing, words):
    said = judged(with_processes(document("h100x8"), [OURS, computing]))

    assert said.troubles == {("foreign-processes", "block", 2)}
    assert all(word in said.text("foreign-processes") for word in words)
    assert "VLLM" not in said.worst("foreign-processes").found


def test_a_client_of_mps_computes_too(document, judged):
    found = with_processes(document("h100x8"), mps=[TRAINING])

    assert judged(found).troubles == {("foreign-processes", "block", 2)}


@each_row(
    "unit",
    ["my-vllm-1.service", "vllm-bob.service", "vllm-.service", "vllm-0.service", "vllm-a-0.scope"],
)
@each_row("settings", [None, "declared"])
def test_a_unit_that_only_sounds_like_ours_is_foreign(document, judged, unit, settings):
    """The planner's names are vllm-MODEL-NUMBER.service, whatever else begins so."""
    found = with_processes(document("h100x8"), [process(6, "python3", unit)])

    said = judged(found, SERVES_LLAMA if settings else None)
    assert ("foreign-processes", "block", 2) in said.troubles


@pytest.mark.parametrize(
    ("unit", "severity"), [("vllm-llama-11.service", "ok"), ("vllm-qwen-0.service", "warn")]
)
def test_a_unit_of_a_model_that_is_not_declared_is_a_warning(document, judged, unit, severity):
    """A deploy that was told to serve something else has to be let in to stop it."""
    found = with_processes(document("h100x8"), [process(6, "VLLM::Worker", unit)])

    assert judged(found).worst("foreign-processes", 2).severity is Severity.OK
    said = judged(found, SERVES_LLAMA)
    assert said.worst("foreign-processes", 2).severity.word == severity
    assert severity == "ok" or "models in group_vars" in said.text("foreign-processes", 2)
    remedy = " ".join(step.text for step in said.worst("foreign-processes", 2).remedy)
    assert severity == "ok" or f"`systemctl cat {unit}`" in remedy


@pytest.mark.parametrize("missing", ["absent", "not_found"])
def test_a_process_that_has_ended_meanwhile_is_no_trouble(document, judged, missing):
    """Root sees every PID: one that is gone from /proc was there for the driver alone."""
    ended = {**NOBODY, "name": {"missing": missing}}
    found = with_processes(document("h100x8"), [ended], [ended])
    found["gpus"][2]["memory"]["used"] = 0

    said = judged(found)

    assert said.troubles == set()
    assert said.worst("foreign-processes", 2).severity is Severity.INFO
    assert "ended meanwhile: pid 4713" in said.worst("foreign-processes", 2).found


def test_a_desktop_that_has_ended_meanwhile_is_no_trouble(document, judged):
    found = with_processes(document("rtx4090x2"), drawing=[NOBODY], gpu=0)
    found["gpus"][0]["memory"]["used"] = 0

    assert judged(found).troubles == set()


def test_what_an_ended_process_leaves_is_memory_of_nobody(document, judged):
    found = with_processes(document("h100x8"), [NOBODY])

    assert judged(found).troubles == {("foreign-memory", "block", 2)}


def test_root_in_a_container_may_not_see_a_process_that_runs(document, judged):
    found = with_processes(document("h100x8"), [NOBODY])
    found["system"]["units"] = {"missing": "absent", "detail": "systemd does not run here"}

    assert ("foreign-processes", "block", 2) in judged(found).troubles


@pytest.mark.parametrize(
    "name",
    ["nvidia-cuda-mps-server", "nvidia-cuda-mps", "/usr/bin/nvidia-cuda-mps-server",
     "nv-hostengine"],
)  # fmt: skip
def test_nvidias_own_services_are_no_trouble_and_hide_no_memory(document, judged, name):
    helper = process(77, name, "nvidia-mps.service", 300, uid=0)
    found = with_processes(document("h100x8"), [helper], mps=[helper])
    found["gpus"][2]["memory"]["used"] = 300 * MIB

    said = judged(found)
    assert said.troubles == set()
    assert said.worst("foreign-processes", 2).severity is Severity.INFO

    found["gpus"][2]["memory"]["used"] = 70_000 * MIB
    assert judged(found).troubles == {("foreign-memory", "block", 2)}


def test_processes_that_only_root_may_see_are_unknown_and_not_foreign(document, judged):
    """With hidepid the SSH user sees nobody's unit, not even that of our own workers."""
    found = with_processes(document("h100x8"), [NOBODY])
    found["user"]["uid"] = 1000

    said = judged(found)

    assert said.troubles == {("foreign-processes", "unknown", 2)}
    assert "whose details only root can see" in said.worst("foreign-processes").found


def test_a_desktop_that_only_draws_is_a_warning(document, judged):
    found = with_processes(document("rtx4090x2"), drawing=[XORG, DESKTOP], gpu=0)

    said = judged(found)

    assert said.troubles == {("foreign-processes", "warn", 0)}
    assert "pid 900 Xorg" in said.worst("foreign-processes").found


@pytest.mark.parametrize(
    "drawing",
    [process(902, "blender", "user@1000.service", 4000), {**NOBODY, "pid": 9, "uid": 1000}],
)
def test_drawing_that_leaves_vllm_too_little_memory_makes_a_gpu_unfit(document, judged, drawing):
    found = with_processes(document("rtx4090x2"), drawing=[XORG, drawing], gpu=0)

    assert judged(found).troubles == {("foreign-processes", "block", 0)}


@pytest.mark.parametrize(
    ("mib", "severity"), [(None, "unknown"), (20, "unknown"), (20_000, "unknown")]
)
def test_who_draws_and_only_root_may_see_is_unknown(document, judged, mib, severity):
    nobody = {**NOBODY, "usedGpuMemory": None if mib is None else mib * MIB}
    found = with_processes(document("rtx4090x2"), drawing=[XORG, nobody], gpu=0)
    found["user"]["uid"] = 1000

    said = judged(found)
    assert ("foreign-processes", severity, 0) in said.troubles
    assert "whose details only root can see" in said.worst("foreign-processes").found

    blender = process(902, "blender", "user@1000.service", 4000)
    found = with_processes(found, drawing=[blender, nobody], gpu=0)
    assert ("foreign-processes", "block", 0) in judged(found).troubles


def test_who_draws_and_computes_computes(document, judged):
    found = with_processes(document("rtx4090x2"), [DESKTOP], [DESKTOP], gpu=0)

    assert judged(found).troubles == {("foreign-processes", "block", 0)}


def test_a_board_that_knows_no_graphics_is_judged_by_the_rest(document, judged):
    found = with_processes(document("h100x8"), [TRAINING])
    found["gpus"][2]["graphics_processes"] = NOT_SUPPORTED

    assert judged(found).troubles == {("foreign-processes", "block", 2)}


@pytest.mark.parametrize("kind", ["processes", "graphics_processes", "mps_processes"])
def test_processes_that_could_not_be_read_are_unknown(document, judged, kind):
    found = document("h100x8")
    found["gpus"][2][kind] = UNREAD

    said = judged(found)

    assert ("foreign-processes", "unknown", 2) in said.troubles
    assert ("foreign-memory", "unknown", 2) in said.troubles


# --- foreign-memory


@each_row(
    ("mib", "severity"),
    [(0, "ok"), (15, "ok"), (16, "warn"), (3000, "warn"), (3300, "block"), (70_000, "block")],
)
def test_memory_of_nobody(document, judged, mib, severity):
    """Of 81559 MiB, 4 % (3262) are what others may have without danger to vLLM's start."""
    found = document("h100x8")
    found["gpus"][2]["memory"]["used"] = mib * MIB

    said = judged(found)

    assert said.worst("foreign-memory", gpu=2).severity.word == severity
    assert {trouble[0] for trouble in said.troubles} <= {"foreign-memory"}
    if mib > 15:
        assert f"{mib} MiB" in said.worst("foreign-memory").found


@each_row(("mib", "severity"), [(0, "ok"), (3000, "ok"), (70_000, "unknown")])
@each_row("why", [NOT_SUPPORTED, {"missing": "function_not_found", "code": 13}])
def test_memory_on_a_board_that_lists_no_processes_may_be_anybodys(
    document, judged, mib, severity, why
):
    found = document("h100x8")
    for facts in found["gpus"]:
        facts["processes"] = why
    found["gpus"][2]["memory"]["used"] = mib * MIB

    said = judged(found)

    assert said.worst("foreign-memory", gpu=2).severity.word == severity
    assert mib < 70_000 or "by an unknown process" in said.worst("foreign-memory", gpu=2).found


def test_memory_of_a_listed_process_is_its_own(document, judged):
    assert judged(with_processes(document("h100x8"), [OURS])).troubles == set()


def test_an_old_drivers_memory_counts_its_own_reserve(document, judged):
    """The struct before R510 does not tell it: half a GiB of an idle GPU is no leak."""
    found = document("h100x8")
    del found["gpus"][2]["memory"]["reserved"]
    found["gpus"][2]["memory"]["used"] = 570 * MIB

    said = judged(found)

    assert said.troubles == set()
    assert said.worst("foreign-memory").severity is Severity.INFO


def test_memory_that_linux_manages_is_no_leak(document, judged):
    """On Grace the GPU's memory is a NUMA node: files may be cached there."""
    found = document("gb200x4")
    found["gpus"][2]["memory"]["used"] = 9000 * MIB

    assert judged(found).troubles == set()
