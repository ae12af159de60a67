"""RUNS ON THE NODE: import names of an engine by running only the statements that they need.

An import of vLLM's or SGLang's argument parser also imports torch and most of the engine. But one
name needs only a few top-level statements: those that bind it, and those that bind the names used
there. Each module becomes a scope that runs these statements when a name is used for the first
time. So the release's own code builds the parser, and no other code of the release runs.

This module also handles the imports in that code. The engine's modules are lazy, the modules of the
standard library are real, and all other packages are fakes or placeholders (`fakes`).
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import importlib.util
import inspect
import sys
import types
import warnings
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from gpufleet.on_node.flags.bindings import Bindings, bound_names
from gpufleet.on_node.flags.fakes import REPLACED, module_for_import
from gpufleet.on_node.flags.placeholder import make_placeholder
from gpufleet.on_node.flags.source import Release

# The compiler's flag for `from __future__ import annotations`.
_POSTPONED = __future__.annotations.compiler_flag


class _Unbound:
    """The type of `UNBOUND`."""


UNBOUND: Any = _Unbound()
"""The value of a name that no statement binds."""


class Modules:
    """
    All modules of one release, by name.

    `unresolved` has the statements that could not be run, as "module:line name: reason". The names
    that they bind are placeholders. `replaced` maps names to values that are used instead of their
    statements. `packages` has replacements of packages, in addition to the fakes for all engines.
    """

    def __init__(
        self,
        release: Release,
        replaced: Mapping[Tuple[str, str], Any] = REPLACED,
        packages: Optional[Mapping[str, Any]] = None,
    ) -> None:
        self.release = release
        self.replaced: Dict[Any, Any] = dict(replaced)
        self._packages = packages or {}
        self.unresolved: List[str] = []
        self.builtins = {**vars(builtins), "__import__": self._import}
        self._scopes: Dict[str, Optional[Scope]] = {}

    def get(self, name: str) -> Optional[Scope]:
        """Return the scope of the module `name`, or None if the release has no such module."""
        if name not in self._scopes:
            self._scopes[name] = self._read(name)
        return self._scopes[name]

    def _read(self, name: str) -> Optional[Scope]:
        base = name.replace(".", "/")
        for path in (base + "/__init__.py", base + ".py"):
            text = self.release.read(path)
            if text is None:
                continue
            try:
                scope = Scope(self, name, path, text)
            except SyntaxError as error:  # the file needs a newer Python than this one
                self.unresolved.append("%s: this Python cannot parse it: %s" % (path, error.msg))
                return None
            loaded: Dict[str, Any] = sys.modules
            loaded[name] = scope.module  # typing and dataclasses search there
            return scope
        return None

    def value(self, module: str, name: str) -> Any:
        """Return `module.name`, or UNBOUND if the module or the name does not exist."""
        scope = self.get(module)
        return UNBOUND if scope is None else scope.lookup(name)

    def class_statement(self, cls: type) -> Optional[ast.ClassDef]:
        """Return the statement that defines a class, or None if it is not the release's."""
        scope = self._scopes.get(cls.__module__)
        statements = () if scope is None else scope.bindings.at_run_time.get(cls.__name__, ())
        return next((one for one in statements if isinstance(one, ast.ClassDef)), None)

    def is_own(self, name: str) -> bool:
        """Return whether a module belongs to the release."""
        return name.partition(".")[0] == self.release.package

    def import_module(self, name: str, package: Optional[str] = None) -> Any:
        """Return the result of `import name`: a lazy module, a real module, or a placeholder."""
        name = importlib.util.resolve_name(name, package)
        if self.is_own(name):
            scope = self.get(name)
            return make_placeholder(name) if scope is None else scope.module
        if name in self._packages:
            return self._packages[name]
        return module_for_import(name, self.import_module)

    def _import(
        self, name: str, scope: Any = None, _local: Any = None, wanted: Any = (), level: int = 0
    ) -> Any:
        """Import as the built-in `__import__` does. Import statements use this function instead."""
        if level:
            name = importlib.util.resolve_name("." * level + name, scope["__package__"])
        return self.import_module(name if wanted else name.partition(".")[0])


class _Names(Dict[str, Any]):
    """The globals of a module. A name is defined when it is used for the first time."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self._scope = scope

    def __missing__(self, name: str) -> Any:
        value = self._scope.resolve(name)
        if value is UNBOUND:
            raise KeyError(name)  # then Python searches its built-in names
        return value


class Module:
    """A module for the release's code. Its attributes are exactly the names of its scope."""

    __slots__ = ("__file__", "__name__", "_scope")

    def __init__(self, scope: Scope) -> None:
        self.__name__ = scope.name
        self.__file__ = scope.path
        self._scope = scope

    @property
    def __dict__(self) -> Any:  # type: ignore[override]  # annotations are evaluated in it
        return self._scope.names

    def __getattr__(self, name: str) -> Any:
        special = name.startswith("__") and name not in self._scope.bindings.at_run_time
        value = UNBOUND if special else self._scope.lookup(name)
        if value is UNBOUND:
            raise AttributeError("%s has no %s" % (self.__name__, name))
        return value


class Scope:
    """One module of the release: the statements that bind names, and the names defined so far."""

    def __init__(self, modules: Modules, name: str, path: str, text: str) -> None:
        self.name = name
        self.path = path
        self.tree = ast.parse(text, path)
        self.bindings = Bindings(self.tree)
        self.module = Module(self)
        self._modules = modules
        self._is_package = path.endswith("/__init__.py")
        self._package = name if self._is_package else name.rpartition(".")[0]
        self._busy: "set[str]" = set()
        self._ran: "set[ast.stmt]" = set()
        self.names = _Names(self)
        self.names.update(
            __name__=name,
            __file__=path,
            __package__=self._package,
            __builtins__=modules.builtins,
        )

    def lookup(self, name: str) -> Any:
        """Return `module.name` as code outside the module gets it, also through `__getattr__`."""
        bindings = self.bindings.at_run_time
        made = name in bindings or self._has(name) or (self.name, name) in self._modules.replaced
        if not made and "__getattr__" in bindings:
            busy = "." + name
            if busy not in self._busy:
                self._busy.add(busy)
                try:
                    return self.names["__getattr__"](name)
                except Exception:  # the module's __getattr__ does not provide the name
                    pass
                finally:
                    self._busy.discard(busy)
        return self.resolve(name)

    def resolve(self, name: str) -> Any:
        """
        Run the statements that bind `name` in this scope, and return its value.

        If no statement binds it, return UNBOUND.
        """
        if (self.name, name) in self._modules.replaced:
            return self._modules.replaced[self.name, name]
        if self._has(name):
            return self.names[name]
        if name in self._busy:  # two modules import each other
            return make_placeholder(self.name + "." + name)
        self._busy.add(name)
        try:
            statements = self.bindings.binding(name)
            if not statements:
                return self._from_elsewhere(name)
            for statement in statements:
                self._run(statement, name)
            return self.names.setdefault(name, make_placeholder(self.name + "." + name))
        finally:
            self._busy.discard(name)

    def run_all(self) -> None:
        """Run the whole module as an import does: define every name, and run top-level calls."""
        for name in list(self.bindings.at_run_time):
            self.resolve(name)
        for statement in self.tree.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self._execute(statement, "call")

    def sources(self, name: str) -> Iterator[str]:
        """Yield the modules from which `name` is imported, at any depth of the code."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and any(one.name == name for one in node.names):
                yield self._source(node)

    def _has(self, name: str) -> bool:
        return dict.__contains__(self.names, name)

    def _source(self, statement: ast.ImportFrom) -> str:
        name = "." * statement.level + (statement.module or "")
        return importlib.util.resolve_name(name, self._package)

    def _from_elsewhere(self, name: str) -> Any:
        """
        Return `name` from a module that is imported with a star, or else the submodule `name`.
        """
        for statement in self.bindings.stars:
            source = self._source(statement)
            scope = self._modules.get(source) if self._modules.is_own(source) else None
            value = UNBOUND if scope is None else scope.resolve(name)
            if value is not UNBOUND:
                self.names[name] = value
                return value
        submodule = self._modules.get(self.name + "." + name) if self._is_package else None
        return UNBOUND if submodule is None else submodule.module

    def _run(self, statement: ast.stmt, name: str) -> None:
        """Run the part of `statement` that binds `name`. For an `if`, run the branch that holds."""
        if isinstance(statement, ast.If):
            taken = statement.body if self._holds(statement.test) else statement.orelse
            self._run_those(taken, name)
        elif isinstance(statement, ast.Try):
            self._run_try(statement, name)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            self._run_import(statement, name)
        elif statement not in self._ran:  # a statement may bind several names
            self._ran.add(statement)
            self._execute(statement, name)

    def _run_try(self, statement: ast.Try, name: str) -> None:
        unresolved = self._modules.unresolved
        before = len(unresolved)
        self._run_those(statement.body, name)
        if len(unresolved) > before:
            for handler in statement.handlers:
                self._run_those(handler.body, name)
            if self._has(name):  # the first of these parts that binds the name counts
                del unresolved[before:]
        self._run_those(statement.orelse + statement.finalbody, name)

    def _run_those(self, body: List[ast.stmt], name: str) -> None:
        """Run the statements of `body` that bind `name`."""
        for statement in body:
            if name in bound_names(statement):
                self._run(statement, name)

    def _holds(self, test: ast.expr) -> bool:
        try:
            code = compile(ast.Expression(test), self.path, "eval", dont_inherit=True)
            return bool(eval(code, self.names))
        except Exception:  # the test needs a package that is absent
            return False

    def _run_import(self, statement: Any, name: str) -> None:
        """Import one name of the statement, but not its other names."""
        kind = type(statement)
        alone = kind(**dict(ast.iter_fields(statement)))
        alone.names = [one for one in statement.names if name in bound_names(kind(names=[one]))]
        try:
            self._exec(ast.copy_location(alone, statement))
        except ImportError:  # it needs a newer Python, or a file that only a build creates
            self.names[name] = make_placeholder("%s.%s" % (getattr(statement, "module", ""), name))

    def _execute(self, statement: ast.stmt, name: str) -> None:
        try:
            self._exec(statement)
        except (Exception, SystemExit) as error:
            self._modules.unresolved.append(
                "%s:%d %s: %s: %s"
                % (self.name, statement.lineno, name, type(error).__name__, error)
            )

    def _exec(self, statement: ast.stmt) -> None:
        flags = _POSTPONED if self.bindings.postponed else 0
        tree = ast.Module([statement], [])
        code = compile(tree, self.path, "exec", dont_inherit=True, flags=flags)
        for used in _class_names(code):
            if not self._has(used) and self.bindings.binding(used):
                self.names.setdefault(used, self.resolve(used))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(code, self.names)


def _class_names(code: types.CodeType) -> Iterator[str]:
    """
    Yield the global names that are used in class bodies in `code`.

    When a function looks up a global, the global is defined then. But a class body reads the
    namespace directly (LOAD_NAME), so its names must be defined before it runs.
    """
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            if not inner.co_flags & inspect.CO_OPTIMIZED:
                for instruction in dis.get_instructions(inner):
                    if instruction.opname in ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                        yield instruction.argval
            yield from _class_names(inner)
