"""Convert servers that are started by hand or by other tools to settings.  Pure.

Contract: the result is valid for `settings/node_settings.py`, except where a note leaves a decision
to the operator. Every argument and variable is either in the settings or in a note with the reason.
Neither settings nor notes contain keys or tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gpufleet.flags.command_line import parse
from gpufleet.flags.schema import Schema
from gpufleet.importer.findings import Findings
from gpufleet.importer.flag_rules import FlagRules, sglang_rules, vllm_rules
from gpufleet.importer.flag_settings import (
    FIRST_PORT,
    FlagSettings,
    quantization_of,
    split_model,
)
from gpufleet.importer.launch_variables import take_variables
from gpufleet.importer.placed import LAST, Placed, placed
from gpufleet.importer.proxy_names import proxy_settings
from gpufleet.importer.secret_arguments import without_secrets
from gpufleet.importer.server import Launch, Note, ProxyName
from gpufleet.settings import engine_flags
from gpufleet.settings.adapter_settings import Adapter, AdapterName
from gpufleet.settings.engine_flags import DEFAULT, EngineName
from gpufleet.settings.server_sandbox import FIRST_FREE_PORT, flag_mistakes

_MODEL = re.compile(r"/\S+|[\w.-]+/[\w.-]+")
_SERVED = re.compile(r"[\w.:/-]+")
_NAME_LENGTH = 40  # settings.ModelName
# The `kind` for each value of `--task`, a flag of older releases.
_TASKS = {
    "classify": "classify",
    "embed": "embed",
    "embedding": "embed",
    "reward": "reward",
    "score": "rerank",
    "transcription": "transcribe",
}


@dataclass(frozen=True)
class Imported:
    """Settings for group_vars, with notes on the parts that were dropped or renamed."""

    settings: Mapping[str, Any]
    notes: tuple[Note, ...]

    @property
    def decided(self) -> bool:
        """Return whether the notes leave no decision to the operator."""
        return not any(note.decide for note in self.notes)


def convert(
    launches: Iterable[Launch], schema: Schema, names: Sequence[ProxyName] = ()
) -> Imported:
    """
    Return the settings for servers, and notes in the order of the servers.

    `schema` is that of the vLLM release. For SGLang, the newest known release is used. `names` are
    LiteLLM's names that belong to none of the servers.
    """
    serving: dict[str, dict[str, Any]] = {}
    notes: list[Note] = []
    shared: dict[str, Any] = {}
    asked: list[tuple[ProxyName, str | None]] = [(name, None) for name in names]
    launches = tuple(launches)
    rules = {
        engine: vllm_rules(schema) if engine == "vllm" else sglang_rules()
        for engine in {launch.engine for launch in launches}
    }
    # If there is also a section `vllm`, the section of another engine takes these settings from it.
    section: EngineName = "sglang" if {*rules} == {"sglang"} else "vllm"
    for launch in launches:
        found = Findings(_key(launch.name, serving), section)
        _server(launch, rules[launch.engine], found)
        serving[found.key] = found.ordered()
        shared |= found.shared
        notes += found.sentences()
        asked += [(name, found.key) for name in launch.proxy_names]
    everywhere = _common([served.get("environment", {}) for served in serving.values()])
    if len(serving) > 1 and len(rules) == 1 and everywhere:
        for served in serving.values():
            own = {k: v for k, v in served["environment"].items() if k not in everywhere}
            served.pop("environment")
            if own:
                served["environment"] = own
        shared["environment"] = everywhere
    settings: dict[str, Any] = {section: shared} if shared else {}
    if serving:
        settings["serving"] = serving
    known = {key: str(served.get("served_name") or key) for key, served in serving.items()}
    proxy, told = proxy_settings(asked, known)
    if proxy:
        settings["litellm"] = proxy
    notes += told
    if any(engine_flags.of(engine).opens_ports for engine in rules):
        notes.append(
            Note(
                "servers of SGLang open a port on all addresses of the node: set "
                f"`firewall` for the nodes (or `{section}.allow_unguarded_ports: true`)"
            )
        )
    notes += [
        Note(f"`{key}` contains only a part of the settings: merge it into your own `{key}`")
        for key in (section, "litellm")
        if key in settings
    ]
    return Imported(settings, tuple(notes))


def _key(name: str, taken: Iterable[str]) -> str:
    """Return a key for `serving` that is valid and not used yet."""
    base = re.sub(r"[^a-z0-9.-]+", "-", name.rpartition("/")[2].lower()).strip("-.")
    base = base[:_NAME_LENGTH].strip("-.") or "model"
    key, count = base, 1
    while key in taken:
        count += 1
        key = f"{base[: _NAME_LENGTH - 4]}-{count}"
    return key


def _common(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    if not environments:
        return {}
    first, *others = environments
    return {
        name: value
        for name, value in first.items()
        if all(other.get(name) == value for other in others)
    }


def _server(launch: Launch, rules: FlagRules, found: Findings) -> None:
    """Convert one server to settings."""
    if found.key != launch.name:
        found.say(
            f"{launch.name} is renamed to `{found.key}`, because names are parts of unit names "
            "and paths"
        )
    if launch.engine != DEFAULT:
        found.served["engine"] = launch.engine
    for note in launch.notes:
        found.say(note.text, decide=note.decide)
    model, line = split_model(without_secrets(placed(launch.argv), rules, found), rules)
    environment, added = take_variables(
        launch.environment,
        rules,
        quantization_of(line.words, rules.schema),
        found,
        launch.secret_variables,
    )
    line = Placed((*line.words, *added), (*line.places, *(LAST for _ in added)))
    written = model
    model, line = _on_the_node(model, line, launch, found)
    FlagSettings(rules, found, launch.port).take(line)
    if launch.engine == "vllm":
        _kind(found, line.words)
        _adapters(found)
    _left_behind(launch, rules, found)
    _unset(launch, rules, found, line)
    _model(found, model, written)
    if found.flags:
        found.served["flags"] = dict(sorted(found.flags.items()))
    if environment:
        found.served["environment"] = environment
    for flag, mistake in flag_mistakes(model or "", found.flags, environment.keys(), launch.engine):
        found.say(f"`{flag}`: {mistake}", decide=True, at=LAST)
    if launch.replicas is not None:
        found.served["replicas"] = launch.replicas
    if launch.port not in {None, FIRST_PORT}:
        found.served["port"] = launch.port
        found.say(
            f"port {launch.port} is the port of the first replica on a node; further "
            "replicas use the next ports",
            at=LAST,
        )
    port = found.served.get("port")
    if isinstance(port, int) and port < FIRST_FREE_PORT:
        found.say(
            f"`port: {port}`: only root can listen on ports below {FIRST_FREE_PORT}, and "
            f"servers do not run as root: write {FIRST_FREE_PORT} or more here, and {port} "
            "as `gateway.port`",
            decide=True,
            at=LAST,
        )


def _unset(launch: Launch, rules: FlagRules, found: Findings, line: Placed) -> None:
    """
    Set the values that the engine uses without a flag, if they differ from gpufleet's defaults.
    """
    given = parse(rules.schema, line.words).by_name.keys() | ({"--port"} if launch.port else set())
    for flag, (name, value) in rules.unset.items():
        if flag not in given and name not in found.served:
            found.served[name] = value
            found.say(
                f"`{name}: {value}` is set, because this is the value without `{flag}`", at=LAST
            )


def _kind(found: Findings, words: Sequence[str]) -> None:
    """Set `kind` if the command line determines it. Otherwise gpufleet uses the model's files."""
    task = ""
    for word, after in pairwise((*words, "")):
        name, equals, value = word.partition("=")
        if name == "--task":
            task = value if equals else after
    convert = found.flags.get("convert")
    kind = _TASKS.get(task) or ("embed" if convert == "embed" else None)
    if kind:
        found.served["kind"] = kind
    elif convert == "classify":
        found.served["kind"] = None
        found.say(
            "`kind` must be rerank or classify: with `--convert classify`, a model returns "
            "scores of documents (rerank) or labels (classify)",
            decide=True,
            at=LAST,
        )


def _adapters(found: Findings) -> None:
    """
    Replace the flag `lora-modules` by `adapters`.

    This is done only if all adapters can be converted and no other flag loads adapters.
    """
    modules = found.flags.get("lora-modules")
    if not isinstance(modules, list) or "default-mm-loras" in found.flags:
        return
    named = dict(map(_module, modules))
    if len(named) < len(modules):
        return
    try:
        for name, path in named.items():
            TypeAdapter(AdapterName).validate_python(name)
            pinned = {} if path.startswith("/") else {"revision": "0" * 40}
            Adapter.model_validate({"source": path, **pinned})
    except ValidationError:
        return
    found.served["adapters"] = {
        name: {"source": path} if path.startswith("/") else {"source": path, "revision": None}
        for name, path in sorted(named.items())
    }
    for flag in ("lora-modules", "enable-lora"):
        found.flags.pop(flag, None)
    found.say(
        "`--enable-lora` and `--lora-modules` become `adapters`, so that gpufleet counts "
        "the adapters' memory, and a gateway knows their names",
        at=LAST,
    )
    for name, path in named.items():
        if not path.startswith("/"):
            found.say(
                f"`adapters.{name}.revision` must be the commit of {path}, so that every "
                "replica serves the same files: `git ls-remote "
                f"https://huggingface.co/{path} HEAD` prints the current commit",
                decide=True,
                at=LAST,
            )


def _module(word: Any) -> tuple[str, str]:
    """
    Return the name and path in a word of `--lora-modules`. If the word has more, both are empty.
    """
    if isinstance(word, str) and word.startswith("{"):
        word = json.loads(word)
    if isinstance(word, Mapping):
        if word.keys() != {"name", "path"}:
            return "", ""
        return str(word["name"]), str(word["path"])
    name, _, path = str(word).partition("=")
    return name, path


def _left_behind(launch: Launch, rules: FlagRules, found: Findings) -> None:
    """Add a note about words on separate lines after the end of the server's command."""
    left = without_secrets(placed(launch.left_behind), rules, found)
    if left.words:
        found.say(
            f"`{' '.join(left.words)}` follows on separate lines after the end of the "
            f"command, so a shell does not pass it to {rules.title}, and it is dropped. If "
            "you want it, write `\\` at the end of the line before it",
            decide=True,
            at=LAST,
        )


def _on_the_node(
    model: str | None, line: Placed, launch: Launch, found: Findings
) -> tuple[str | None, Placed]:
    """
    Return the model and the arguments, after paths in a container are replaced by paths on the
    node.
    """
    used: set[str] = set()

    def outside(text: str) -> str:
        for inner, outer in sorted(launch.mounts, key=lambda one: -len(one[0])):
            inside = inner.rstrip("/")
            if text == inside or text.startswith(f"{inside}/"):
                used.add(inner)
                path = outer.rstrip("/") + text[len(inside) :]
                found.say(f"{text} is {path} on the node")
                return path
        return text

    def value(word: str) -> str:
        name, equals, text = word.partition("=")
        if word.startswith("-"):
            return f"{name}={outside(text)}" if equals else word
        return outside(word)

    model = None if model is None else outside(model)
    line = Placed(tuple(map(value, line.words)), line.places)
    for inner, outer in launch.mounts:
        if inner not in used:
            found.say(
                f"the mount {outer}:{inner} is dropped: servers do not run in containers, "
                "and a deploy copies files to a place where it can check them"
            )
    return model, line


def _model(found: Findings, model: str | None, written: str | None) -> None:
    served = found.served
    if model is None or written is None:
        served["model"] = None
        found.say("the model is unknown: set `model`", decide=True, at=LAST)
        return
    served["model"] = model
    if not _MODEL.fullmatch(model):
        found.say(
            f"`model: {model}` is neither an absolute path on the node nor a name on the "
            "Hub, `organisation/name`: write one of the two",
            decide=True,
            at=LAST,
        )
    elif not model.startswith("/") and "revision" not in served:
        served["revision"] = None
        found.say(
            f"`revision` must be the commit of {model}, so that every node serves the same "
            f"files: `git ls-remote https://huggingface.co/{model} HEAD` prints the current "
            "commit",
            decide=True,
            at=LAST,
        )
    elif model.startswith("/") and served.pop("revision", None):
        found.say(
            "`--revision` is dropped, because it has no effect if the model is a path", at=LAST
        )
    name = served.get("served_name", written)
    if name is None:
        return  # a note already reports that only the shell knows the name's variable
    if name == found.key:
        served.pop("served_name", None)
    elif _SERVED.fullmatch(str(name)):
        if "served_name" not in served:
            found.say(
                f"`served_name` is set, so that clients can still use the name {name}", at=LAST
            )
        served["served_name"] = name
    else:
        served.pop("served_name", None)
        found.say(f"clients now use the name {name!r}, and will have to use {found.key!r}", at=LAST)
