"""RUNS ON THE NODE: what replicas here answer to prompts and have counted, and what fires.

Takes (JSON header `PARAMETERS`):
  replicas      [{replica, prompts, max_tokens, times, seconds, again}]: each prompt is put `times`
                times to each server of the replica's unit here; all of it takes at most `seconds`.
                With `again` the first one that a server does not answer is put once more
  seconds       deadline of one prompt
  families      beginnings of the names of metrics to bring back
  alertmanager  address of the Alertmanager here; null: none is asked
Prints one JSON document {"schema": 1, "replicas": {id: ...}, "alerts": ...}. Of a replica:
  servers       {url: {"golden": [[answer, ...] of each prompt], "metrics": {"text"} or {"error"}}};
                none for a rank that has no server
or {"missing": reason}. An answer is {"text", "tokens", "error"}: `tokens` are their numbers in the
vocabulary, null where the release does not tell them; `error` is why there is no answer.
  alerts        {"error": null or a sentence, "at": this node's clock in seconds since 1970,
                "alerts": [{labels, annotations, startsAt, status}]},
                also those that are silenced; null

Where a replica answers, under which name and with which key, is read from its unit: it is what runs
that is judged. It changes nothing; the API key is read here and never leaves the node. Every
replica is looked at by a process of its own, with a deadline. Python 3.8, standard library.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

from gpufleet.on_node.common import linux_facts, stages, unit_journal
from gpufleet.on_node.common.answers import CannotRead
from gpufleet.on_node.common.forked import Watch
from gpufleet.on_node.serving import endpoints, status

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

METRICS_SECONDS = 10
ALERTS_SECONDS = 10
# Of an answer's text or an error. A journal keeps as much of a text, and no more: two texts that
# were cut at different places would not be the same.
CHARACTERS = 1900
# vLLM writes a token so where it is asked for numbers in place of texts.
NUMBERED = "token_id:"
NO_ANSWER = {"text": "", "tokens": None}


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
    """Return what each server of a replica on this node answers and has counted."""
    unit = "vllm-%s.service" % asked["replica"]
    try:
        said = stages.stage(unit)
    except FileNotFoundError:
        raise CannotRead("absent", detail="there is no %s here" % unit) from None
    if "model" not in said:
        raise CannotRead("absent", detail="%s is not managed by gpufleet" % unit)
    text = linux_facts.line(stages.UNITS + "/" + unit)
    words = status.serve(status.command(text))
    ports = [said["port"], *status.engines(words, said["port"])]
    urls = [url for url in (status.endpoint(words, port) for port in ports) if url]
    name = status.value(words, "--served-model-name") or said["model"]
    key_file = dict(unit_journal.CREDENTIAL.findall(text)).get(status.API_KEY)
    key = endpoints.read_key(key_file and linux_facts.ROOT + key_file)
    known = unit_journal.hiding(unit_journal.secrets(text))
    found = {
        url: {"golden": golden(url, name, key, asked), "metrics": metrics(url)} for url in urls
    }
    return {"servers": status.hide_secrets(found, known)}


def golden(url: str, name: str, key: str | None, asked: dict[str, Any]) -> list[list[Any]]:
    """
    Return a server's answers to each prompt.

    All prompts are put once before any is put again: what a server does differently the second time
    (its cache is warm, other requests are in the batch) is seen. One that does not answer at all is
    not asked further.
    """
    found: list[list[Any]] = [[] for _ in asked["prompts"]]
    dead = None
    again = asked.get("again", False)
    for _ in range(asked["times"]):
        for at, prompt in enumerate(asked["prompts"]):
            if dead is not None:
                found[at].append({**NO_ANSWER, "error": dead})
                continue
            said, dead = answer(url, key, question(name, prompt, asked["max_tokens"]))
            if dead is not None and again:
                again = False
                said, dead = answer(url, key, question(name, prompt, asked["max_tokens"]))
            found[at].append(said)
    return found


def question(name: str, prompt: str, most: int) -> dict[str, Any]:
    """Return a request whose answer is the same each time, as far as the model's is."""
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
    """Return a server's answer; and why it need not be asked further, or None."""
    said = endpoints.request(url + "/v1/completions", PARAMETERS["seconds"], key, body)
    if "error" in said:
        return {**NO_ANSWER, "error": said["error"]}, said["error"]
    choice = chosen(said)
    if choice is None:
        why = "HTTP %s: %s" % (said["status"], said["body"][:CHARACTERS])
        return {**NO_ANSWER, "error": why}, None
    tokens = choice.get("token_ids")
    if not isinstance(tokens, list):
        tokens = numbered(url, key, body)
    return {"text": str(choice.get("text") or "")[:CHARACTERS], "tokens": tokens, "error": ""}, None


def numbered(url: str, key: str | None, body: dict[str, Any]) -> list[int] | None:
    """Return the tokens of an answer as an older release tells them: beside their probabilities."""
    more = {**body, "logprobs": 1, "return_tokens_as_token_ids": True}
    said = endpoints.request(url + "/v1/completions", PARAMETERS["seconds"], key, more)
    choice = chosen(said) or {}
    words = (choice.get("logprobs") or {}).get("tokens") or []
    try:
        return [int(word[len(NUMBERED) :]) for word in words if word.startswith(NUMBERED)] or None
    except ValueError:
        return None


def chosen(said: dict[str, Any]) -> dict[str, Any] | None:
    """Return the one completion of an answer, or None."""
    document = endpoints.parsed(said)
    try:
        found = document["choices"][0]
    except (KeyError, IndexError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def metrics(url: str) -> dict[str, Any]:
    """Return the lines of a server's /metrics that were asked for."""
    said = endpoints.request(url + "/metrics", METRICS_SECONDS)
    if said.get("status") != 200:
        return {"error": said.get("error") or "HTTP %s" % said.get("status")}
    wanted = tuple(PARAMETERS["families"])
    lines = [line for line in said["body"].splitlines() if line.startswith(wanted)]
    return {"text": "\n".join(line for line in lines if "_created" not in line.split("{")[0])}


def alerts(url: str) -> dict[str, Any]:
    """Return what fires, as Alertmanager's API (version 2) lists it, the silenced ones too."""
    said = endpoints.request(url + "/api/v2/alerts?silenced=true&inhibited=true", ALERTS_SECONDS)
    listed = endpoints.parsed(said)
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
