"""Judge whether a stage is ready, starting or dead, with the reason. Pure.

The input is the output of `on_node/serving/endpoints.py` on one stage. A stage is ready if its unit
is active, `/health` returns 200, the server lists the model, and the server has answered the test
request for this kind of model. `/health` alone is not enough, because it also returns 200 while a
server drains, while a remote rank is dead, and while the engine is frozen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.failures.diagnosis import explain
from gpufleet.failures.log_reader import LogLine
from gpufleet.on_node.serving import questions

_OK, _UNAUTHORIZED, _NOT_FOUND = 200, 401, 404
_ASKED = {
    "generate": "a completion of one token",
    "picture": "a chat about a picture",
    "embed": "an embedding of one word",
    "rerank": "a ranking of two documents",
    "classify": "a classification of one word",
    "reward": "the pooling of one word",
    "transcribe": "a transcription of one second",
}
"""The description of each kind's test request (on_node/serving/questions.py)."""
_GENERATING = frozenset({"generate", "picture", "transcribe"})


class State(StrEnum):
    """The state of a stage."""

    READY = "ready"
    WAITING = "waiting"  # alive, not answering yet
    DEAD = "dead"  # its unit is not running, or died during the wait
    BUSY = "busy"  # healthy, but a completion took longer than the limit: busy or frozen
    WRONG = "wrong"  # it answers, but differs from the plan
    UNKNOWN = "unknown"  # it could not be queried


@dataclass(frozen=True)
class Verdict:
    """The verdict on a stage. `text` is for the operator, of one or more lines."""

    state: State
    text: str


# "(EngineCore pid=123) INFO 11-21 11:49:06 [core.py:93] Loading ...", and SGLang's
# "[2026-11-29 11:49:34 TP0] Load weight begin.": all before the message.
_PREFIX = re.compile(
    r"^(\([^)]*\) ?)?(\[\d{4}-\d\d-\d\d [\d:.]+[A-Z_\d ]*\] )?"
    r"((DEBUG|INFO|WARNING|ERROR|CRITICAL) +)?(\d\d-\d\d [\d:]+ )?(\[[\w./]+:\d+\] ?)?"
)
# Stack frames and their code are indented, after the prefix too.
_NOISE = re.compile(
    r"^\s*$|^\s{2,}|^\t|triton.py:|^Traceback|DeprecationWarning|FutureWarning|Found ulimit of"
)
_WRONG = re.compile(
    r"\b\w*(error|exception)\b|fatal|refused|denied|killed|cannot|usage:", re.IGNORECASE
)


_KILLED_ITSELF = "sglang-killed-itself"
"""The log rule for a server that ends itself with SIGKILL when its start fails.

Such an end looks like a kill from outside.
"""


def likely_cause(lines: Sequence[str], exit_status: str | None = None) -> str | None:
    """
    Return the most likely cause of a server's end, or None.

    The cause is taken from the server's journal and exit status.
    """
    found = explain(LogLine("journal", number, text) for number, text in enumerate(lines, 1))
    if found.causes:
        return found.causes[0].sentence
    if any(each.rule.id == _KILLED_ITSELF for each in found.consequences):
        at = found.unknown and (found.unknown.exception or found.unknown.first_error)
        return f"SGLang killed itself after an error: {at.text if at else 'see the journal'}"
    if exit_status == "2":
        return (
            "the server refused its command line (exit status 2): see `systemctl cat` of the unit"
        )
    if exit_status == "137":
        return (
            "the process was killed, because the node was out of memory or by hand: see "
            "`journalctl -k`"
        )
    return None


def messages(lines: Sequence[str]) -> list[str]:
    """Return a server's messages without log prefixes, stack frames and repetitions."""
    said = [_PREFIX.sub("", line).rstrip() for line in lines]
    return list(dict.fromkeys(line for line in said if not _NOISE.search(line)))


MOST_LINES = 10
"""The maximum number of journal lines to print."""


def relevant_lines(lines: Sequence[str]) -> list[str]:
    """Return the relevant lines: the first errors, which contain the cause, and the last lines."""
    said = messages(lines)
    errors = [line for line in said if _WRONG.search(line)][: MOST_LINES - 2]
    chosen = {*errors, *said[-2:]}
    return [line[:400] for line in said if line in chosen]


def progress(lines: Sequence[str]) -> str:
    """Return a starting server's last message, shortened to one line."""
    said = messages(lines)
    return said[-1][:140] if said else "no output yet"


def verdict(
    seen: Mapping[str, Any],
    *,
    served_name: str,
    unit: str,
    fingerprint: str | None = None,
    keyed: bool = True,
    restarts: int = 0,
    adapters: Sequence[str] = (),
    alone: bool = False,
) -> Verdict:
    """
    Return the verdict on one stage.

    `seen` is from `on_node/serving/endpoints.py`. `fingerprint` is the expected fingerprint of the
    process. None skips the comparison. If `keyed` is true, the server must refuse a request without
    the API key. `restarts` is the number of restarts that the unit may have done by itself
    (NRestarts). With more restarts, the stage is dead. The server must list all `adapters`. If the
    model answered, each adapter must answer by its name too. If `alone` is true, the server must
    list no other model.
    """
    if "error" in seen or "error" in seen.get("unit", {}):
        reason = seen.get("error") or seen.get("unit", {}).get("error")
        return Verdict(State.UNKNOWN, f"{unit}: could not be tested: {reason}")
    properties = seen["unit"]
    lines = seen.get("journal", [])
    active = properties.get("ActiveState")
    count = int(properties.get("NRestarts") or 0)
    died = count > restarts or (properties.get("SubState") == "auto-restart" and count >= restarts)
    if active in {"failed", "inactive"} or died:
        return Verdict(State.DEAD, _death(unit, properties, lines))
    if fingerprint is not None and seen.get("started") != fingerprint:
        return Verdict(
            State.WRONG,
            f"{unit}: runs with settings that differ from the plan: run deploys/vllm.py",
        )
    health = seen.get("health", {})
    if health.get("status") != 200:
        return Verdict(State.WAITING, progress(lines))
    if "key_error" in seen:
        return Verdict(State.WRONG, f"{unit}: the API key cannot be read: {seen['key_error']}")
    if "models_error" in seen:
        return Verdict(State.WRONG, f"{unit}: /v1/models answers {_short(seen['models_error'])}")
    if served_name not in seen.get("models", []):
        return Verdict(
            State.WRONG,
            f"{unit}: serves {seen.get('models')}, but the plan has {served_name!r}",
        )
    if keyed and (wrong := _answers_without_key(unit, seen.get("without_key") or {})):
        return wrong
    asked = _ASKED.get(str(seen.get("kind", "generate")), "an answer")
    if "timed out" in str(seen.get("completion_error", {}).get("error", "")):
        return Verdict(
            State.BUSY,
            f"{unit}: /health is 200, but {asked} takes longer than a minute: the server is "
            "saturated, or its engine is frozen (compare the running requests and the "
            f"{_progress(seen)} tokens in the server's /metrics)",
        )
    if "completion_error" in seen:
        cause = likely_cause(lines)
        return Verdict(
            State.WRONG,
            f"{unit}: /health is 200, but {asked.partition(' of ')[0]} fails: "
            f"{_short(seen['completion_error'])}{f': {cause}' if cause else ''}{_other_kind(seen)}",
        )
    listed = {served_name, *adapters} if alone else set(seen.get("models", []))
    judged = _adapter_verdict(unit, seen, listed, adapters)
    return judged or Verdict(State.READY, f"{unit}: answers")


def _adapter_verdict(
    unit: str, seen: Mapping[str, Any], may: set[str], adapters: Sequence[str]
) -> Verdict | None:
    """
    Return a verdict if an otherwise ready server fails on its adapters, or lists other models.
    """
    if missing := sorted(set(adapters) - set(seen.get("models", []))):
        return Verdict(
            State.WRONG,
            f"{unit}: does not serve the adapter{'s' * (len(missing) > 1)} {', '.join(missing)} "
            "of the plan: run deploys/vllm.py",
        )
    if others := sorted(set(seen.get("models", [])) - may):
        return Verdict(
            State.WRONG,
            f"{unit}: also serves {', '.join(others)}, which no unit of gpufleet loads: restart "
            "the "
            f"unit (`systemctl restart` on its node), and find out what loaded {', '.join(others)}",
        )
    answers = seen.get("adapters", {})
    for name in sorted(adapters) if "completion" in seen else ():
        answer = answers.get(name, {"error": "the adapter was not queried"})
        if answer.get("status") == _OK:
            continue
        late = "timed out" in str(answer.get("error", ""))
        return Verdict(
            State.BUSY if late else State.WRONG,
            f"{unit}: a completion with the adapter {name} fails, but a completion with the model "
            f"alone does not: {_short(answer)}",
        )
    return None


def _progress(seen: Mapping[str, Any]) -> str:
    """
    Return the kind of tokens that shows a server's progress. Pooling models generate no tokens.
    """
    return "generation" if seen.get("kind", "generate") in _GENERATING else "prompt"


def _other_kind(seen: Mapping[str, Any]) -> str:
    """Return advice for a server whose model does not support the tested task."""
    kind = seen.get("kind", "generate")
    if questions.UNRANKED in str(seen["completion_error"].get("error", "")):
        return (
            ". If the model does not rank documents, declare `kind: reward` or `kind: classify` "
            "for its entry in `serving`. If the model is a reranker, set the `flags.hf-overrides` "
            "that its publisher gives (docs/configure/model-kinds.md)"
        )
    if kind == "picture":
        return (
            ". If clients send no pictures to this model, set `flags.limit-mm-per-prompt: {image: "
            "0}` in its entry in `serving`"
        )
    if seen["completion_error"].get("status") != _NOT_FOUND:
        return ""
    return (
        f": the server does not have this path, so its model is not of `kind: {kind}`: correct "
        "`kind` of its entry in `serving` (docs/configure/model-kinds.md)"
    )


def _answers_without_key(unit: str, statuses: Mapping[str, Any]) -> Verdict | None:
    """Return a verdict if a server answers requests without the key, or if that is unknown.

    `statuses` has the status of each request, by method and path.
    """
    for asked, status in statuses.items():
        if status not in {None, _UNAUTHORIZED}:
            return Verdict(
                State.WRONG,
                f"{unit}: answers {asked} without the API key with {status}, but it must answer "
                "401: run deploys/vllm.py, and read the unit's journal if that does not help",
            )
    if not statuses or None in statuses.values():
        asked = next((asked for asked, status in statuses.items() if status is None), "a request")
        return Verdict(
            State.UNKNOWN,
            f"{unit}: it is unknown whether the server refuses clients without the API key, "
            f"because {asked} without the key got no answer instead of 401",
        )
    return None


def _death(unit: str, properties: Mapping[str, str], lines: Sequence[str]) -> str:
    status = properties.get("ExecMainStatus")
    cause = likely_cause(lines, status)
    told = "".join(f"\n    {line}" for line in relevant_lines(lines))
    return (
        f"{unit} is {properties.get('ActiveState')} ({properties.get('Result')}, exit status "
        f"{status}): {cause or 'no known cause; the last lines of its journal follow'}"
        f"{told or ' (the journal has no line since the start)'}"
    )


def _short(answer: Mapping[str, Any]) -> str:
    if "error" in answer:
        return str(answer["error"])
    return f"HTTP {answer.get('status')} {str(answer.get('body', ''))[:200]}".rstrip()


def not_ready_error(deadline_seconds: int, unit: str, lines: Sequence[str]) -> FleetError:
    """Return the error for a stage that is alive but did not answer in time."""
    cause = likely_cause(lines)
    told = "".join(f"\n    {line}" for line in relevant_lines(lines))
    return FleetError(
        f"{unit} did not answer within {deadline_seconds} s, but still runs: "
        f"{cause or 'raise start_seconds if it is still loading; its last lines follow'}{told}"
    )


@dataclass(frozen=True)
class Endpoint:
    """A server's endpoint, at the address at which its own node reaches it."""

    id: str
    unit: str
    url: str
    served_name: str
    key_file: str | None
    start_seconds: int
    fingerprint: str
    peers: tuple[str, ...] = ()
    """The other nodes of the replica."""
    adapters: tuple[str, ...] = ()
    """Names of the LoRA adapters that the endpoint serves."""

    def parameters(self) -> dict[str, Any]:
        """Return the endpoint's parameters for on_node/serving/endpoints.py."""
        return {**asdict(self), "guarded": True, "completion": True}
