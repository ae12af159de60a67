"""Build the programs that run on nodes.

A program is one text, which is sent to the standard input of `python3 -I -` on a node. So nothing
has to be installed on the node, the text needs no quoting, and parameters are never visible in the
node's process list. If a deploy has created the directory `CODE`, the compiled programs are stored
there. Nothing else remains on the node. A program that runs as a systemd unit is installed as a
file instead (`archive`).

The source of a program is a file of `on_node/`. It uses only the standard library and the syntax of
Python 3.8, and prints one JSON document on stdout. It runs as `__main__`, with its parameters in
the global `PARAMETERS`. Other files of `on_node/` that it imports are also sent. With `nvml`,
NVIDIA's binding is sent as well, which is `pynvml.py` of the pinned nvidia-ml-py, unmodified. The
program then does not import the node's own binding, because bindings of other releases have wrong
struct sizes.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import re
import zipfile
import zlib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from gpufleet import node_paths
from gpufleet.errors import FleetError

CODE = node_paths.CODE
"""The directory of compiled programs on nodes. It exists only after a deploy."""

BINDING_VERSION = "13.615.71"
BINDING_SHA256 = "2828e66b483bec218f461314f6da96c1e56330ed4b297a20b3444b4c43cdd14e"
"""The SHA-256 of pynvml.py in the wheel of nvidia-ml-py with this version."""

_BINDING = "pynvml.py"
_BINDING_REMEDY = f"install nvidia-ml-py=={BINDING_VERSION}, as uv.lock has it (`uv sync --frozen`)"

# Compiled code that is older than this belongs to a different release of gpufleet, or to a Python
# that the node no longer has.
_KEPT_DAYS = 30

# Matches the imports at the top of files of `on_node/`. The text is searched, because parsing all
# programs of a run took a quarter of a second. tests/unit/remote/test_payload.py compares the
# result with that of a parser.
_IMPORTS = re.compile(
    r"^from gpufleet\.on_node((?:\.\w+)*) import (?:\(([^)]*)\)|([^(\n]*))", re.MULTILINE
)
_REMARKS = re.compile(r"#.*| as \w+")
_NAMES = re.compile(r"\w+")

# zlib's compression level. At level 6, compressing the binding takes 7 ms. At level 9, it takes 20
# ms, and the result is 2 % smaller.
_LEVEL = 6

# Exit codes of a program that was sent without its source (`brief`) and could not start. LACKS: the
# compiled program is not on the node. KEEPS_NOTHING: the node has no directory for compiled
# programs. No program of gpufleet uses these exit codes.
LACKS = 113
KEEPS_NOTHING = 114

# The first part of every program. It prints a message if the node's Python is not sufficient
# (Debian's python3-minimal has no json), and then starts the program. The program is compiled from
# text, so its docstring and `from __future__` stay at the beginning of their own file. Compiling is
# most of the processor time of a short program. (The probe with NVIDIA's binding needs 205 ms, of
# which 95 ms are for compiling, measured with Python 3.11.) So the compiled code is stored if there
# is a directory for it to which no other user can write. The file's name has the hash of the source
# and the name of the Python. The file has a checksum, because a power cut may leave incomplete
# files. All compiled parts are loaded before the program starts, because a missing source could not
# be sent later. binascii is used instead of base64, and importlib.util is not used, because
# importing them would take as long as everything else here.
_BOOTSTRAP = """\
import sys
sys.dont_write_bytecode = True
if sys.version_info < (3, 8):
    sys.exit("python3 is %d.%d on this node, and gpufleet needs 3.8 or newer: install one"
             % sys.version_info[:2])
try:
    import binascii, json, marshal, os, zlib
except ImportError as error:
    sys.exit("python3 on this node lacks its standard library (%s): install the whole of it, "
             "on Debian and Ubuntu the package python3" % error)
def text(blob):
    return zlib.decompress(binascii.a2b_base64(blob)).decode()
kept = {kept!r}
def ours():
    try:
        found = os.lstat(kept)
        return found.st_uid == os.geteuid() and found.st_mode & 0o170077 == 0o040000
    except OSError:
        return False
keeps = ours()
def compiled(name, sha256, blob):
    path = "%s/%s.%s" % (kept, sha256, sys.implementation.cache_tag)
    try:
        if keeps:
            with open(path, "rb") as file:
                code = file.read()
            if zlib.crc32(code[4:]) == int.from_bytes(code[:4], "big"):
                return marshal.loads(code[4:])
    except Exception:
        pass
    if not blob:
        sys.exit({lacks} if keeps else {keeps_nothing})
    code = compile(text(blob), name + ".py", "exec")
    if keeps:
        keep(path, marshal.dumps(code))
    return code
def keep(path, code):
    try:
        import time
        with open("%s.%d" % (path, os.getpid()), "wb") as file:
            file.write(zlib.crc32(code).to_bytes(4, "big") + code)
        os.rename(file.name, path)
        for entry in os.scandir(kept):
            if entry.stat().st_mtime < time.time() - 86400 * {days}:
                os.unlink(entry.path)
    except OSError:
        pass
codes = {{name: compiled(name, *about) for name, about in {carried}.items()}}
class Carried:
    def find_spec(self, name, path=None, target=None):
        if name in codes:
            package = any(other.startswith(name + ".") for other in codes)
            return type(__spec__ or sys.__spec__)(name, self, is_package=package)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(codes[module.__name__], module.__dict__)
sys.meta_path.insert(0, Carried())
program = {{"__name__": "__main__", "__sha256__": "{sha256}",
           "PARAMETERS": json.loads(text("{parameters}"))}}
exec(compiled("{name}", *{program}), program)
"""


class Payload(str):
    """
    A program with its parameters. Its text is not shown in any log.

    The program is passed as `_stdin`, which pyinfra prints with `-v` and `--debug`, and its
    parameters may be secrets. So `repr` and `str` do not contain the text. `str.encode()` and
    slicing still return the text.

    `brief` is the program without its source, for a node that has stored all of its compiled code.
    On any other node, it exits with `LACKS` or `KEEPS_NOTHING`. `brief` is None for a text that is
    not a program of gpufleet.
    """

    __slots__ = ("brief", "name")
    brief: Payload | None
    name: str
    """The name of the program with its action (`change/change look`), or "" for any other text."""

    def __new__(cls, text: str, brief: Payload | None = None, name: str = "") -> Payload:
        found = super().__new__(cls, text)
        found.brief = brief
        found.name = name
        return found

    def __repr__(self) -> str:
        return f"<program of {len(self)} characters>"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def program(name: str, *, nvml: bool = False, **parameters: Any) -> Payload:
    """
    Return the text that runs `on_node/<name>.py` on a node.

    `parameters` must be values that JSON can express. The program reads them from `PARAMETERS`.
    With `nvml`, the program can `import pynvml`. Raises `TypeError` for a value that JSON cannot
    express and `FileNotFoundError` for a program that does not exist.

    >>> program("probe/probe", nvml=True)
    <program of ... characters>
    """
    modules = {module: _path(module) for module in imported_modules(name)}
    modules |= dict.fromkeys(_parent_packages(modules), "on_node/__init__.py")
    if nvml:
        modules["pynvml"] = _BINDING
    fields = {
        "name": name,
        "sha256": digest(name),
        "parameters": _packed(json.dumps(parameters)),
        "kept": CODE,
        "days": _KEPT_DAYS,
        "lacks": LACKS,
        "keeps_nothing": KEEPS_NOTHING,
    }
    own = _hashed_source(f"on_node/{name}.py")
    carried = {module: _hashed_source(path) for module, path in modules.items()}
    without = {module: (sha256, "") for module, (sha256, _) in carried.items()}
    what = " ".join([name, *(parameters[key] for key in ("action", "do") if key in parameters)])
    brief = Payload(_BOOTSTRAP.format(**fields, program=(own[0], ""), carried=without))
    return Payload(_BOOTSTRAP.format(**fields, program=own, carried=carried), brief, what)


@cache
def archive(name: str, *, nvml: bool = False) -> bytes:
    """
    Return `on_node/<name>.py`, with all its imports, as one executable file to install.

    With `nvml`, the file includes NVIDIA's binding, as for `program`. The file is a `#!` line
    followed by a zip archive, which Python can run. `unzip -p FILE` shows the source. The entries
    are neither compressed nor dated. So equal sources give equal bytes on every machine, and the
    fingerprint of a unit covers the sources. Raises `FileNotFoundError` for an unknown program.
    """
    modules = {module: _path(module) for module in imported_modules(name)}
    contents = {f"{module.replace('.', '/')}.py": _source(path) for module, path in modules.items()}
    for package in _parent_packages(modules):
        contents[f"{package.replace('.', '/')}/__init__.py"] = _source("on_node/__init__.py")
    contents["__main__.py"] = _source(f"on_node/{name}.py")
    if nvml:
        contents["pynvml.py"] = _source(_BINDING)
    packed = io.BytesIO()
    packed.write(b"#!/usr/bin/python3 -IB\n")
    with zipfile.ZipFile(packed, "a", zipfile.ZIP_STORED) as file:
        for path, source in sorted(contents.items()):
            file.writestr(zipfile.ZipInfo(path), source.encode())
    return packed.getvalue()


@cache
def source(name: str) -> str:
    """Return the text of a file of `on_node/`, to install it as a program without imports."""
    return _source(f"on_node/{name}.py")


def digest(name: str) -> str:
    """Return the SHA-256 of the sources of a program and its imports, without NVIDIA's binding."""
    found = hashlib.sha256(_source(f"on_node/{name}.py").encode())
    for module in imported_modules(name):
        found.update(_source(_path(module)).encode())
    return found.hexdigest()


def _path(module: str) -> str:
    return module.removeprefix("gpufleet.").replace(".", "/") + ".py"


def _parent_packages(modules: Any) -> list[str]:
    """Return the parent packages of modules. They are needed to import the modules."""
    return sorted(
        {
            ".".join(parts[:n])
            for m in modules
            if (parts := m.split("."))
            for n in range(1, len(parts))
        }
    )


@cache
def imported_modules(name: str) -> tuple[str, ...]:
    """Return the modules of `on_node/` that a program needs, sorted."""
    found: set[str] = set()
    unread = {f"gpufleet.on_node.{name.replace('/', '.')}"}
    own = next(iter(unread))
    while unread:
        source = _source(_path(unread.pop()))
        names = set()
        for below, several, one in _IMPORTS.findall(source):
            home = f"gpufleet.on_node{below}"
            if below and resources.files("gpufleet").joinpath(_path(home)).is_file():
                names.add(home)
            else:
                names |= {
                    f"{home}.{each}" for each in _NAMES.findall(_REMARKS.sub("", several or one))
                }
        unread |= names - found
        found |= names
    return tuple(sorted(found - {own}))


def binding() -> Path:
    """
    Return the path of NVIDIA's binding to NVML, the module `pynvml` of nvidia-ml-py.

    Raises `FleetError` unless the file is byte for byte that of the pinned release, because it is
    sent to every node.
    """
    found = importlib.util.find_spec("pynvml")
    if found is None or found.origin is None:
        raise FleetError(f"nvidia-ml-py is not installed: {_BINDING_REMEDY}")
    path = Path(found.origin)
    if (sha256 := hashlib.sha256(path.read_bytes()).hexdigest()) != BINDING_SHA256:
        raise FleetError(
            f"{path} has the SHA-256 {sha256}, but nvidia-ml-py {BINDING_VERSION} has "
            f"{BINDING_SHA256}, and gpufleet does not send a different file to nodes: "
            f"{_BINDING_REMEDY}"
        )
    return path


@cache
def _source(path: str) -> str:
    if path == _BINDING:
        return binding().read_text(encoding="utf-8")
    return resources.files("gpufleet").joinpath(path).read_text(encoding="utf-8")


@cache  # 330 kB: compressed once, not once a node
def _hashed_source(path: str) -> tuple[str, str]:
    source = _source(path)
    return hashlib.sha256(f"{path}\n{source}".encode()).hexdigest()[:32], _packed(source)


def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(), _LEVEL)).decode()
