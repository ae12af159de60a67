"""RUNS ON THE NODE: provide fake packages for vLLM's code that defines flags.

The fake `Field` and `dataclass` of pydantic keep only what the argument parser reads (fields,
types, defaults and bounds). They validate nothing. They do not run `__post_init__`, because configs
inspect the machine there. The platform is always CUDA, so that a release has the same schema on
every machine.
"""

# ruff: noqa: ARG001, ARG005 - they stand for functions that take anything
from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
import typing
from typing import Any, Callable, Mapping, Optional

from gpufleet.on_node.flags.placeholder import make_placeholder

NOT_SET: Any = object()

# The bounds of a number that pydantic checks (pydantic.fields.Field).
BOUNDS = ("ge", "gt", "le", "lt", "multiple_of")


class FieldInfo:
    """The result of pydantic's `Field(...)`: a field's default or its factory, and its bounds."""

    def __init__(
        self,
        default: Any = NOT_SET,
        *,
        default_factory: Optional[Callable[[], Any]] = None,
        init: Optional[bool] = None,
        **more: Any,
    ) -> None:
        self.default = dataclasses.MISSING if default is ... else default
        self.default_factory = default_factory
        self.init = init
        self.bounds = {name: more[name] for name in BOUNDS if name in more}
        self.metadata: "list[Any]" = []

    def value(self) -> Any:
        """
        Return the default value, or None if the field is required.

        If the field has a factory, the factory creates the value.
        """
        if self.default_factory is not None:
            return self.default_factory()
        return None if self.default is NOT_SET else self.default


def pydantic_dataclass(cls: Any = None, **options: Any) -> Any:
    """
    Act as pydantic's decorator. Return a dataclass whose fields may have a `FieldInfo` as default.

    `dataclasses.fields` shows the `FieldInfo`. The attribute of the class is the plain default. An
    instance has this default or the factory's result.
    """
    if cls is None:
        return lambda decorated: pydantic_dataclass(decorated, **options)
    options = {
        name: options[name] for name in options if name not in ("config", "validate_on_init")
    }
    described = {
        name: cls.__dict__[name]
        for name in inspect.get_annotations(cls)
        if isinstance(cls.__dict__.get(name), FieldInfo)
    }
    for name, info in described.items():
        shown = {} if info.init is None else {"init": info.init}
        setattr(cls, name, dataclasses.field(default=info, **shown))
    cls = plain_dataclass(cls, **options)
    for name, info in described.items():
        if info.default_factory is None and info.default is not NOT_SET:
            setattr(cls, name, info.default)
        else:
            delattr(cls, name)
    plain_init = cls.__init__

    def init(self: Any, *args: Any, **values: Any) -> None:
        plain_init(self, *args, **values)
        for field in dataclasses.fields(self):
            given = getattr(self, field.name, None)
            if isinstance(given, FieldInfo):
                object.__setattr__(self, field.name, given.value())

    cls.__init__ = init
    cls._is_checked = True
    return cls


def is_checked(cls: Any) -> bool:
    """Return whether pydantic checks the fields of a class."""
    return "_is_checked" in getattr(cls, "__dict__", {})


def plain_dataclass(cls: Any = None, **options: Any) -> Any:
    """
    Act as `dataclasses.dataclass` for a class. Creating an instance does not inspect the machine.
    """
    if cls is None:
        return lambda decorated: plain_dataclass(decorated, **options)
    if "__post_init__" in cls.__dict__:
        cls.__post_init__ = lambda self, *args, **values: None
    return dataclasses.dataclass(cls, **options)


def _decorator(*args: Any, **options: Any) -> Any:
    """Act as a decorator that has no effect. It may be used with or without arguments."""
    if len(args) == 1 and not options and callable(args[0]):
        return args[0]
    return lambda decorated: decorated


class _Itself:
    """A generic type that has no effect: SkipValidation[X] is X."""

    def __class_getitem__(cls, item: Any) -> Any:
        return item


class _BaseModel:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def _nothing(*args: Any, **options: Any) -> None:
    return None


PYDANTIC: "dict[str, Any]" = {
    "Field": FieldInfo,
    "FieldInfo": FieldInfo,
    "dataclass": pydantic_dataclass,
    "ConfigDict": dict,
    "ValidationError": type("ValidationError", (ValueError,), {}),
    "SkipValidation": _Itself,
    "InstanceOf": _Itself,
    "BaseModel": _BaseModel,
    "field_validator": lambda *args, **options: _decorator,
    "model_validator": lambda *args, **options: _decorator,
    "PlainValidator": _nothing,
    "BeforeValidator": _nothing,
    "AfterValidator": _nothing,
}


def _type_variable(name: str, *bounds: Any, **options: Any) -> Any:
    """Return a TypeVar without a default, because Python supports defaults only since 3.13."""
    options.pop("default", None)
    return typing.TypeVar(name, *bounds, **options)


EXTENSIONS: "dict[str, Any]" = {
    **vars(typing),
    "TypeVar": _type_variable,
    "dataclass_transform": lambda *args, **options: _decorator,
    "deprecated": lambda *args, **options: _decorator,
    "override": _decorator,
}


class Namespace:
    """A module that has the given `names`. All other names are placeholders."""

    def __init__(self, name: str, names: Mapping[str, Any]) -> None:
        self.__dict__.update(names)
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return make_placeholder(self.__name__ + "." + name)


class _CudaPlatform:
    """vLLM's `current_platform` on a machine with NVIDIA GPUs."""

    device_type = device_name = "cuda"
    dispatch_key = "CUDA"
    simple_compile_backend = "inductor"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("is_"):
            return lambda *args, **options: name in ("is_cuda", "is_cuda_alike")
        return make_placeholder("platform." + name)


# Names of vLLM that get a different value here.
REPLACED: "dict[tuple[str, str], Any]" = {
    ("vllm.platforms", "current_platform"): _CudaPlatform(),
    # These functions search for entry points of other packages and import them.
    ("vllm.plugins", "load_general_plugins"): _nothing,
    ("vllm.plugins", "load_plugins_by_group"): lambda *args, **options: {},
    # Help texts are wanted, but `--help` on the command line would change the flags.
    ("vllm.engine.arg_utils", "NEEDS_HELP"): True,
}


def module_for_import(name: str, import_module: Callable[[str], Any]) -> Any:
    """
    Return the module that vLLM's code gets when it imports `name`, a module outside vLLM.

    Modules of the standard library are real, except for the import functions, which `import_module`
    replaces. Other packages are the fakes above or placeholders.
    """
    top = name.partition(".")[0]
    if top in ("pydantic", "pydantic_core"):
        return Namespace(name, PYDANTIC)
    if top == "typing_extensions":
        return Namespace(name, EXTENSIONS)
    if name == "torch":
        return Namespace(name, {"version": Namespace("torch.version", {"hip": None})})  # for CUDA
    if top == "regex":  # vLLM's patterns also work with `re`
        return re
    if name == "dataclasses":
        return Namespace(name, {**vars(dataclasses), "dataclass": plain_dataclass})
    if name == "importlib":
        own = {"import_module": import_module, "util": _no_packages()}
        return Namespace(name, {**vars(importlib), **own})
    if name == "importlib.util":
        return _no_packages()
    if name == "importlib.metadata":
        return Namespace(
            name, {"version": lambda package: make_placeholder(package + ".__version__")}
        )
    if top not in sys.stdlib_module_names:
        return make_placeholder(name)
    try:
        return importlib.import_module(name)
    except ImportError:  # this Python was built without the module
        return make_placeholder(name)


def _no_packages() -> Namespace:
    """
    Return an `importlib.util` that finds no packages.

    Otherwise, the packages that are installed would change a schema.
    """
    return Namespace(
        "importlib.util", {**vars(importlib.util), "find_spec": lambda name, package=None: None}
    )


def order_literals() -> None:
    """
    Give Literal types a hash that is the same in every process.

    Their own hash depends on memory addresses. vLLM 0.8.5 takes a flag's choices from the first of
    two Literal types in a set, so the choices of its real parser vary between runs. With this hash,
    the longer of the two types is first.
    """
    alias: Any = type(typing.Literal["a", "b"])
    alias.__hash__ = lambda literal: 64 - len(literal.__args__)
