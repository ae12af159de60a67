"""Run work with time limits, query gateways, and read git. Border."""

from __future__ import annotations

import contextlib
import json
import ssl
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TypeVar

import gevent

from gpufleet.artifacts.model_lock import Models, read_lock
from gpufleet.artifacts.operator_files import release_of
from gpufleet.errors import FleetError
from gpufleet.inventory.loader import Fleet
from gpufleet.monitoring.exporters import file_of_node
from gpufleet.on_node.preflight.node_look import PARTIAL_CHAIN
from gpufleet.preflight import look_questions
from gpufleet.preflight.gateway_lines import GatewayAnswer
from gpufleet.preflight.look_questions import LookQuestions
from gpufleet.preflight.network_lines import KnownNode, own_addresses
from gpufleet.preflight.rehearsal_lines import GitState
from gpufleet.remote.query import Answer
from gpufleet.sanitize import printable
from gpufleet.settings.node_variables import NodeVars
from gpufleet.settings.operator_paths import named_files

T = TypeVar("T")

GATEWAY_SECONDS = 5.0
GIT_SECONDS = 5.0
BODY_BYTES = 1 << 20


@dataclass(frozen=True)
class UnfinishedWork:
    """Work that did not end within its deadline."""

    why: str

    def __str__(self) -> str:
        return self.why


@dataclass(frozen=True)
class RefusedWork:
    """Work that ended in a `FleetError`."""

    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.problems)


def run_bounded(
    seconds: float, what: str, work: Callable[[], T]
) -> T | UnfinishedWork | RefusedWork:
    """Run `work` with a time limit in seconds. Return its result, or why there is no result."""
    try:
        with gevent.Timeout(seconds):
            return work()
    except gevent.Timeout:
        return UnfinishedWork(f"{what} took longer than {seconds:.0f} s")
    except FleetError as error:
        return RefusedWork(error.problems)


def ask_gateways(
    nodes: Mapping[str, NodeVars], ca_file: str | None, key: str | None
) -> tuple[dict[str, GatewayAnswer], dict[str, GatewayAnswer] | None]:
    """
    Return the gateways' answers to requests without a key, and to requests with the key.

    The second result is None if no key is given. Gateways are queried in parallel. All queries
    together take at most three times `GATEWAY_SECONDS`.
    """
    jobs = {
        (name, given): gevent.spawn(ask_gateway, *each, given)
        for name, each in _gateways(nodes, ca_file)
        for given in dict.fromkeys((None, key))
    }
    gevent.joinall(list(jobs.values()), timeout=3 * GATEWAY_SECONDS)
    late = GatewayAnswer(None, "no answer in time")
    found = {which: job.value if job.successful() else late for which, job in jobs.items()}
    gevent.killall(list(jobs.values()), block=False)
    without = {name: each for (name, given), each in found.items() if given is None}
    with_key = {name: each for (name, given), each in found.items() if given is not None}
    return without, with_key if key is not None else None


def _gateways(
    nodes: Mapping[str, NodeVars], ca_file: str | None
) -> Iterator[tuple[str, tuple[str, int, ssl.SSLContext | None]]]:
    """Yield each node with a gateway, with the gateway's host, port and trusted certificates."""
    for name, each in nodes.items():
        gateway = each.settings.gateway
        if gateway is None:
            continue
        shared = gateway.virtual_address
        host = shared.address.partition("/")[0] if shared else each.address
        context = None
        if gateway.tls:
            file = ca_file or file_of_node(gateway.tls.certificate_file, name)
            context = ssl.create_default_context()
            context.verify_flags = ssl.VerifyFlags(int(context.verify_flags) | PARTIAL_CHAIN)
            # If the file cannot be read, the line about settings has the reason.
            with contextlib.suppress(OSError):
                context.load_verify_locations(file)
        yield name, (host, gateway.port, context)


def ask_gateway(
    host: str, port: int, context: ssl.SSLContext | None, key: str | None
) -> GatewayAnswer:
    """Query the list of models of a gateway, with a client's key or without a key."""
    connection = (
        HTTPSConnection(host, port, timeout=GATEWAY_SECONDS, context=context)
        if context
        else HTTPConnection(host, port, timeout=GATEWAY_SECONDS)
    )
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        connection.request("GET", "/v1/models", headers=headers)
        answer = connection.getresponse()
        body = answer.read(BODY_BYTES)
        models = _models(body) if answer.status == 200 else ()
    except (OSError, HTTPException) as error:
        return GatewayAnswer(None, printable(str(error)) or type(error).__name__)
    finally:
        connection.close()
    return GatewayAnswer(answer.status, models=models)


def _models(body: bytes) -> tuple[str, ...]:
    try:
        return tuple(str(each["id"]) for each in json.loads(body)["data"])
    except (ValueError, KeyError, TypeError):
        return ()


def git_state(folder: Path, secrets: Iterable[str] = ()) -> GitState:
    """
    Return the state of a folder in git, without changing it.

    `secrets` are paths of secret files. The result has those that are committed although they must
    not be.
    """

    def git(*words: str) -> str:
        run = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *words],
            capture_output=True,
            check=True,
            text=True,
            timeout=GIT_SECONDS,
        )
        return run.stdout.rstrip()  # not strip(): the first column of a status may be blank

    try:
        git("rev-parse", "--show-toplevel")
    except FileNotFoundError:
        return GitState(problem="git is not installed on this machine")
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        lines = str(said).strip().splitlines() or ["git did not answer"]
        return GitState(problem=printable(lines[0]))
    try:
        commit_id, _, commit = git("log", "-1", "--format=%H %h of %cs").partition(" ")
    except (OSError, subprocess.SubprocessError):
        return GitState()  # no commit yet
    try:
        changed = [line[3:] for line in git("status", "--porcelain", "--", ".").splitlines()]
        remotes = git("remote").splitlines()
        committed = tuple(_committed(git, folder, secrets))
        unpushed = (
            int(git("rev-list", "--count", "HEAD", "--not", "--remotes")) if remotes else None
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return GitState(problem=printable(str(error)))
    return GitState(
        commit,
        tuple(changed),
        tuple(remotes),
        unpushed,
        commit_id=commit_id,
        secrets=committed,
    )


def _committed(git: Callable[..., str], folder: Path, files: Iterable[str]) -> Iterator[str]:
    """Yield the files that are in git without a filter. A filter may encrypt a file."""
    root = folder.resolve()
    inside = sorted(
        {str(path.relative_to(root)) for each in files
         if (path := Path(root, Path(each).expanduser()).resolve()).is_relative_to(root)}
    )  # fmt: skip
    if not inside:
        return
    for name in git("ls-files", "--", *inside).splitlines():
        if git("check-attr", "filter", "--", name).endswith(": unspecified"):
            yield name


def secret_files(fleet: Fleet) -> tuple[str, ...]:
    """
    Return the files in the settings that contain a single secret. Environment files are left out.
    """
    return tuple(
        sorted(
            {
                named.path
                for name, each in fleet.nodes.items()
                for named in named_files(each.settings, name)
                if named.secret and "environment_files" not in named.at
            }
        )
    )


def read_texts(files: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each file that can be read, with its text."""
    for file in files:
        try:
            yield file, Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # the line about settings reports the file


def read_questions(
    fleet: Fleet,
    homes: Collection[tuple[str, str]],
    answers: Mapping[str, Answer],
    ca_file: str | None,
) -> LookQuestions:
    """
    Return the questions to each node, from the model locks and the certificates in the settings.

    `homes` are pairs of a model and a node, and `answers` are the probes. Files that cannot be read
    are left out, because the line about settings reports them.
    """
    settings = {name: each.settings for name, each in fleet.gpu_nodes.items()}
    locks: dict[str, Models] = {}
    releases: dict[str, str] = {}
    for node, here in settings.items():
        if here.servers is None:
            continue
        try:
            locks.setdefault(here.servers.models_lock, read_lock(Path(here.servers.models_lock)))
            releases[node] = release_of(here.used_engines[0]).directory
        except FleetError:
            continue
    models = look_questions.wanted_models(homes, settings, locks)
    files = look_questions.authority_files(fleet.nodes, ca_file)
    probes = {name: each for name, each in answers.items() if not isinstance(each, str)}
    return LookQuestions(
        known={
            name: KnownNode(each.address, own_addresses(probes.get(name, {})))
            for name, each in fleet.nodes.items()
        },
        models=models,
        sources=look_questions.download_pages(models, settings),
        tls=look_questions.tls_servers(fleet.nodes, ca_file, dict(read_texts(files))),
        releases=releases,
    )
