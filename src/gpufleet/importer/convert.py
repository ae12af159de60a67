"""Makes settings of servers that somebody starts by hand.  Pure.

Contract: what comes out is what `settings/node_settings.py` takes, but for what a person has to
decide, which is told as such. Every word of the command line and every variable is either in the
settings or in a note that says why not. No key or token is in either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpufleet import redact
from gpufleet.flags import values
from gpufleet.flags.check import check
from gpufleet.flags.command_line import CommandLine, GivenFlag, parse
from gpufleet.flags.environment import environment_problems
from gpufleet.flags.problem import Kind, Problem, Severity
from gpufleet.flags.schema import FlagKind, Schema
from gpufleet.importer.server import Launch, Note
from gpufleet.settings.open_secrets import suggested_file

_MODEL = re.compile(r"/\S+|[\w.-]+/[\w.-]+")
_SERVED = re.compile(r"[\w.:/-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_UNSET = re.compile(r"\$\{?[A-Za-z_0-9@*#(]|`")
_NAME_LENGTH = 40  # settings.ModelName
_FIRST_PORT = 8000

API_KEY_FILE = "secrets/vllm-api-key"
HF_TOKEN_FILE = "secrets/hf-token"  # noqa: S105  # a file's name
_TO_A_FILE = "write it to a file that git does not track"

_SECRET_FLAGS = {"--api-key": "api_key_file", "--hf-token": "hf_token_file"}
_SECRET_VARIABLES = {
    "VLLM_API_KEY": "api_key_file",
    "HF_TOKEN": "hf_token_file",
    "HUGGING_FACE_HUB_TOKEN": "hf_token_file",
}
_FILES = {"api_key_file": API_KEY_FILE, "hf_token_file": HF_TOKEN_FILE}

_OWN_GPUS = "the plan decides which GPUs a stage gets"
_OWN_DIRECTORIES = "each stage has directories of its own"
_DROPPED_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": _OWN_GPUS,
    "NVIDIA_VISIBLE_DEVICES": _OWN_GPUS,
    "NVIDIA_DRIVER_CAPABILITIES": "it is read by NVIDIA's container runtime alone",
    "CUDA_DEVICE_ORDER": _OWN_GPUS,
    "PATH": "the release's own programs come first",
    "LD_LIBRARY_PATH": "it would put other libraries before those of the release",
    "PYTHONPATH": "it would put other packages before those of the release",
    "VIRTUAL_ENV": "the release has an environment of its own",
    "HF_HUB_OFFLINE": "files are staged before a start, which then asks no hub",
    "HF_HUB_ENABLE_HF_TRANSFER": "files are staged before a start",
    "VLLM_HOST_IP": "each node has its own, which the plan knows",
    "VLLM_PORT": "the plan gives ports",
} | dict.fromkeys(
    (
        "HOME",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "TRANSFORMERS_CACHE",
        "XDG_CACHE_HOME",
        "VLLM_CACHE_ROOT",
        "VLLM_CONFIG_ROOT",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
        "CUDA_CACHE_PATH",
        "TMPDIR",
    ),
    _OWN_DIRECTORIES,
)

_OWN_NODES = "the plan decides over which nodes a replica goes (`span_nodes: true` allows several)"
_OWN_ENGINES = "the plan decides where the engines of a replica run"
_PLAIN = "endpoints are plain HTTP for now: put TLS in front of them"
_DROPPED_FLAGS = {
    "--host": "vllm.listen says which address all endpoints bind",
    "--uds": "endpoints are TCP ports",
    "--config": "its file was not read: write its flags under `flags`",
    "--download-dir": "files are staged where a deploy can check them",
    "--distributed-executor-backend": "a stage's ranks are started as the plan needs it",
    "--nnodes": _OWN_NODES,
    "--node-rank": _OWN_NODES,
    "--master-addr": _OWN_NODES,
    "--master-port": _OWN_NODES,
    "--headless": _OWN_NODES,
    "--data-parallel-size-local": _OWN_ENGINES,
    "--data-parallel-rank": _OWN_ENGINES,
    "--data-parallel-start-rank": _OWN_ENGINES,
    "--data-parallel-address": _OWN_ENGINES,
    "--data-parallel-rpc-port": _OWN_ENGINES,
    "--data-parallel-backend": _OWN_ENGINES,
    "--data-parallel-external-lb": _OWN_ENGINES,
    "--data-parallel-hybrid-lb": _OWN_ENGINES,
    "--ssl-certfile": _PLAIN,
    "--ssl-keyfile": _PLAIN,
    "--ssl-ca-certs": _PLAIN,
    "--ssl-cert-reqs": _PLAIN,
}
_DECIDE = {"--config"}

_RENAMED = {
    "--tensor-parallel-size": "tensor_parallel",
    "--pipeline-parallel-size": "pipeline_parallel",
    "--data-parallel-size": "data_parallel",
    "--enable-expert-parallel": "expert_parallel",
    "--served-model-name": "served_name",
    "--max-model-len": "context",
    "--port": "port",
    "--revision": "revision",
    "--shutdown-timeout": "drain_seconds",
}
_ORDER = (
    "model",
    "revision",
    "served_name",
    "context",
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "expert_parallel",
    "port",
    "drain_seconds",
    "flags",
    "environment",
    "environment_files",
)
_ROUNDS = 60  # of rewriting; each takes one thing away


@dataclass(frozen=True)
class Imported:
    """Settings as group_vars have them, and what was dropped or renamed on the way."""

    settings: Mapping[str, Any]
    notes: tuple[Note, ...]

    @property
    def decided(self) -> bool:
        """Whether nothing is left for a person to decide."""
        return not any(note.decide for note in self.notes)


def convert(launches: Iterable[Launch], schema: Schema) -> Imported:
    """Return the settings of servers for the release of `schema`, and notes in their order."""
    serving: dict[str, dict[str, Any]] = {}
    notes: list[Note] = []
    shared: dict[str, Any] = {}
    servers = tuple(launches)
    for launch in servers:
        server = _Server(launch, schema, _key(launch.name, serving))
        server.convert()
        serving[server.key] = server.ordered()
        shared |= server.shared
        notes += server.sentences()
    everywhere = _common([served.get("environment", {}) for served in serving.values()])
    if len(serving) > 1 and everywhere:
        for served in serving.values():
            own = {k: v for k, v in served["environment"].items() if k not in everywhere}
            served.pop("environment")
            if own:
                served["environment"] = own
        shared["environment"] = everywhere
    settings: dict[str, Any] = {"vllm": shared} if shared else {}
    settings["serving"] = serving
    if shared:
        notes.append(
            Note("`vllm` has only what was found: put it into the one that you have, whole")
        )
    return Imported(settings, tuple(notes))


def _key(name: str, taken: Iterable[str]) -> str:
    """Return a name as `serving` has them, not yet taken."""
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


@dataclass
class _Server:
    """One server on its way to settings."""

    launch: Launch
    schema: Schema
    key: str
    served: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)

    def convert(self) -> None:
        if self.key != self.launch.name:
            self._say(f"is called `{self.key}` here: names go into units and paths")
        self.notes += self.launch.notes
        environment, added = self._environment()
        model, argv = _split_model(self._without_secrets(self.launch.argv), self.schema)
        written = model
        argv = (*argv, *added)
        model, argv = self._on_the_node(model, argv)
        argv = self._taken_out(argv)
        line = self._accepted(argv)
        self._flags(line)
        self._model(model, written)
        if self.flags:
            self.served["flags"] = dict(sorted(self.flags.items()))
        if environment:
            self.served["environment"] = environment
        if self.launch.port not in {None, _FIRST_PORT}:
            self.served["port"] = self.launch.port
            self._say(f"port {self.launch.port} is the first replica's; others take the next")

    def ordered(self) -> dict[str, Any]:
        return {name: self.served[name] for name in _ORDER if name in self.served}

    def sentences(self) -> Iterator[Note]:
        """Yield the notes, each once, without secrets."""
        seen = set()
        for note in self.notes:
            text = redact.hide_secrets(" ".join(note.text.split()), self.secrets)
            if text not in seen:
                seen.add(text)
                yield Note(text, self.key, note.decide)

    def _say(self, text: str, *, decide: bool = False) -> None:
        self.notes.append(Note(text, decide=decide))

    # -- secrets -----------------------------------------------------------------------------------

    def _secret(self, what: str, value: str, setting: str | None) -> None:
        if not _UNSET.match(value):  # else it is a variable's name
            self.secrets.append(value)
        if setting is None:
            self._say(
                f"{what} is dropped, its value not shown: settings are readable by whoever reads "
                "the repository; give it to the unit by a systemd credential",
                decide=True,
            )
            return
        self.shared[setting] = _FILES[setting]
        self._say(
            f"{what} is dropped, its value not shown: {_TO_A_FILE}, vllm.{setting} names it",
            decide=True,
        )

    def _secret_variable(self, name: str, value: str) -> None:
        if not _UNSET.match(value):
            self.secrets.append(value)
        file = suggested_file(name, self.key)
        self.served.setdefault("environment_files", {})[name] = file
        self._say(
            f"{name} is dropped, its value not shown: {_TO_A_FILE}, `environment_files` names it "
            f"({file})",
            decide=True,
        )

    def _without_secrets(self, argv: Sequence[str]) -> tuple[str, ...]:
        kept: list[str] = []
        words = list(argv)
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=") if word[:1] == "-" else (word, "", "")
            plain = name.lower().replace("_", "-")
            setting = _SECRET_FLAGS.get(plain)
            if setting is not None or self._hides(plain):
                texts = [value] if equals else []
                while not equals and words and not words[0].startswith("-"):
                    texts.append(words.pop(0))
                for text in texts:
                    self._secret(f"`{name}`", text, setting)
            elif inner := tuple(redact.find_secrets(_json(value if equals else word))):
                self.secrets += inner
                flag = name if equals else (kept.pop() if kept and kept[-1][:1] == "-" else "JSON")
                self._secret(f"`{flag}`", inner[0], None)
            elif redact.is_secret(value if equals else word):
                flag = name if equals else (kept.pop() if kept and kept[-1][:1] == "-" else word)
                self._secret("a key" if flag == word else f"`{flag}`", value or word, None)
            else:
                kept.append(word)
        return tuple(kept)

    def _hides(self, flag: str) -> bool:
        """Say whether a flag that the release does not have is called as if it had a secret."""
        known = flag in self.schema.by_option or flag.partition(".")[0] in self.schema.by_option
        if flag.startswith("--no-") or not flag.startswith("--"):
            return False
        return (not known or "." in flag) and redact.is_secret_name(flag)

    def _environment(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the variables that are kept, and the flags that stand for others."""
        kept: dict[str, str] = {}
        for name, value in self.launch.environment.items():
            if name in _SECRET_VARIABLES:
                self._secret(name, value, _SECRET_VARIABLES[name])
            elif (
                redact.is_secret_name(name)
                or redact.is_secret(value)
                or any(redact.find_secrets(_json(value)))
            ):
                self.secrets += redact.find_secrets(_json(value))
                self._secret_variable(name, value)
            elif name in _DROPPED_VARIABLES:
                self._say(f"{name} is dropped: {_DROPPED_VARIABLES[name]}")
            elif name == "HF_ENDPOINT":
                self.shared["hf_endpoint"] = value
                self._say("HF_ENDPOINT is vllm.hf_endpoint")
            else:
                kept[name] = value
                if _UNSET.search(value):
                    self._say(f"{name} refers to `{value}`: put the value itself", decide=True)
        added: list[str] = []
        for problem in environment_problems(self.schema, dict(kept)):
            name = problem.argument.partition("=")[0]
            if problem.severity is Severity.WARN:
                self._say(f"{problem.argument} is kept: {problem.found}")
                continue
            kept.pop(name, None)
            if problem.rewritten:
                added += problem.rewritten
                then = f"now it is `{' '.join(problem.rewritten)}`"
            else:
                then = f"instead: {problem.replacement}" if problem.replacement else "dropped"
            self._say(f"{problem.argument}: {problem.found}; {then}", decide=_open(problem))
        return kept, tuple(added)

    # -- paths -------------------------------------------------------------------------------------

    def _on_the_node(
        self, model: str | None, argv: tuple[str, ...]
    ) -> tuple[str | None, tuple[str, ...]]:
        """Return model and arguments with the node's paths for those inside a container."""
        used: set[str] = set()

        def outside(text: str) -> str:
            for inner, outer in sorted(self.launch.mounts, key=lambda one: -len(one[0])):
                inside = inner.rstrip("/")
                if text == inside or text.startswith(f"{inside}/"):
                    used.add(inner)
                    path = outer.rstrip("/") + text[len(inside) :]
                    self._say(f"{text} is {path} on the node")
                    return path
            return text

        def value(word: str) -> str:
            name, equals, text = word.partition("=")
            if word.startswith("-"):
                return f"{name}={outside(text)}" if equals else word
            return outside(word)

        model = None if model is None else outside(model)
        argv = tuple(map(value, argv))
        for inner, outer in self.launch.mounts:
            if inner not in used:
                self._say(
                    f"the mount {outer}:{inner} is dropped: stages are no containers, and files "
                    "are staged where a deploy can check them"
                )
        return model, argv

    # -- flags -------------------------------------------------------------------------------------

    def _taken_out(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the arguments without those that are settings of ours, or the plan's to give."""
        line = parse(self.schema, ("MODEL", *argv))
        gone: set[int] = set()
        for given in line.given:
            name = given.flag.name
            if name in _DROPPED_FLAGS:
                gone.update(given.at)
                said = " ".join(line.argv[at] for at in given.at)
                self._say(f"`{said}` is dropped: {_DROPPED_FLAGS[name]}", decide=name in _DECIDE)
            elif name in _RENAMED and self._renamed(given):
                gone.update(given.at)
        return tuple(word for at, word in enumerate(line.argv) if at and at not in gone)

    def _renamed(self, given: GivenFlag) -> bool:
        """Take a flag over as a setting of ours; False: it stays a flag."""
        name = _RENAMED[given.flag.name]
        value, faults = values.read(self.schema, given)
        if any(map(_UNSET.search, given.values)):
            said = f"{given.flag.name} {' '.join(given.values)}"
            self._say(f"`{said}` is not known here: set `{name}` yourself", decide=True)
            return True
        if faults:
            return False
        take: Callable[[Any], bool] | None = {
            "served_name": self._served_name,
            "context": self._context,
            "port": self._port,
            "revision": self._revision,
        }.get(name)
        if take is not None:
            return take(value)
        self.served[name] = value
        if name == "drain_seconds":
            self._say("`--shutdown-timeout` is `drain_seconds`")
        else:
            self._say(f"`{given.flag.name}` is `{name}`; without it the plan chooses")
        return True

    def _served_name(self, value: Any) -> bool:
        first, *others = value if isinstance(value, list) else [value]
        self.served["served_name"] = first
        if others:
            self._say(
                f"`--served-model-name` has {', '.join(map(str, others))} besides {first}: a model "
                "has one name here; let the proxy know the others",
                decide=True,
            )
        return True

    def _context(self, value: Any) -> bool:
        if not isinstance(value, int) or value < 1:
            return False  # auto
        self.served["context"] = value
        self._say("`--max-model-len` is `context`")
        return True

    def _port(self, value: Any) -> bool:
        if value != _FIRST_PORT and self.launch.port is None:
            self.served["port"] = value
            self._say(f"`--port {value}` is the first replica's `port`; others take the next")
        return True

    def _revision(self, value: Any) -> bool:
        if _COMMIT.fullmatch(str(value)):
            self.served["revision"] = value
        else:
            self._say(
                f"`--revision {value}` is no commit, and may be another set of files tomorrow",
            )
        return True

    def _accepted(self, argv: tuple[str, ...]) -> CommandLine:
        """Return the command line as the release takes it, telling what that took."""
        now: tuple[str, ...] = ("MODEL", *argv)
        for _ in range(_ROUNDS):
            problems = check(self.schema, now)
            refused = [one for one in problems if one.refuses and one.at and 0 not in one.at]
            if not refused:
                break
            first = refused[0]
            self._say(_told(first), decide=_open(first))
            places = set(first.at)
            start = min(places)
            after = [w for at, w in enumerate(now) if at > start and at not in places]
            now = (*now[:start], *(first.rewritten or ()), *after)
        for problem in problems:
            if problem.severity is Severity.WARN and problem.kind is not Kind.MODEL:
                self._say(f"`{problem.argument}` is kept: {problem.found}")
        return parse(self.schema, now)

    def _flags(self, line: CommandLine) -> None:
        for name, uses in line.by_name.items():
            given = uses[-1]
            if name in _RENAMED and self._renamed(given):
                continue  # what another flag was rewritten to
            if name in _DROPPED_FLAGS:
                continue
            if name in _SECRET_FLAGS:  # what another flag was rewritten to
                for text in given.values:
                    self._secret(f"`{name}`", text, _SECRET_FLAGS[name])
                continue
            value, _ = values.read(self.schema, given)
            if value is None:
                continue
            if given.flag.kind is FlagKind.APPEND and len(uses) > 1:
                self._say(
                    f"`{name}` is given {len(uses)} times, and settings have each flag once: only "
                    f"`{given.values[-1]}` is kept",
                    decide=True,
                )
            self.flags[name.removeprefix("--")] = value
            for text in filter(_UNSET.search, given.values):
                self._say(f"`{name}` refers to `{text}`: put the value itself", decide=True)

    # -- the model ---------------------------------------------------------------------------------

    def _model(self, model: str | None, written: str | None) -> None:
        if model is None or written is None:
            self.served["model"] = None
            self._say("nothing says which model it serves: set `model`", decide=True)
            return
        self.served["model"] = model
        if not _MODEL.fullmatch(model):
            self._say(
                f"`model: {model}` is neither an absolute path on the node nor the Hub's "
                "`organisation/name`: set it so",
                decide=True,
            )
        elif not model.startswith("/") and "revision" not in self.served:
            self.served["revision"] = None
            self._say(
                f"`revision` has to name the commit of {model}, so that every node serves the same "
                f"files: `git ls-remote https://huggingface.co/{model} HEAD` prints today's",
                decide=True,
            )
        elif model.startswith("/") and self.served.pop("revision", None):
            self._say("`--revision` is dropped: it has no meaning for a path")
        name = self.served.get("served_name", written)
        if name == self.key:
            self.served.pop("served_name", None)
        elif _SERVED.fullmatch(str(name)):
            if "served_name" not in self.served:
                self._say(f"`served_name` is what clients ask for today: {name}")
            self.served["served_name"] = name
        else:
            self.served.pop("served_name", None)
            self._say(f"clients ask for {name!r} today, and will have to ask for {self.key!r}")


def _split_model(argv: Sequence[str], schema: Schema) -> tuple[str | None, tuple[str, ...]]:
    """Return the model, which is the positional argument or `--model`, and the other arguments."""
    words = list(argv)
    for at, word in enumerate(words):
        if word == "--model" and at + 1 < len(words):
            return words[at + 1], (*words[:at], *words[at + 2 :])
        if word.startswith("--model="):
            return word.removeprefix("--model="), (*words[:at], *words[at + 1 :])
    if words and not words[0].startswith("-"):
        return words[0], tuple(words[1:])
    line = parse(schema, words)
    return line.model, tuple(word for at, word in enumerate(words) if at not in line.model_at)


def _json(text: str) -> Any:
    """Return a text's JSON value; None for other texts."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _open(problem: Problem) -> bool:
    """Say whether a person has to decide what becomes of it."""
    return problem.rewritten is None and problem.kind not in {Kind.REMOVED, Kind.NEVER}


def _told(problem: Problem) -> str:
    said = f"`{problem.argument}`: {problem.found}"
    if problem.rewritten:
        return f"{said}; now it is `{' '.join(problem.rewritten)}`"
    if problem.rewritten is None and problem.replacement:
        return f"{said}; dropped, instead: {problem.replacement}"
    return f"{said}; dropped"
