"""RUNS ON THE NODE: answers of replicas here to prompts, their counters, and firing alerts.

Takes (JSON header `PARAMETERS`):
  replicas      [{replica, prompts, query, max_tokens, times, seconds, again}]: each prompt is sent
                `times` times to each server of the replica's unit here; all of it takes at most
                `seconds`. With `again` the first prompt without an answer is sent once more. A
                reranker gets the prompts as documents for `query`
  seconds       deadline of one prompt
  families      prefixes of the names of metrics to return
  alertmanager  address of the Alertmanager here; null: no alerts are read
Prints one JSON document {"schema": 1, "replicas": {id: ...}, "alerts": ...}. Of a replica:
  servers       {url: {"golden": [[answer, ...] of each prompt], "metrics": {"text"} or {"error"}}};
                none for a rank that has no server
or {"missing": reason}. An answer is {"text", "tokens", "error"}: `tokens` are their numbers in the
vocabulary, null where the release does not tell them; `error` is why there is no answer. That of a
model that does not complete text also has its `kind` and its `numbers`: a vector, scores; its text
is a label, a rank (from 1), or a transcript.
  alerts        {"error": null or a sentence, "at": this node's clock in seconds since 1970,
                "alerts": [{labels, annotations, startsAt, status}]},
                also silenced ones; or null

A replica's address, name and key are read from its unit, so that the running configuration is
judged. It changes nothing; the API key is read here and never leaves the node. Every replica is
read by its own process, with a deadline. Python 3.8, standard library.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any, Callable

from gpufleet.on_node.common import linux_facts, stages, unit_journal
from gpufleet.on_node.common.answers import CannotRead
from gpufleet.on_node.common.forked import Watch
from gpufleet.on_node.common.stage_units import unit_of
from gpufleet.on_node.serving import endpoints, questions, status, unit_command

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

METRICS_SECONDS = 10
ALERTS_SECONDS = 10
# Of an answer's text or an error. A journal keeps as much of a text, and no more: two texts that
# were cut at different places would not be the same.
CHARACTERS = 1900
# The most numbers of a vector: today's largest vectors have 8192.
NUMBERS = 16384
# vLLM writes a token so where it is asked for numbers in place of texts.
NUMBERED = "token_id:"
NO_ANSWER: dict[str, Any] = {"text": "", "tokens": None}
Put = Callable[[str, str], "tuple[dict[str, Any], str | None]"]


def main() -> None:
    """Print the document."""
    watch = Watch()
    replicas = PARAMETERS.get("replicas", [])
    for asked in replicas:
        watch.ask(asked["replica"], partial(replica, asked), asked["seconds"])
    if PARAMETERS.get("alertmanager"):
        watch.ask(("alerts",), partial(alerts, PARAMETERS["alertmanager"]), ALERTS_SECONDS + 5)
    answers = watch.answers(*(asked["replica"] for asked in replicas))
    firing = None
    if PARAMETERS.get("alertmanager"):
        firing = watch.answers(("alerts",))[("alerts",)]
        if "missing" in firing:
            firing = {"error": "%s: %s" % (PARAMETERS["alertmanager"], firing), "alerts": []}
    watch.stop()
    document = {"schema": 1, "replicas": answers, "alerts": firing}
    sys.stdout.write(json.dumps(document, separators=(",", ":")) + "\n")


def replica(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answers and counters of each server of a replica on this node."""
    unit = unit_of(asked["replica"])
    try:
        said = stages.stage(unit)
    except FileNotFoundError:
        raise CannotRead("absent", detail="there is no %s here" % unit) from None
    if "model" not in said:
        raise CannotRead("absent", detail="%s is not managed by gpufleet" % unit)
    text = linux_facts.line(stages.UNITS + "/" + unit)
    words = unit_command.serve(unit_command.command(text))
    ports = [said["port"], *status.engines(words, said["port"])]
    urls = [url for url in (status.endpoint(words, port) for port in ports) if url]
    name = unit_command.value(words, "--served-model-name") or said["model"]
    key_file = dict(unit_journal.CREDENTIAL.findall(text)).get(status.API_KEY)
    key = endpoints.read_key(key_file and linux_facts.ROOT + key_file)
    known = unit_journal.secret_redactor(unit_journal.secrets(text))
    kind, about = questions.expected_of_text(text)

    def put(url: str, prompt: str) -> "tuple[dict[str, Any], str | None]":
        if kind == questions.GENERATE:
            return answer(url, key, question(name, prompt, asked["max_tokens"]))
        return answer_of_kind((url, key), kind, about, questions.question(kind, name, prompt))

    found = {
        url: {
            "golden": rank_prompts(url, key, name, asked)
            if kind == "rerank"
            else golden_answers(url, asked, put),
            "metrics": metrics(url),
        }
        for url in urls
    }
    return {"servers": status.hide_secrets(found, known)}


def golden_answers(url: str, asked: dict[str, Any], put: Put) -> list[list[Any]]:
    """
    Return a server's answers to each prompt; `put` sends a prompt.

    All prompts are sent once before any is sent again, to detect differences in the second answers
    (a warm cache, other requests in the batch). A server that does not answer gets no further
    prompts.
    """
    found: list[list[Any]] = [[] for _ in asked["prompts"]]
    dead = None
    again = asked.get("again", False)
    for _ in range(asked["times"]):
        for at, prompt in enumerate(asked["prompts"]):
            if dead is not None:
                found[at].append({**NO_ANSWER, "error": dead})
                continue
            said, dead = put(url, prompt)
            if dead is not None and again:
                again = False
                said, dead = put(url, prompt)
            found[at].append(said)
    return found


def rank_prompts(url: str, key: str | None, name: str, asked: dict[str, Any]) -> list[list[Any]]:
    """Return the rank and the score of each prompt among all prompts, for the query."""
    prompts = asked["prompts"]
    put = questions.question("rerank", name, asked.get("query", questions.QUERY), prompts)

    def rank(url: str, _: str) -> "tuple[dict[str, Any], str | None]":
        return answer_of_kind((url, key), "rerank", questions.Expected(), put)

    once = {**asked, "prompts": prompts[:1]}
    found: list[list[Any]] = [[] for _ in prompts]
    for said in (each for row in golden_answers(url, once, rank) for each in row):
        scores = said.get("numbers") or []
        order = sorted(range(len(scores)), key=lambda at: -scores[at])
        for at in range(len(prompts)):
            mine = {"text": str(1 + order.index(at)), "numbers": [scores[at]]} if scores else {}
            found[at].append({**said, **mine})
    return found


def answer_of_kind(
    server: "tuple[str, str | None]", kind: str, about: questions.Expected, put: questions.Question
) -> "tuple[dict[str, Any], str | None]":
    """Return a server's answer to its kind's question, and a reason to stop or None."""
    url, key = server
    said = endpoints.ask(url, PARAMETERS["seconds"], key, put)
    if "error" in said:
        return {**NO_ANSWER, "kind": kind, "error": said["error"]}, said["error"]
    if said["status"] != 200:
        why = "HTTP %s: %s" % (said["status"], said["body"][:CHARACTERS])
        return {**NO_ANSWER, "kind": kind, "error": why}, None
    judged = questions.judge(kind, put, endpoints.parse_body(said), about)
    # Six digits say all that is compared, and keep a journal small.
    values = judged.numbers and [float("%.6g" % each) for each in judged.numbers[:NUMBERS]]
    return {
        "text": judged.text[:CHARACTERS],
        "tokens": None,
        "numbers": values,
        "kind": kind,
        "error": judged.problem,
    }, None


def question(name: str, prompt: str, most: int) -> dict[str, Any]:
    """Return a request with greedy sampling, so that a deterministic model repeats its answer."""
    return {
        "model": name,
        "prompt": prompt,
        "max_tokens": most,
        "temperature": 0,
        "seed": 0,
        # Read in 0.28 to 0.32 (entrypoints/openai/completion/protocol.py): the answer has
        # `token_ids`. A release without it ignores the word, as any that it does not know.
        "return_token_ids": True,
    }


def answer(url: str, key: str | None, body: dict[str, Any]) -> "tuple[dict[str, Any], str | None]":
    """Return a server's answer, and a reason to stop or None."""
    said = endpoints.request(url + "/v1/completions", PARAMETERS["seconds"], key, body)
    if "error" in said:
        return {**NO_ANSWER, "error": said["error"]}, said["error"]
    choice = only_completion(said)
    if choice is None:
        why = "HTTP %s: %s" % (said["status"], said["body"][:CHARACTERS])
        return {**NO_ANSWER, "error": why}, None
    tokens = choice.get("token_ids")
    if not isinstance(tokens, list):
        tokens = numbered(url, key, body)
    return {"text": str(choice.get("text") or "")[:CHARACTERS], "tokens": tokens, "error": ""}, None


def numbered(url: str, key: str | None, body: dict[str, Any]) -> list[int] | None:
    """Return the tokens of an older release's answer, which lists them with their probabilities."""
    more = {**body, "logprobs": 1, "return_tokens_as_token_ids": True}
    said = endpoints.request(url + "/v1/completions", PARAMETERS["seconds"], key, more)
    choice = only_completion(said) or {}
    words = (choice.get("logprobs") or {}).get("tokens") or []
    try:
        return [int(word[len(NUMBERED) :]) for word in words if word.startswith(NUMBERED)] or None
    except ValueError:
        return None


def only_completion(said: dict[str, Any]) -> dict[str, Any] | None:
    """Return the completion in an answer that has exactly one, or None."""
    document = endpoints.parse_body(said)
    try:
        found = document["choices"][0]
    except (KeyError, IndexError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def metrics(url: str) -> dict[str, Any]:
    """Return the requested lines of a server's /metrics."""
    said = endpoints.request(url + "/metrics", METRICS_SECONDS)
    if said.get("status") != 200:
        return {"error": said.get("error") or "HTTP %s" % said.get("status")}
    wanted = tuple(PARAMETERS["families"])
    lines = [line for line in said["body"].splitlines() if line.startswith(wanted)]
    return {"text": "\n".join(line for line in lines if "_created" not in line.split("{")[0])}


def alerts(url: str) -> dict[str, Any]:
    """Return the alerts from Alertmanager's API (version 2), including silenced ones."""
    said = endpoints.request(url + "/api/v2/alerts?silenced=true&inhibited=true", ALERTS_SECONDS)
    listed = endpoints.parse_body(said)
    if not isinstance(listed, list):
        why = said.get("error") or "HTTP %s: %s" % (said["status"], said["body"][:CHARACTERS])
        return {"error": "%s: %s" % (url, why), "alerts": []}
    kept = ("labels", "startsAt", "status")
    return {
        "error": None,
        "at": time.time(),
        "alerts": [
            {
                **{name: each.get(name) for name in kept},
                "annotations": {"summary": (each.get("annotations") or {}).get("summary", "")},
            }
            for each in listed
        ],
    }


if __name__ == "__main__":
    main()
