"""
Read from vLLM's source distributions what each release serves, and write it as spans of releases.

    python tests/data/release_limits.py DIRECTORY > src/gpufleet/catalog/data/vllm_support.json

DIRECTORY holds `vllm-<version>.tar.gz`, as the package index has them. Nothing of them is run.

Written: for each architecture the releases that have it, those whose class can be a pipeline stage
(SupportsPP, a `forward` that takes `intermediate_tensors`), those that take LoRA adapters, those
that refuse more tensor-parallel ranks than experts, and those that refuse float16
(`_FLOAT16_NOT_SUPPORTED_MODELS` of vllm/config); for each quantization method the compute
capability and the activation dtypes that its class asks for (`get_min_capability`,
`get_supported_act_dtypes`), and the capability of the usual schemes of compressed-tensors.

A span is [first release, first release without it or null]; releases between two that were read
may have made the change already. Compared with what the classes of 0.32.0 say when they are
imported on a CPU (`supports_pp`, `supports_lora`): the same, but for DeepSeek V4, which has other
classes there.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

OLDEST = (0, 8, 0)
_MODELS = "vllm.model_executor.models"
_WANTED = re.compile(
    r"vllm/(model_executor/(models|layers/quantization)/.*|models/.*|config(/.*|\.py)|"
    r"config/.*|entrypoints/.*/config\.py)$"
)


class Release:
    """The Python modules of one release that matter here, as syntax trees."""

    def __init__(self, archive: Path) -> None:
        self.sources: dict[str, str] = {}
        self._trees: dict[str, ast.Module] = {}
        with tarfile.open(archive) as opened:
            for member in opened:
                path = member.name.partition("/")[2]
                if path.endswith(".py") and _WANTED.match(path):
                    content = opened.extractfile(member)
                    assert content is not None
                    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                    self.sources[name] = content.read().decode()
                    if path.endswith("/__init__.py"):
                        self.sources[name + ".__init__"] = ""

    def tree(self, module: str) -> ast.Module | None:
        if module not in self.sources:
            return None
        if module not in self._trees:
            self._trees[module] = ast.parse(self.sources[module])
        return self._trees[module]

    def find(self, module: str, name: str, seen: frozenset[Any] = frozenset()) -> Any:
        """Return (module, class) of a name, wherever the module has it from."""
        tree = self.tree(module)
        if tree is None or (module, name) in seen:
            return None
        seen = seen | {(module, name)}
        for node in _statements(tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
        # Of several platforms' implementations NVIDIA's comes last, under `else`.
        for node in reversed(list(_statements(tree))):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        found = self.find(self._absolute(module, node), alias.name, seen)
                        if found:
                            return found
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == name for target in node.targets
            ):
                value = node.value
                if isinstance(value, ast.Name):
                    return self.find(module, value.id, seen)
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".")
        up = node.level - (1 if module + ".__init__" in self.sources else 0)
        package = package[: len(package) - up] if up else package
        return ".".join([*package, *([node.module] if node.module else [])])

    def ancestors(self, module: str, name: str) -> list[tuple[str, Any]]:
        """Return the class and all it is derived from, nearest first; names where not found."""
        found = self.find(module, name)
        if found is None:
            return [(name, None)]
        where, node = found
        line: list[tuple[str, Any]] = [(node.name, node)]
        for written in node.bases:
            base = written.value if isinstance(written, ast.Subscript) else written
            if isinstance(base, ast.Name):
                line += self.ancestors(where, base.id)
            elif isinstance(base, ast.Attribute):
                line.append((base.attr, None))
        return line


def _statements(tree: ast.Module) -> Any:
    """Yield the statements of a module, those under `if` and `try` too."""
    for node in tree.body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            for inner in ast.walk(node):
                if inner is not node:
                    yield inner


def _dictionary(release: Release, module: str, name: str) -> ast.Dict | None:
    tree = release.tree(module)
    for node in ast.walk(tree) if tree else ():
        targets: list[Any] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(one, ast.Name) and one.id == name for one in targets) and isinstance(
            node.value, ast.Dict
        ):
            return node.value
    return None


def architectures(release: Release) -> dict[str, dict[str, bool]]:
    """Return {architecture: what its class can do}."""
    tables = [
        "_TEXT_GENERATION_MODELS",
        "_MULTIMODAL_MODELS",
        "_TRANSFORMERS_SUPPORTED_MODELS",
        "_TRANSFORMERS_MODELS",
        "_TRANSFORMERS_BACKEND_MODELS",
    ]
    found: dict[str, dict[str, bool]] = {}
    refusing = {_OF_TYPE[name] for name in without_float16(release)}
    for table in tables:
        rows = _dictionary(release, f"{_MODELS}.registry", table)
        for key, value in zip(rows.keys, rows.values, strict=True) if rows else ():
            if key is None:
                continue
            relative, cls = ast.literal_eval(value)
            module = relative if relative.startswith("vllm.") else f"{_MODELS}.{relative}"
            line = release.ancestors(module, cls)
            names = {name for name, _ in line}
            forward = next(
                (
                    inner
                    for _, node in line
                    if node is not None and not _is_protocol(node)
                    for inner in node.body
                    if isinstance(inner, ast.FunctionDef) and inner.name == "forward"
                ),
                None,
            )
            takes = forward is not None and (
                forward.args.kwarg is not None
                or any(
                    argument.arg == "intermediate_tensors"
                    for argument in (*forward.args.args, *forward.args.kwonlyargs)
                )
            )
            if line[0][1] is None:
                print(f"{module}.{cls}: not found", file=sys.stderr)
                continue
            found[ast.literal_eval(key)] = {
                "pipeline": "SupportsPP" in names and takes,
                "lora": "SupportsLoRA" in names,
                "expert_limit": _limits_by_experts(release.sources[found_in(release, module, cls)]),
                "no_float16": ast.literal_eval(key) in refusing,
            }
    return found


def _is_protocol(node: ast.ClassDef) -> bool:
    """Say whether a class only says what others have to have."""
    return any(ast.unparse(base).startswith("Protocol") for base in node.bases)


def found_in(release: Release, module: str, cls: str) -> str:
    """Return the module that a class is defined in."""
    where, _ = release.find(module, cls)
    return str(where)


def _limits_by_experts(source: str) -> bool:
    """Say whether a module refuses more ranks than experts."""
    text = re.sub(r'"\s*f?"', "", source)
    return bool(
        re.search(r"Tensor parallel size .{0,40}is greater than\s+the number of experts", text)
    )


_OF_TYPE = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "plamo2": "Plamo2ForCausalLM",
}
"""The architectures whose configs have these model types."""


def _constant(line: list[tuple[str, Any]], method: str) -> Any:
    for _, node in line:
        for inner in node.body if node is not None else ():
            if isinstance(inner, ast.FunctionDef) and inner.name == method:
                returned = [one for one in ast.walk(inner) if isinstance(one, ast.Return)]
                if len(returned) == 1 and returned[0].value is not None:
                    return ast.unparse(returned[0].value)
                return " | ".join(ast.unparse(one.value) for one in returned if one.value)
    return None


def methods(release: Release) -> dict[str, dict[str, Any]]:
    """Return {quantization method: what its class asks of GPU and dtype}."""
    module = "vllm.model_executor.layers.quantization"
    rows = _dictionary(release, module, "method_to_config")
    tree = release.tree(module)
    assert rows is not None
    assert tree is not None
    imported = {
        alias.asname or alias.name: (release._absolute(module, node), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = {}
    for key, value in zip(rows.keys, rows.values, strict=True):
        if key is None or not isinstance(value, ast.Name) or value.id not in imported:
            continue
        line = release.ancestors(*imported[value.id])
        minimum = _constant(line, "get_min_capability")
        dtypes = _constant(line, "get_supported_act_dtypes")
        if minimum is None or dtypes is None or not re.fullmatch(r"-?\d+", minimum):
            print(f"{ast.literal_eval(key)}: {minimum} {dtypes}", file=sys.stderr)
            continue
        found[ast.literal_eval(key)] = {
            "minimum": int(minimum),
            "dtypes": [
                {"half": "float16", "float": "float32"}.get(name, name)
                for name in re.findall(r"torch\.(\w+)", dtypes)
            ],
        }
    return found


_SCHEMES = {
    "int4": ("compressed_tensors_wNa16", "CompressedTensorsWNA16"),
    "int8": ("compressed_tensors_w8a8_int8", "CompressedTensorsW8A8Int8"),
    "float8": ("compressed_tensors_w8a16_fp8", "CompressedTensorsW8A16Fp8"),
    "float4": ("compressed_tensors_w4a4_nvfp4", "CompressedTensorsW4A4Fp4"),
    "float4-weights": ("compressed_tensors_w4a16_nvfp4", "CompressedTensorsW4A16Fp4"),
}


def schemes(release: Release) -> dict[str, int]:
    """Return the least capability that each scheme of compressed-tensors asks for."""
    found = {}
    for name, (module, cls) in _SCHEMES.items():
        where = f"vllm.model_executor.layers.quantization.compressed_tensors.schemes.{module}"
        minimum = _constant(release.ancestors(where, cls), "get_min_capability")
        if minimum is not None:
            found[name] = min(int(part) for part in re.findall(r"\d+", minimum))
    # Weights alone are kept in four bits where the GPU has no arithmetic for them.
    weights = found.pop("float4-weights", None)
    if weights is not None and "float4" in found:
        found["float4"] = min(found["float4"], weights)
    return found


def without_float16(release: Release) -> dict[str, bool]:
    """Return the model types that refuse float16."""
    found = {}
    for module in list(release.sources):
        if module.startswith("vllm.config"):
            rows = _dictionary(release, module, "_FLOAT16_NOT_SUPPORTED_MODELS")
            found |= {ast.literal_eval(key): True for key in (rows.keys if rows else ()) if key}
    return found


def spans(by_release: dict[str, Any]) -> list[list[str | None]]:
    """Return the spans of releases whose value is true."""
    found: list[list[str | None]] = []
    on = False
    for version, value in by_release.items():
        if bool(value) != on:
            if value:
                found.append([version, None])
            else:
                found[-1][1] = version
        on = bool(value)
    return found


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def main() -> None:
    archives = {
        path.name.removeprefix("vllm-").removesuffix(".tar.gz"): path
        for path in Path(sys.argv[1]).glob("vllm-*.tar.gz")
    }
    versions = sorted((v for v in archives if _order(v) >= OLDEST), key=_order)
    read: dict[str, Any] = {}
    for version in versions:
        print(version, file=sys.stderr)
        release = Release(archives[version])
        asked = methods(release)
        for name, minimum in schemes(release).items():
            both = ["bfloat16", "float16"]
            asked[f"compressed-tensors {name}"] = {"minimum": minimum, "dtypes": both}
        read[version] = (architectures(release), asked)

    def over(table: int, name: str, key: str | None) -> list[list[str | None]]:
        rows = {version: read[version][table].get(name) for version in versions}
        return spans({v: row if key is None or not row else row[key] for v, row in rows.items()})

    named = [
        sorted({name for version in versions for name in read[version][table]}) for table in (0, 1)
    ]
    quantization: dict[str, list[dict[str, Any]]] = {}
    for name in named[1]:
        rows: list[dict[str, Any]] = []
        last: dict[str, Any] | None = None
        for version in versions:
            now = read[version][1].get(name)
            if now != last:
                rows.append({"since": version, **(now or {"gone": True})})
            last = now
        quantization[name] = rows
    document = {
        "source": "vLLM's source distributions, read by tests/data/release_limits.py",
        "releases": versions,
        "architectures": {
            name: {
                key: found
                for key, of in _KEYS.items()
                if (found := over(0, name, of)) or key in {"served", "pipeline", "lora"}
            }
            for name in named[0]
        },
        "quantization": quantization,
    }
    lines = [f'{{"source": {json.dumps(document["source"])},']
    lines.append(f'"releases": {json.dumps(versions)},')
    for key in ("architectures", "quantization"):
        rows_of = [
            f"{json.dumps(name)}: {json.dumps(value)}" for name, value in document[key].items()
        ]
        lines.append(
            f'"{key}": {{\n' + ",\n".join(rows_of) + "\n}" + ("," * (key == "architectures"))
        )
    print("\n".join(lines) + "\n}")


_KEYS = {
    "served": None,
    "pipeline": "pipeline",
    "lora": "lora",
    "expert_limit": "expert_limit",
    "no_float16": "no_float16",
}

if __name__ == "__main__":
    main()
