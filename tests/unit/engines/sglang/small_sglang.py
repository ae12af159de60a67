"""A release of SGLang in miniature: laid out as SGLang is, and broken if it was imported."""

from __future__ import annotations

import zipfile
from pathlib import Path

VERSION = "9.9.9"

FILES = {
    "sglang/__init__.py": "raise RuntimeError('sglang was imported')\n",
    "sglang/_version.py": f"__version__ = version = '{VERSION}'\n",
    "sglang/srt/__init__.py": "",
    "sglang/srt/environ.py": """
import os

class EnvField:
    _allow_set_name = True

    def __init__(self, default):
        self.default = default

    def __set_name__(self, owner, name):
        assert EnvField._allow_set_name

    def parse(self, value):
        raise NotImplementedError

    def get(self):
        return self.default

class EnvBool(EnvField):
    pass

class EnvInt(EnvField):
    pass

class EnvAliased(EnvBool):
    def __init__(self, default, deprecated_name):
        super().__init__(default)
        self.deprecated_name = deprecated_name

def on_hip():
    import torch
    return torch.version.hip is not None

def folder():
    return os.path.expanduser("~/cache")

class Envs:
    SGLANG_FAST = EnvBool(False)
    SGLANG_SIZE = EnvInt(16)
    SGLANG_NEW = EnvAliased(True, deprecated_name="SGLANG_OLD")
    SGLANG_FOLDER = EnvField(folder)

envs = Envs()
EnvField._allow_set_name = False
""",
    "sglang/srt/fields.py": """
from __future__ import annotations
from typing import Annotated, Literal
import msgspec
import torch

class Arg(msgspec.Struct, frozen=True):
    help: str = ""
    choices: list | None = None

class Serving(msgspec.Struct):
    model_path: Annotated[str, Arg(help="The model.")]
    port: Annotated[int, Arg(help="The port.")] = 30000
    names: Annotated[list[str], Arg(help="Names.")] = msgspec.field(default_factory=list)
    mode: Annotated[Literal["a", "b"], Arg(help="A mode.")] = "a"
    device: torch.device = None
""",
    "sglang/srt/server_args.py": """
import argparse
import msgspec
import torch
from typing import get_type_hints

from sglang.srt.environ import envs
from sglang.srt.fields import Arg, Serving

def human_readable_int(text):
    return int(text)

class Gone(argparse.Action):
    def __init__(self, option_strings, dest, nargs=0, **options):
        super().__init__(option_strings, dest, nargs=nargs, **options)

class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        for field in msgspec.structs.fields(ServerArgs):
            hint = get_type_hints(Serving, include_extras=True)[field.name]
            about = getattr(hint, "__metadata__", (None,))[0]
            if not isinstance(about, Arg):
                continue
            options = {"help": about.help}
            if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
                options["required"] = True
            elif field.default_factory is not msgspec.NODEFAULT:
                options.update(nargs="+", default=field.default_factory())
            else:
                options.update(default=field.default, type=type(field.default))
            parser.add_argument("--" + field.name.replace("_", "-"), **options)
        parser.add_argument("--tokens", type=human_readable_int)
        third = "fast" if envs.SGLANG_FAST.get() else "c"
        parser.add_argument("--backend", choices={"b", "a", third})
        parser.add_argument("--gone", action=Gone, help="Deprecated.")

ServerArgs = msgspec.defstruct(
    "ServerArgs",
    [(f.name, f.type, f.default) if f.default is not msgspec.NODEFAULT
     else (f.name, f.type, msgspec.field(default_factory=f.default_factory))
     if f.default_factory is not msgspec.NODEFAULT else (f.name, f.type)
     for f in msgspec.structs.fields(Serving)],
    namespace={"add_cli_args": ServerArgs.add_cli_args},
    dict=True,
)

def prepare_server_args(argv):
    raise RuntimeError("this starts a server")

torch.cuda.init()
""",
    "sglang/cli/serve.py": """
import torch

def _normalize_positional_model_path(argv):
    return argv

def _model_type(argv):
    return "--model-type" in argv
""",
}


def tree(folder: Path) -> Path:
    """Write it as a source tree."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def wheel(path: Path) -> Path:
    """Write it as a wheel."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    return path
