"""A driver that answers garbage: the document comes whole, it is valid JSON, and nothing is set.

The library here is not the simulator but a few lines of C that answer what no driver should.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import time

import pytest

from gpufleet.on_node.common import answers, forked
from gpufleet.remote import payload
from lab import nvml
from tests.support.checkout import ROOT
from tests.support.record_node import probe
from tests.support.rows import each_row

ON_NODE = ROOT / "src/gpufleet/on_node"
PROBE = (
    "common/driver_files",
    "common/nvml",
    "probe/nvml_gpus",
    "probe/nvml_links",
    "probe/probe",
)  # those that speak NVML

SOURCE = r"""
#include <string.h>
int nvmlInitWithFlags(unsigned flags) { return @INIT@; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "no words"; }
int nvmlSystemGetNVMLVersion(char *out, unsigned size) { strncpy(out, "12.570.1", size); return 0; }
int nvmlSystemGetDriverVersion(char *out, int n) { strncpy(out, "\xff\xfe" "570", n); return 0; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = @COUNT@; return 0; }
int nvmlGetExcludedDeviceCount(unsigned *out) { *out = 4000000000u; return 0; }
int nvmlDeviceGetHandleByIndex_v2(long i, void **out) { *out = (void *)(i + 1); return 0; }
int nvmlDeviceGetName(void *gpu, char *out, int n) { strncpy(out, "\x80GPU\xed", n); return 0; }
int nvmlDeviceGetUUID(void *gpu, char *out, int n) { memset(out, 'U', n); return 0; }
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *out) { *out = 4294967295u; return 0; }
int nvmlDeviceGetPciInfo_v3(void *gpu, char *out) { memset(out, 0xff, 16); return 0; }
int nvmlDeviceGetPlatformInfo(void *gpu, char *out) { memset(out + 4, 0xff, 37); return 0; }
int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, unsigned *out) { *out = 77; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, void *out)
{
    *count = 2000000000u;
    return 7;
}
int nvmlDeviceGetFieldValues(void *gpu, int count, char *values)
{
    double nan = 0.0 / 0.0;
    memset(values + 24, 0, 8);           /* a double, without an error */
    memcpy(values + 32, &nan, sizeof nan);
    return 0;
}
"""


@pytest.fixture
def hostile(tmp_path):
    """`hostile(COUNT=3)`: the document that the probe makes of this library's answers."""

    def run(**words):
        source = SOURCE
        for word, value in {"INIT": 0, "COUNT": 1, **words}.items():
            source = source.replace(f"@{word}@", str(value))
        (tmp_path / "nvml.c").write_text(source)
        library = tmp_path / nvml.SONAME
        compile_ = ["gcc", "-w", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"]
        subprocess.run(compile_, check=True)
        return probe(tmp_path)

    return run


def refuse(name):
    raise AssertionError(f"{name} is no JSON")


def test_garbage_costs_its_own_facts_only(hostile):
    found = hostile(COUNT=3)

    json.loads(json.dumps(found), parse_constant=refuse)
    json.dumps(found, ensure_ascii=False).encode()  # no halves of characters
    assert found["errors"] == []
    for gpu in found["gpus"]:
        assert gpu["name"].startswith("�GPU")
        assert gpu["temperature_celsius"] == 4294967295  # a judgement is not the probe's
        assert gpu["recovery_action"] == {"missing": "implausible", "detail": "nan"}
        assert gpu["pci"]["missing"] == "error"
        assert gpu["processes"]["missing"] == "error"  # no memory for two thousand million
        assert gpu["platform"]["slot"] == 255
        assert gpu["serial"]["missing"] == "function_not_found"
    assert found["driver"]["version"] == "��570"
    assert found["driver"]["excluded"]["missing"] == "implausible"


def test_links_without_an_end_are_not_counted_for_ever(hostile):
    """A driver that knows every link index, whatever it is."""
    assert len(hostile()["nvlink"][0]["links"]) == 64


@pytest.mark.parametrize("count", [65, 1_000_000, 4_294_967_295])
def test_no_process_is_forked_for_a_gpu_that_cannot_be(hostile, count):
    found = hostile(COUNT=f"{count}u")

    assert found["driver"]["gpu_count"] == {
        "missing": "implausible",
        "detail": f"the driver reports {count} GPUs",
    }
    assert found["gpus"] == []


@pytest.mark.parametrize("code", [4, 9, 18, 999])
def test_the_library_tells_its_version_where_the_driver_is_silent(hostile, code):
    """With a mismatch of library and module, that is the one half of what an operator needs."""
    found = hostile(INIT=code)

    assert found["driver"]["init"]["code"] == code
    assert found["driver"]["nvml"] == "12.570.1"
    assert found["driver"]["cuda"]["code"] == code


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_missing(value):
    assert answers.to_json_types({"x": [value]})["x"][0]["missing"] == "implausible"


def test_a_name_that_is_no_text_can_be_printed():
    """Linux' file names are bytes; Python keeps them as halves of characters."""
    assert answers.to_json_types("GPU-\udcff").encode() == b"GPU-?"


def test_an_answer_without_end_is_cut_off():
    watch = forked.Watch()

    watch.ask("much", lambda: "x" * (forked.ANSWER_BYTES + 1), 10)
    watch.ask("little", lambda: 1, 10)
    found = watch.answers("much", "little")
    watch.stop()

    assert found["much"]["missing"] == "implausible"
    assert found["little"] == 1


def test_a_question_may_not_take_the_nodes_memory():
    watch = forked.Watch()

    watch.ask("much", lambda: len(bytearray(forked.MEMORY_BYTES)), 10)
    found = watch.answers("much")
    watch.stop()

    assert found["much"] == {"missing": "error", "detail": "MemoryError: "}


def test_an_answer_that_came_in_time_is_kept_while_others_are_waited_for():
    """Longer than a pipe holds: somebody has to take it in, or it would never end."""
    watch = forked.Watch()

    watch.ask("long", lambda: "x" * 1_000_000, 1)
    watch.ask("slow", lambda: time.sleep(2), 5)
    assert watch.answers("slow") == {"slow": None}
    found = watch.answers("long")
    watch.stop()

    assert found["long"] == "x" * 1_000_000


def test_a_node_that_cannot_fork_says_so(monkeypatch):
    watch = forked.Watch()
    monkeypatch.setattr(forked.os, "fork", lambda: (_ for _ in ()).throw(OSError(11, "no room")))

    watch.ask("host", dict, 1)

    assert watch.answers("host")["host"]["missing"] == "error"


@each_row("name", PROBE)
def test_nothing_of_the_probe_sets_or_resets_anything(name):
    """It may be run on nodes that serve: of NVML's functions it knows only those that ask."""
    nodes = list(ast.walk(ast.parse((ON_NODE / f"{name}.py").read_text())))
    words = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    words |= {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    functions = {word for word in words if re.match(r"nvml[A-Z]\w*$", word)}

    asks = re.compile(r"nvml(Init|(System|Device)?Get\w*|DeviceValidateInforom|Return)$")
    assert {name for name in functions if not asks.match(name)} == set()


def test_the_document_is_one_line_whatever_is_in_it(hostile, tmp_path):
    hostile()
    done = subprocess.run(
        [sys.executable, "-I", "-"],
        input=payload.program("probe/probe", nvml=True),
        env={"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
