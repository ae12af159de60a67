"""Every structure and code in lab/nvml/abi.h is laid out as in NVIDIA's own nvml.h.

Two small C programs print what each header says. They cannot be one: the headers share names. Only
this test reads NVIDIA's header (nvidia-nvml-dev, a development dependency); nothing is built on it.
"""

import re
import subprocess
from importlib import metadata

import pytest

from lab import nvml

ABI = nvml.SOURCES / "abi.h"


def structures():
    """{structure: its fields} as abi.h declares them."""
    found = {}
    for name, body in re.findall(
        r"^struct (\w+) \{\n(.*?)^\};", ABI.read_text(), re.MULTILINE | re.DOTALL
    ):
        found[name] = re.findall(r"^    (?:\w[\w ]*|\}) (\w+)(?:\[\w+\])?;$", body, re.MULTILINE)
    return found


def codes():
    (body,) = re.findall(
        r"^enum nvmlReturn \{\n(.*?)^\};", ABI.read_text(), re.MULTILINE | re.DOTALL
    )
    return re.findall(r"NVML_(\w+) =", body)


def run_c(tmp_path, name, include, flags, lines):
    source = tmp_path / f"{name}.c"
    body = "\n".join(f'    printf("%s %ld\\n", "{key}", (long)({value}));' for key, value in lines)
    source.write_text(
        f"#include <stddef.h>\n#include <stdio.h>\n#include {include}\n"
        f"int main(void) {{\n{body}\n}}\n"
    )
    program = tmp_path / name
    subprocess.run(["gcc", *flags, "-o", program, source], check=True)
    run = subprocess.run([program], capture_output=True, text=True, check=True)
    return dict(line.split() for line in run.stdout.splitlines())


def layout(type_of):
    lines = []
    for structure, fields in structures().items():
        lines.append((structure, f"sizeof({type_of(structure)})"))
        lines.extend(
            (f"{structure}.{field}", f"offsetof({type_of(structure)}, {field})") for field in fields
        )
    return lines


VERSIONED = [
    name for name, fields in structures().items() if fields[0] == "version" and "_v" in name
]


def number(name):
    """ "2" of nvmlMemory_v2."""
    return name.rpartition("_v")[2]


@pytest.fixture(scope="module")
def theirs_directory():
    files = metadata.distribution("nvidia-nvml-dev").files or []
    (header,) = (file for file in files if file.name == "nvml.h")
    return header.locate().parent


def test_structures_versions_and_codes_equal_nvidias(tmp_path, theirs_directory):
    """Sizes, offsets of every field, version words and return codes: no difference at all."""
    ours = run_c(
        tmp_path,
        "ours",
        '"abi.h"',
        [f"-I{nvml.SOURCES}"],
        layout(lambda name: f"struct {name}")
        + [(f"word:{name}", f"STRUCT_VERSION({name}, {number(name)})") for name in VERSIONED]
        + [(code, f"NVML_{code}") for code in codes()],
    )
    theirs = run_c(
        tmp_path,
        "theirs",
        "<nvml.h>",
        [f"-I{theirs_directory}"],
        layout(lambda name: f"{name}_t")
        + [(f"word:{name}", name) for name in VERSIONED]
        + [
            (code, "NVML_SUCCESS" if code == "SUCCESS" else f"NVML_ERROR_{code}")
            for code in codes()
        ],
    )

    assert len(ours) > 140
    assert ours == theirs
