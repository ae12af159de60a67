"""Programs for nodes: one text that a node's `python3 -I -` reads from its standard input.

Nothing is installed on the node and nothing is left there, nothing needs quoting, and what a
program is given never appears in the node's process list. (A program that runs as long as a unit
does is installed instead: `archive`.)

A program is a file of `on_node/`: standard library only, syntax of Python 3.8, one JSON document
on stdout. It runs as `__main__` and finds what it was given in the global `PARAMETERS`. Other files
of `on_node/` that it imports travel along. Asked for `nvml`, so does NVIDIA's binding
(`vendor/pynvml.py`, unmodified), which the program imports as `pynvml` in preference to any that
the node may have: bindings of other releases have wrong struct sizes.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import json
import zipfile
import zlib
from functools import cache
from importlib import resources
from typing import Any

# Writes no bytecode, refuses in words a Python that cannot do (Debian's python3-minimal has no
# json), and hands over. The program is compiled from text, so its docstring and `from __future__`
# stay first in their own file.
_BOOTSTRAP = """\
import sys
sys.dont_write_bytecode = True
if sys.version_info < (3, 8):
    sys.exit("python3 is %d.%d on this node, and gpufleet needs 3.8 or newer: install one"
             % sys.version_info[:2])
try:
    import base64, importlib.util, json, zlib
except ImportError as error:
    sys.exit("python3 on this node lacks its standard library (%s): install the whole of it, "
             "on Debian and Ubuntu the package python3" % error)
def text(blob):
    return zlib.decompress(base64.b64decode(blob)).decode()
carried = {carried}
class Carried:
    def find_spec(self, name, path=None, target=None):
        if name in carried:
            package = any(other.startswith(name + ".") for other in carried)
            return importlib.util.spec_from_loader(name, self, is_package=package)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        name = module.__name__
        exec(compile(text(carried[name]), name + ".py", "exec"), module.__dict__)
sys.meta_path.insert(0, Carried())
program = {{"__name__": "__main__", "__sha256__": "{sha256}",
           "PARAMETERS": json.loads(text("{parameters}"))}}
exec(compile(text("{program}"), "{name}.py", "exec"), program)
"""


class Payload(str):
    """
    A program with its parameters, which no log shows.

    It is handed over as `_stdin`, and pyinfra prints those arguments with `-v` and `--debug`;
    parameters may be secrets. `str.encode()` and slicing still give the text.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<program of {len(self)} characters>"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def program(name: str, *, nvml: bool = False, **parameters: Any) -> Payload:
    """
    Return the text that runs `on_node/<name>.py` on a node.

    `parameters` are values that JSON can express; the program finds them in `PARAMETERS`. With
    `nvml` it can `import pynvml`. Raises `TypeError` for a value that JSON cannot express
    and `FileNotFoundError` for a program that does not exist.

    >>> program("probe", nvml=True)
    <program of 85210 characters>
    """
    modules = {name: f"on_node/{name.rpartition('.')[2]}.py" for name in _imported(name)}
    if modules:
        modules |= dict.fromkeys(("gpufleet", "gpufleet.on_node"), "on_node/__init__.py")
    if nvml:
        modules["pynvml"] = "vendor/pynvml.py"
    return Payload(
        _BOOTSTRAP.format(
            name=name,
            sha256=digest(name),
            program=_packed_source(f"on_node/{name}.py"),
            parameters=_packed(json.dumps(parameters)),
            carried={module: _packed_source(path) for module, path in modules.items()},
        )
    )


@cache
def archive(name: str, *, nvml: bool = False) -> bytes:
    """
    Return `on_node/<name>.py` as one file to install: executable, with all that it imports.

    With `nvml` also with NVIDIA's binding, as `program` has it.

    It is a zip file behind a `#!` line, which Python runs by itself; `unzip -p FILE` shows the
    source. Nothing in it is compressed or dated, so the same sources are the same bytes everywhere:
    a unit's fingerprint covers them. Raises `FileNotFoundError` for an unknown program.
    """
    modules = {module: f"on_node/{module.rpartition('.')[2]}.py" for module in _imported(name)}
    contents = {f"{module.replace('.', '/')}.py": _source(path) for module, path in modules.items()}
    for package in ("gpufleet", "gpufleet/on_node"):
        contents[f"{package}/__init__.py"] = _source("on_node/__init__.py")
    contents["__main__.py"] = _source(f"on_node/{name}.py")
    if nvml:
        contents["pynvml.py"] = _source("vendor/pynvml.py")
    packed = io.BytesIO()
    packed.write(b"#!/usr/bin/python3 -IB\n")
    with zipfile.ZipFile(packed, "a", zipfile.ZIP_STORED) as file:
        for path, source in sorted(contents.items()):
            file.writestr(zipfile.ZipInfo(path), source.encode())
    return packed.getvalue()


@cache
def digest(name: str) -> str:
    """Return the SHA-256 of a program's source and of all that travels along, but the binding."""
    found = hashlib.sha256(_source(f"on_node/{name}.py").encode())
    for module in _imported(name):
        found.update(_source(f"on_node/{module.rpartition('.')[2]}.py").encode())
    return found.hexdigest()


@cache
def _imported(name: str) -> tuple[str, ...]:
    """Return the modules of `on_node/` that a program needs, sorted."""
    found: set[str] = set()
    unread = {name}
    while unread:
        for node in ast.walk(ast.parse(_source(f"on_node/{unread.pop()}.py"))):
            if isinstance(node, ast.ImportFrom) and node.module == "gpufleet.on_node":
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith(
                "gpufleet.on_node."
            ):
                names = {str(node.module).rpartition(".")[2]}
            else:
                continue
            unread |= names - found
            found |= names
    return tuple(sorted(f"gpufleet.on_node.{module}" for module in found))


@cache
def _source(path: str) -> str:
    return resources.files("gpufleet").joinpath(path).read_text(encoding="utf-8")


@cache  # 330 kB: compressed once, not once a node
def _packed_source(path: str) -> str:
    return _packed(_source(path))


def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
