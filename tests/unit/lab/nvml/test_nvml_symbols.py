"""The library has every function that a program can ask the binding for, and needs only libc."""

import ast
import subprocess
from importlib import metadata

from gpufleet.remote import payload
from lab import nvml


def dynamic_symbols(library, which):
    run = subprocess.run(
        ["nm", "-D", which, str(library)], capture_output=True, text=True, check=True
    )
    return {line.split()[-1] for line in run.stdout.splitlines()}


def asked_for(binding):
    """Every literal name that is looked up, by parsing the binding, not by searching its text."""
    return {
        node.args[0].value
        for node in ast.walk(ast.parse(binding.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "_nvmlGetFunctionPointer"
        and isinstance(node.args[0], ast.Constant)
    }


def test_every_function_of_the_binding_exists(library):
    """A missing symbol would look like an old driver to programs that then stop asking."""
    exported = dynamic_symbols(library, "--defined-only")

    assert len(asked_for(nvml.BINDING)) > 400
    assert asked_for(nvml.BINDING) - exported == set()
    assert exported - asked_for(nvml.BINDING) == {"nvmlInit", "nvmlInit_v2"}, "for C programs"


def test_history_speaks_of_functions_that_exist():
    """A misspelt line in history.txt would gate nothing."""
    assert set(nvml.history()) - asked_for(nvml.BINDING) == set()


def test_libc_is_all_it_needs(library):
    """It runs on any node without installing anything."""
    run = subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    )
    needed = [
        line.split("[")[1].rstrip("]") for line in run.stdout.splitlines() if "NEEDED" in line
    ]

    assert needed == ["libc.so.6"]
    assert f"soname: [{nvml.SONAME}]" in run.stdout


def test_the_binding_that_travels_to_nodes_is_the_pinned_wheel_with_its_licence():
    distribution = metadata.distribution("nvidia-ml-py")

    assert distribution.version == payload.BINDING_VERSION
    assert distribution.locate_file("pynvml.py") == nvml.BINDING
    assert b"Redistribution and use in source and binary forms" in nvml.BINDING.read_bytes()[:600]
