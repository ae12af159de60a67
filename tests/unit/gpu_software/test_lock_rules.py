"""Locks that cannot work are refused before a node is touched, naming what to change."""

from __future__ import annotations

import datetime as dt
from itertools import product
from typing import Any

import pytest

from gpufleet.artifacts.release import Wheels
from gpufleet.catalog.driver_branches import (
    BRANCHES,
    OLDEST_DRIVER,
    cuda_major,
    flavours,
    version_numbers,
)
from gpufleet.gpu_software import lock_check, lock_rules
from gpufleet.node.machine import Machine, System
from gpufleet.settings import gpu_lock, node_variables
from gpufleet.settings.gpu_lock import GpuLock
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.parse import SettingsError, parse_settings
from gpufleet.settings.variables import Origin, Variables
from tests.support.rows import each_row

REPOSITORY = {"url": "http://mirror/repos", "keyring_sha256": "a" * 64}
TOOLKIT = {"profile": "full", "branch": "13-0", "version": "13.0.3-1"}
VLLM = {"lock": "a.txt", "listen": "127.0.0.1"}


def settings(**variables: Any) -> NodeSettings:
    return parse_settings(variables)


def mistakes(**variables: Any) -> dict[str, str]:
    with pytest.raises(SettingsError) as found:
        parse_settings(variables)
    return {".".join(map(str, at)): what for at, what in found.value.mistakes}


def lock(driver: str = "580.95.05", **more: Any) -> GpuLock:
    return GpuLock.model_validate({"driver": driver, **more})


# -- what only one of two places says --------------------------------------------------------------


def test_without_a_lock_settings_are_what_they_were() -> None:
    variables = {"cuda": {"repository": REPOSITORY, "version": "13.0.3-1"}}

    assert settings(**variables).cuda == NodeSettings.model_validate(variables).cuda
    assert settings(**variables).gpu_lock is None


def test_what_the_lock_alone_says_is_filled_in() -> None:
    found = settings(
        gpu_lock={
            "driver": "580.95.05",
            "toolkit": TOOLKIT,
            "dcgm": {"version": "1:4.6.0-1", "exporter": "4.8.2-1"},
            "vllm": {"version": "0.32.0", "python": "3.12"},
        },
        cuda={"repository": REPOSITORY},
        vllm=VLLM,
    )

    assert found.cuda
    assert (found.cuda.toolkit, found.cuda.version) == ("13-0", "13.0.3-1")
    assert found.dcgm
    assert (found.dcgm.version, found.dcgm.exporter_version) == (
        "1:4.6.0-1",
        "4.8.2-1",
    )
    assert found.vllm
    assert found.vllm.version == "0.32.0"


def test_a_release_is_not_built_anew_because_its_group_was_locked() -> None:
    """Its id has the interpreter's path, so the lock's Python leaves that alone."""
    before = settings(vllm={**VLLM, "version": "0.32.0"})
    after = settings(
        vllm={**VLLM, "version": "0.32.0"},
        gpu_lock={"driver": "580", "vllm": {"version": "0.32.0", "python": "3.12"}},
    )

    assert before.vllm == after.vllm


def test_a_toolkit_that_cuda_alone_names_is_the_locks_too() -> None:
    found = settings(
        gpu_lock={"driver": "580"},
        cuda={"repository": REPOSITORY, "toolkit": "13-0", "version": "13.0.3-1"},
    )

    assert found.gpu_lock
    assert found.gpu_lock.toolkit.model_dump() == TOOLKIT


@pytest.mark.parametrize("lock", [{}, {"gpu_lock": {"driver": "580"}}])
def test_a_version_alone_is_of_the_toolkit_of_vllms_cuda(lock: dict[str, Any]) -> None:
    """The same with and without a lock, which may come later."""
    found = settings(**lock, cuda={"repository": REPOSITORY, "version": "13.0.3-1"})

    assert found.cuda
    assert (found.cuda.toolkit, found.cuda.version) == ("13-0", "13.0.3-1")


@pytest.mark.parametrize("lock", [{}, {"gpu_lock": {"driver": "580"}}])
def test_a_repository_alone_names_no_toolkit(lock: dict[str, Any]) -> None:
    found = settings(**lock, cuda={"repository": REPOSITORY})

    assert found.cuda
    assert found.cuda.toolkit is None


@pytest.mark.parametrize(("driver", "major"), [("570.211.01", 12), ("580", 13), ("620", 13)])
def test_dcgms_cuda_is_the_drivers(driver: str, major: int) -> None:
    found = settings(gpu_lock={"driver": driver, "dcgm": {"version": "1:4.6.0-1"}})

    assert found.dcgm
    assert found.dcgm.cuda_major == major


PLACES = ("lock", "beside", "both")


@each_row("places", list(product(PLACES, repeat=2)))
def test_it_does_not_matter_which_of_two_places_says_it(places: tuple[str, ...]) -> None:
    """Roles see the same toolkit and DCGM, in the lock and beside it."""
    toolkit, dcgm = places
    variables: dict[str, Any] = {
        "gpu_lock": {"driver": "580.95.05"},
        "cuda": {"repository": REPOSITORY},
    }
    if toolkit != "beside":
        variables["gpu_lock"]["toolkit"] = TOOLKIT
    if toolkit != "lock":
        variables["cuda"] |= {"toolkit": "13-0", "version": "13.0.3-1"}
    if dcgm != "beside":
        variables["gpu_lock"]["dcgm"] = {"version": "1:4.6.0-1", "exporter": "4.8.2-1"}
    if dcgm != "lock":
        variables["dcgm"] = {"version": "1:4.6.0-1", "exporter_version": "4.8.2-1"}

    found = settings(**variables)

    everywhere = {
        **variables,
        "gpu_lock": {
            "driver": "580.95.05",
            "toolkit": TOOLKIT,
            "dcgm": {"version": "1:4.6.0-1", "exporter": "4.8.2-1"},
        },
        "cuda": {"repository": REPOSITORY, "toolkit": "13-0", "version": "13.0.3-1"},
        "dcgm": {"version": "1:4.6.0-1", "exporter_version": "4.8.2-1"},
    }
    assert found == NodeSettings.model_validate(everywhere)


def test_equal_values_in_both_places_are_fine() -> None:
    found = settings(
        gpu_lock={"driver": "580", "vllm": {"version": "0.32.0", "python": "3.12"}},
        vllm={**VLLM, "version": "0.32.0", "python": "/usr/bin/python3.12"},
    )

    assert found.vllm
    assert found.vllm.python == "/usr/bin/python3.12"


def test_every_contradiction_names_both_keys_at_once() -> None:
    found = mistakes(
        gpu_lock={
            "driver": "580",
            "toolkit": {"profile": "none"},
            "dcgm": {"version": "1:4.6.0-1", "exporter": "4.8.2-1"},
            "vllm": {"version": "0.32.0", "python": "3.12"},
        },
        cuda={"repository": REPOSITORY, "toolkit": "13-0", "version": "13.0.3-1"},
        dcgm={"version": "1:4.5.3-1", "exporter_version": "4.8.1-1", "cuda_major": 12},
        vllm={**VLLM, "version": "0.33.0", "python": "/usr/bin/python3.11"},
    )

    assert {key: what.split(":")[0] for key, what in found.items()} == {
        "cuda.toolkit": "is 13-0, but gpu_lock.toolkit.branch is none",
        "cuda.version": "is 13.0.3-1, but gpu_lock.toolkit.version is none",
        "dcgm.version": "is 1",  # the rest of the sentence has colons
        "dcgm.exporter_version": "is 4.8.1-1, but gpu_lock.dcgm.exporter is 4.8.2-1",
        "dcgm.cuda_major": "is 12, but gpu_lock.driver is 580, a driver for CUDA 13",
        "vllm.version": "is 0.33.0, but gpu_lock.vllm.version is 0.32.0",
        "vllm.python": "is /usr/bin/python3.11, but gpu_lock.vllm.python is 3.12",
    }


def test_no_dcgm_is_said_too() -> None:
    found = mistakes(gpu_lock={"driver": "580", "dcgm": {"version": "1:4.6.0-1"}}, dcgm=None)

    assert list(found) == ["dcgm"]
    assert found["dcgm"].startswith("is none, but gpu_lock.dcgm.version is 1:4.6.0-1")


def test_a_lock_with_mistakes_is_not_said_to_leave_keys_out() -> None:
    """What the lock would fill in is not missing: the lock is wrong."""
    found = mistakes(
        gpu_lock={"driver": "latest", "vllm": {"version": "0.32.0", "python": "3.12"}}, vllm=VLLM
    )

    assert list(found) == ["gpu_lock.driver"]


# -- what cannot work ------------------------------------------------------------------------------


def refused(objections: Any) -> list[str]:
    return [str(each) for each in objections if each.refused]


def warned(objections: Any) -> list[str]:
    return [str(each) for each in objections if not each.refused]


@pytest.mark.parametrize("driver", ["615", "615.71.09", "620"])
def test_proprietary_modules_end_with_610(driver: str) -> None:
    found = mistakes(gpu_lock={"driver": driver, "modules": "proprietary"})

    assert "no proprietary kernel modules" in found["gpu_lock.modules"]
    assert settings(gpu_lock={"driver": "610", "modules": "proprietary"}).gpu_lock


@each_row(
    ("driver", "cuda", "works"),
    [
        ("580.65.06", (13, 0), True),
        ("580.65.05", (13, 0), False),
        ("580", (13, 3), True),  # minor version compatibility; a branch is its newest version
        ("570.211.01", (13, 0), False),
        ("570", (12, 9), True),
        ("525.60.12", (12, 4), False),
        ("615.71.09", (12, 4), True),  # new drivers run old CUDA
    ],
)
def test_the_driver_runs_the_cuda_of_vllms_wheels(
    driver: str, cuda: tuple[int, int], works: bool
) -> None:
    found = refused(lock_rules.release_objections(lock(driver), Wheels(cuda, "locks/vllm.txt")))

    assert (found == []) is works
    assert works or (
        "locks/vllm.txt contains CUDA" in found[0] and OLDEST_DRIVER[cuda[0]] in found[0]
    )


def test_a_cuda_that_is_not_known_is_not_called_fine() -> None:
    found = tuple(lock_rules.release_objections(lock(), Wheels((14, 0), "a.txt")))

    assert warned(found)
    assert "contains CUDA 14.0, but gpufleet does not know which driver" in str(found[0])


def test_wheels_without_cuda_ask_for_nothing() -> None:
    assert not tuple(lock_rules.release_objections(lock("535"), Wheels(None, "a.txt")))


@each_row(
    ("driver", "branch", "outcome"),
    [
        ("580", "13-0", "fine"),
        ("580", "12-9", "fine"),
        ("580", "13-2", "warned"),  # machine code runs, PTX does not
        ("570", "13-0", "refused"),
        ("620", "13-5", "fine"),  # of a branch that is not known, nothing is said
    ],
)
def test_a_toolkit_of_a_newer_major_than_the_drivers_is_refused(
    driver: str, branch: str, outcome: str
) -> None:
    toolkit = {"profile": "jit", "branch": branch, "version": "1-1"}
    found = tuple(gpu_lock.lock_objections(lock(driver, toolkit=toolkit)))

    assert [each.refused for each in found] == {"fine": [], "warned": [False], "refused": [True]}[
        outcome
    ]


def test_a_branch_past_its_end_is_warned_of_and_no_more() -> None:
    day = dt.date(2028, 6, 30)

    assert not tuple(lock_rules.calendar_objections(lock("580"), day))
    (said,) = warned(lock_rules.calendar_objections(lock("580"), day + dt.timedelta(days=1)))
    assert "no security updates since June 2028" in said
    assert "R580" not in said.split("plan for")[1]
    (said,) = warned(lock_rules.calendar_objections(lock("535"), dt.date(2026, 11, 22)))
    assert said.endswith("plan for R580 (until June 2028) or R595 (until March 2027)")
    assert not refused(lock_rules.calendar_objections(lock("535"), day))
    assert "is an unknown branch" in warned(lock_rules.calendar_objections(lock("620"), day))[0]


@pytest.mark.parametrize(
    "options", [{"NVreg A": "1"}, {"NVreg_A": "1\noptions nvidia_uvm a=1"}, {"NVreg_A": ""}]
)
def test_module_options_are_one_word_each(options: dict[str, str]) -> None:
    """They share a line of modprobe.d, which is taken apart at blanks."""
    assert all(
        key.startswith("gpu.module_options") for key in mistakes(gpu={"module_options": options})
    )


# -- what a node does not run ----------------------------------------------------------------------

V100, T4, H100, GH200, B200, B300 = 0x1DB5, 0x1EB8, 0x2330, 0x2342, 0x2901, 0x3182
NEWER = 0x3F00  # of no generation that is known here


@each_row(
    ("gpu", "driver", "modules", "keys"),
    [
        (H100, "580", "open", []),
        (H100, "580", "proprietary", []),
        (T4, "615", "open", []),
        (V100, "580", "proprietary", []),
        (V100, "580", "open", ["modules"]),
        (V100, "590", "open", ["modules", "driver"]),
        (B200, "580", "open", []),
        (B200, "580", "proprietary", ["modules"]),
        (B200, "535", "open", ["driver"]),
        (B300, "570", "open", ["driver"]),
        (B300, "580", "open", []),
    ],
)
def test_modules_and_branch_run_the_nodes_gpus(
    gpu: int, driver: str, modules: str, keys: list[str]
) -> None:
    found = tuple(lock_rules.machine_objections(lock(driver, modules=modules), Machine((gpu,) * 8)))

    assert [each.at[1] for each in found if each.refused] == keys
    assert len(found) == len(keys)


def test_grace_hopper_needs_the_open_modules_where_hopper_does_not() -> None:
    closed = lock("580", modules="proprietary")

    assert (
        "Grace Hopper"
        in refused(lock_rules.machine_objections(closed, Machine((GH200,), grace=True)))[0]
    )
    assert not refused(lock_rules.machine_objections(closed, Machine((GH200,))))


def test_a_gpu_that_is_not_known_is_not_called_fine() -> None:
    found = warned(lock_rules.machine_objections(lock(), Machine((NEWER, H100))))

    assert len(found) == 1
    assert "supports 10de:3f00" in found[0]


def test_wheels_of_cuda_13_have_no_kernels_for_volta() -> None:
    volta = Machine((V100,))
    closed = lock("580", modules="proprietary")

    assert not refused(lock_rules.machine_objections(closed, volta, Wheels((12, 9), "a.txt")))
    (said,) = refused(lock_rules.machine_objections(closed, volta, Wheels((13, 1), "a.txt")))
    assert "a.txt contains CUDA 13, whose kernels need Turing or newer" in said
    assert "lock a vLLM built for CUDA 12" in said


@pytest.mark.parametrize(
    ("system", "outcome"),
    [
        (System("debian", "12", "x86_64"), []),
        (System("debian", "13", "x86_64"), [True]),
        (System("ubuntu", "26.04", "x86_64"), [False]),  # not known is not fine
        (System("rocky", "9.6", "x86_64"), []),
    ],
)
def test_dcgm_is_locked_only_where_it_is_published(system: System, outcome: list[bool]) -> None:
    with_dcgm = lock(dcgm={"version": "1:4.6.0-1"})

    assert [each.refused for each in lock_rules.system_objections(with_dcgm, system)] == outcome
    assert not tuple(lock_rules.system_objections(lock(), system))


@pytest.mark.parametrize(
    ("interpreter", "python", "right"),
    [
        ("/usr/bin/python3", "3.12.3", True),
        ("/usr/bin/python3", "3.11.2", False),
        ("/opt/py/bin/python", "3.11.2", True),  # not the one that was asked
    ],
)
def test_the_nodes_python_is_the_locked_one(interpreter: str, python: str, right: bool) -> None:
    given = lock(vllm={"version": "0.32.0", "python": "3.12"})

    found = refused(lock_rules.python_objections(given, interpreter, python))

    assert (found == []) is right
    assert right or "set `vllm.python` to /usr/bin/python3.12, or lock 3.11" in found[0]
    assert not tuple(lock_rules.python_objections(lock(), interpreter, python))


def test_what_a_node_does_not_run_names_node_file_and_line() -> None:
    written: Variables = {
        "gpu_lock": (
            {"driver": "580", "modules": "proprietary"},
            Origin("group_vars/g.lock.yml", 3, {("modules",): 5}),
        )
    }
    node = node_variables.check({"gpu-01": written}, {"gpu-01": ("g",)})["gpu-01"]

    found = lock_check.check_node_lock(node, System("debian", "12", "x86_64"), Machine((B200,)))

    assert [each.split(": ")[0] for each in found.problems] == ["gpu-01 (group_vars/g.lock.yml:5)"]
    assert found.remarks == ()


def test_everything_wrong_with_a_lock_on_a_node_is_said_at_once() -> None:
    found = lock_rules.objections(
        lock("535", modules="proprietary", dcgm={"version": "1:4.6.0-1"}),
        System("debian", "13", "x86_64"),
        Machine((B200,)),
        Wheels((13, 0), "a.txt"),
        dt.date(2026, 11, 22),
    )

    assert [each.at[1:] for each in found] == [
        ("driver",),  # older than CUDA 13 takes
        ("driver",),  # past its end, a warning
        ("dcgm",),
        ("modules",),
        ("driver",),  # older than the GPUs
    ]


# -- the table -------------------------------------------------------------------------------------


def test_the_table_of_branches_agrees_with_itself() -> None:
    """Branches ascend, and so does what they serve; each major's oldest driver is of it."""
    names = list(BRANCHES)
    assert names == sorted(names)
    served = [each.cuda for each in BRANCHES.values()]
    assert served == sorted(served)
    assert [cuda_major(name) for name in names] == [each.cuda[0] for each in BRANCHES.values()]
    for major, oldest in OLDEST_DRIVER.items():
        known = BRANCHES.get(str(version_numbers(oldest)[0]))
        assert known is None or known.cuda[0] == major
    assert all("open" in flavours(name) for name in names)
