"""A release of vLLM in miniature: what the extractor has to cope with, in 120 lines of our own.

It is laid out as vLLM is, from the subcommand to the config classes, and would break if it was
imported: it imports packages that are not there, and it raises where nothing has to run.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

VERSION = "9.9.9"

FILES = {
    "vllm/__init__.py": "raise RuntimeError('vllm was imported')\n",
    "vllm/_version.py": f"__version__ = version = '{VERSION}'\n",
    "vllm/envs.py": """
import os
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    VLLM_PORT: int | None = None
    VLLM_FAST: bool = False
    VLLM_LAYOUT: str | None = None
    VLLM_ON_GPU: bool = False
    VLLM_ON_TPU: str = "no"

def one_of(name, default, choices, case_sensitive=True):
    def read():
        value = os.getenv(name)
        if value is not None and value not in choices:
            raise ValueError(value)
        return value or default
    return read

def gpu():
    import torch
    return torch.cuda.is_available() > 0

def tpu():
    import libtpu
    return "yes" if libtpu.found else "no"

environment_variables = {
    "VLLM_PORT": lambda: int(os.environ["VLLM_PORT"]) if "VLLM_PORT" in os.environ else None,
    "VLLM_FAST": lambda: os.getenv("VLLM_FAST", os.getenv("FAST", "1")) == "1",
    "VLLM_LAYOUT": one_of("VLLM_LAYOUT", None, ["A", "B"]),
    "VLLM_ON_GPU": gpu,
    "VLLM_ON_TPU": tpu,
}

def __getattr__(name):
    return environment_variables[name]()
""",
    "vllm/platforms/__init__.py": """
def __getattr__(name):
    raise RuntimeError("this looks at the machine")
""",
    "vllm/utils/argparse_utils.py": """
import argparse
import json

class FlexibleArgumentParser(argparse.ArgumentParser):
    def parse_args(self, args=None, namespace=None):
        args = ["--" + one[2:].replace("_", "-") if one[:2] == "--" else one for one in args]
        return super().parse_args(args, namespace)
""",
    "vllm/config/__init__.py": """
import enum
import pkgutil
from dataclasses import field
from typing import Annotated, Any, Literal
import torch
from torch import nn
from transformers import PretrainedConfig
from pydantic import ConfigDict, Field, SkipValidation
from pydantic.dataclasses import dataclass
from vllm import envs
from vllm.platforms import current_platform

raise RuntimeError("this statement binds nothing that is wanted")

class Mode(enum.Enum):
    SLOW = 0
    FAST = 1

class Layer(nn.Module):
    weights: torch.Tensor = torch.empty(3)

@dataclass(config=ConfigDict(extra="forbid"))
class Inner:
    mode: Mode = Mode.FAST
    depth: int = Field(default=2, ge=1)

try:
    FOUND = pkgutil.resolve_name("torch")
except ImportError:
    FOUND = "nothing"

@dataclass
class OuterConfig:
    inner: Inner = field(default_factory=Inner)
    name: SkipValidation[str] = FOUND
    hf: PretrainedConfig | None = None
    seen: int = Field(default=0, init=False)

    def __post_init__(self):
        raise RuntimeError("this looks at the machine")

@dataclass
class ModelConfig:
    model: str = "facebook/opt-125m"
    \"\"\"Name of the model.\"\"\"
    dtype: Literal["auto", "half"] = "auto"
    eager: bool = False
    \"\"\"Deprecated: has no effect.\"\"\"
    names: list[str] | None = None
    device: Literal["auto", "cuda", "cpu"] = current_platform.device_type
    lower: bool = envs.VLLM_FAST
    higher: bool = envs.VLLM_FAST
    outer: OuterConfig = Field(default_factory=OuterConfig)

def get_attr_docs(cls):
    raise RuntimeError("there is no source of an imported class to look at")
""",
    "vllm/model_executor/models/registry.py": """
import torch

_TEXT_GENERATION_MODELS = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "OwnForCausalLM": ("own", "OwnForCausalLM"),
}
_EMBEDDING_MODELS = {
    "BertModel": ("bert", "BertEmbeddingModel"),
    **{name: place for name, place in _TEXT_GENERATION_MODELS.items() if place[0] == "llama"},
}
_MULTIMODAL_MODELS = {
    "EarForConditionalGeneration": ("ear", "EarForConditionalGeneration"),
    "EarAndMouthForConditionalGeneration": ("vllm.models.ears", "EarAndMouth"),
}
_SPECULATIVE_DECODING_MODELS = {"Draft": ("draft", "Draft")}
_TRANSFORMERS_BACKEND_MODELS = {"TransformersForCausalLM": ("transformers", "T")}
_VLLM_MODELS = {**_TEXT_GENERATION_MODELS, **_SPECULATIVE_DECODING_MODELS}
raise RuntimeError("nothing else of it runs")
""",
    "vllm/model_executor/models/ear.py": """
import torch

class EarForConditionalGeneration(torch.nn.Module, SupportsTranscription):
    supports_transcription_only: ClassVar[Literal[True]] = True

raise RuntimeError("this is only read")
""",
    "vllm/models/ears.py": """
class Helper(torch.nn.Module):
    supports_transcription_only = True

class EarAndMouth(torch.nn.Module, SupportsTranscription):
    supports_transcription_only = False
""",
    "vllm/engine/arg_utils.py": """
import argparse
import dataclasses
import json
import sys
from typing import Literal, get_args, get_origin
import torch
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from vllm.config import ModelConfig, OuterConfig, get_attr_docs
from vllm.utils.argparse_utils import FlexibleArgumentParser

if torch.cuda.is_available():
    GPUS = torch.cuda.device_count()
else:
    GPUS = 0

def optional_type(inner):
    def parse(text):
        return None if text == "None" else inner(text)
    return parse

def one(field, docs):
    kwargs = {"help": docs[field.name], "default": getattr(ModelConfig, field.name, None)}
    if field.type is bool:
        kwargs["action"] = argparse.BooleanOptionalAction
    elif get_origin(field.type) is Literal:
        kwargs.update(type=str, choices=sorted(get_args(field.type)))
    elif field.name == "names":
        kwargs.update(type=str, nargs="+")
    elif dataclasses.is_dataclass(field.type):
        def parse_dataclass(text, cls=field.type):
            return TypeAdapter(cls).validate_json(text)
        kwargs.update(type=optional_type(parse_dataclass), default=field.default.default_factory())
    else:
        kwargs["type"] = optional_type(str)
    return kwargs

def first_of_a_set():
    hints = {Literal["a", "b"], Literal["a", "b", "c", "d"], Literal["a"]}
    return get_args(next(iter(hints)))

class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        group = parser.add_argument_group("ModelConfig")
        docs = get_attr_docs(ModelConfig)
        for field in dataclasses.fields(ModelConfig):
            group.add_argument("--" + field.name, **one(field, docs))
        parser.add_argument("--width", "-w", type=int, default=GPUS)
        parser.add_argument("--backend", type=lambda s: s.lower().replace("-", "_"),
                            choices=["fast_one"])
        parser.add_argument("--chance", choices=first_of_a_set())
        return parser
""",
    "vllm/entrypoints/openai/cli_args.py": """
from vllm.engine.arg_utils import EngineArgs

def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--secret", help=__import__("argparse").SUPPRESS)
    return EngineArgs.add_cli_args(parser)
""",
    "vllm/entrypoints/cli/serve.py": """
import uvloop
import vllm
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

class ServeSubcommand:
    def subparser_init(self, subparsers):
        print("loading, please wait")
        return make_arg_parser(subparsers.add_parser("serve"))
""",
    "vllm/metrics.py": """
from prometheus_client import Counter, Gauge
def make(show_hidden_metrics):
    Counter("vllm:tokens", "Tokens" " made.")
    Gauge(name="vllm:load", documentation="Load. DEPRECATED: use tokens.")
    if show_hidden_metrics:
        Gauge(name="vllm:old_load", documentation="Old load.")
    name = None
    if name is None:
        name = "vllm:config_info"
    Gauge(name=name, documentation="Told once.")
""",
}


def tree(folder: Path) -> Path:
    """Write the release as a source tree, and return `folder`."""
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def sdist(folder: Path) -> Path:
    """Write the release as a source distribution, and return its path."""
    path = folder / f"vllm-{VERSION}.tar.gz"
    held = {**FILES, "PKG-INFO": f"Metadata-Version: 2.4\nName: vllm\nVersion: {VERSION}\n"}
    del held["vllm/_version.py"]
    with tarfile.open(path, "w:gz") as archive:
        for name, text in held.items():
            entry = tarfile.TarInfo(f"vllm-{VERSION}/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


def wheel(folder: Path) -> Path:
    """Write the release as a wheel, and return its path."""
    path = folder / f"vllm-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    return path
