"""RUNS ON THE NODE: the request for each kind of model, and the verdict on its answer.

    kind         asked                           a good answer
    generate     POST /v1/completions            a text
    picture      POST /v1/chat/completions       a text; asked in addition if a model of kind
                                                 generate accepts images
    embed        POST /v1/embeddings             finite numbers, as many as the model's files state;
                                                 a vector of length 1 if they normalise it
    rerank       POST /rerank                    a finite score for each document, and the one
                                                 that answers the query above the other
    classify     POST /classify                  finite probabilities, and a label of config.json
    reward       POST /pooling                   finite numbers
    transcribe   POST /v1/audio/transcriptions   a text, for a second of tone

The kind is from the unit's file, so that a running server gets the right request. The default is
`generate`. Answers are compared with the model's files on the node, and properties that the files
do not state are not judged. A reranker's order is judged only for the query and the documents in
this file; the order of your own documents is compared by golden prompts. Python 3.8, standard
library.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import struct
import zlib
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from gpufleet.on_node.common import linux_facts, stages
from gpufleet.on_node.common.answers import OTHER_FORM
from gpufleet.on_node.serving import unit_command

GENERATE = "generate"
PICTURE = "picture"
"""The additional question for a model of kind `generate` that accepts images."""
KINDS = (GENERATE, "embed", "rerank", "classify", "reward", "transcribe")
KIND = re.compile(r"^Kind=(\w+)$", re.MULTILINE)
# Flags that change what the model's files say of an answer; also `--pooler-config.normalize`.
CHANGING = ("--hf-overrides", "--pooler-config", "--override-pooler-config")
# Encoders whose vector is their hidden state. Others may have a matrix behind it.
PLAIN = re.compile(
    r"(Bert|Roberta|XLMRoberta|NomicBert|ModernBert|Gte|GteNew|Qwen2|Llama|Mistral)Model"
    r"|\w+ForCausalLM"
)
# Flags that give a model no picture, if it can see: `--language-model-only`, and a limit of 0.
BLIND, LIMIT = "--language-model-only", "--limit-mm-per-prompt"
TEMPLATE = "--chat-template"
DENSE, POOLING, NORMALIZE = "Dense", "Pooling", "Normalize"
# Tolerance for the length of a normalised vector, in the precision of a server's answer.
LENGTH_ERROR = 1e-3
RATE, TONE_HZ = 16000, 440  # of the second of sound
PIXELS = 64
"""Pixels on each side of the picture; some processors refuse fewer, or take them for a channel."""
BOUNDARY = "gpufleet-5e1f8c0b7a3d4926"
FORM = "multipart/form-data; boundary=" + BOUNDARY
SPEECH = "/v1/audio/transcriptions"
TEXT = "Hello"
QUERY = "What is the capital of France?"
DOCUMENTS = ("A bicycle has two wheels.", "The capital of France is Paris.")
"""Documents, the last of which answers `QUERY` literally, so that rerankers rank it first."""
UNRANKED = "it does not rank by relevance"


class Expected(NamedTuple):
    """Facts about the answers from the model's files; None or empty if the files state none."""

    dimension: Optional[int] = None
    normalised: bool = False
    labels: Tuple[str, ...] = ()
    sees: bool = False
    """Whether the server answers a chat with a picture."""


class Question(NamedTuple):
    """One request to a server."""

    path: str
    body: Any
    """Content sent as JSON; bytes are sent unchanged."""
    headers: Tuple[Tuple[str, str], ...] = ()


class Judged(NamedTuple):
    """A judged answer, with its content in a line or its error."""

    text: str = ""
    numbers: Optional[List[float]] = None
    problem: str = ""


# --- what runs


def kind_of(text: str) -> str:
    """Return the kind of the model that a unit's file starts."""
    _, _, section = text.partition("\n[%s]\n" % stages.SECTION)
    found = KIND.search(section)
    return found.group(1) if found else GENERATE


def expected_of_unit(unit: str) -> Tuple[str, Expected]:
    """Return the kind of a unit's model, and the facts about its answers from its files."""
    path = "%s%s/%s" % (linux_facts.ROOT, stages.UNITS, unit)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(stages.UNIT_BYTES)
    except OSError:
        return GENERATE, Expected()
    return expected_of_text(text)


def expected_of_text(text: str) -> Tuple[str, Expected]:
    """Return the kind and the facts as `expected_of_unit`, from the text of a unit's file."""
    kind = kind_of(text)
    words = unit_command.serve(unit_command.command(text))
    if not words or any(word.startswith(CHANGING) for word in words):
        return kind, Expected()
    if kind == GENERATE:
        return kind, Expected(sees=accepts_images(words))
    return kind, expected(kind, words[0])


def expected(kind: str, folder: str) -> Expected:
    """Return the facts about answers from the files of the model in `folder`."""
    config = read_description(folder, "config.json")
    if not isinstance(config, dict):
        return Expected()
    if kind == "classify":
        names = config.get("id2label")
        return Expected(labels=tuple(map(str, names.values())) if isinstance(names, dict) else ())
    if kind == "embed":
        return Expected(*vector(folder, config))
    return Expected()


def accepts_images(words: Sequence[str]) -> bool:
    """
    Return whether a server with this command line certainly answers a chat with a picture.

    The model's class is `...ForConditionalGeneration` with a vision tower, the model has a chat
    template, and no flag disables images.
    """
    folder = words[0]
    config = read_description(folder, "config.json")
    if not isinstance(config, dict) or not isinstance(config.get("vision_config"), dict):
        return False
    classes = config.get("architectures")
    named = str(classes[0]) if isinstance(classes, list) and classes else ""
    if not named.endswith("ForConditionalGeneration") or any(
        word.partition("=")[0] == BLIND or word.startswith(LIMIT + ".") for word in words
    ):
        return False
    limit = unit_command.value([*words], LIMIT)
    try:
        taken = json.loads(limit or "{}")
    except ValueError:
        return False
    most = taken.get("image", 1) if isinstance(taken, dict) else 0
    most = most.get("count", 1) if isinstance(most, dict) else most
    if not isinstance(most, int) or most < 1:
        return False
    return any(word.startswith(TEMPLATE) for word in words) or has_chat_template(folder)


def has_chat_template(folder: str) -> bool:
    """Return whether a model's files contain a chat template."""
    for name in ("chat_template.jinja", "chat_template.json"):
        if os.path.exists(linux_facts.ROOT + folder + "/" + name):
            return True
    told = read_description(folder, "tokenizer_config.json")
    return isinstance(told, dict) and bool(told.get("chat_template"))


def vector(folder: str, config: "dict[str, Any]") -> Tuple[Optional[int], bool]:
    """Return the dimension of an embedder's vector, and whether its length is 1."""
    modules = read_description(folder, "modules.json")
    listed = modules if isinstance(modules, list) else []
    types = {
        str(each.get("type", "")).rpartition(".")[2]: each
        for each in listed
        if isinstance(each, dict)
    }
    classes = config.get("architectures") or [""]
    plain = isinstance(classes, list) and PLAIN.fullmatch(str(classes[0]))
    if DENSE in types or not (plain or POOLING in types):
        return None, NORMALIZE in types
    size = config.get("hidden_size")
    if POOLING in types:
        told = read_description(folder, "%s/config.json" % types[POOLING].get("path", ""))
        size = told.get("word_embedding_dimension", size) if isinstance(told, dict) else size
    return size if isinstance(size, int) else None, NORMALIZE in types


def read_description(folder: str, name: str) -> Any:
    """
    Return the value of a model's JSON file, or None if it is unreadable or outside the folder.
    """
    path = os.path.normpath(folder + "/" + name)
    try:
        return (
            stages.parse_json_file(linux_facts.ROOT + path)
            if path.startswith(folder + "/")
            else None
        )
    except (OSError, ValueError, RecursionError):
        return None


# --- what is asked


def question(
    kind: str, name: str, text: str = TEXT, documents: Sequence[str] = DOCUMENTS
) -> Question:
    """
    Return the request for a model of this kind, with `text` as its prompt or input.

    A reranker's query is `QUERY`, unless `text` is given.
    """
    if kind == "embed":
        return Question("/v1/embeddings", {"model": name, "input": text})
    if kind == "rerank":
        query = QUERY if text == TEXT else text
        return Question("/rerank", {"model": name, "query": query, "documents": [*documents]})
    if kind == "classify":
        return Question("/classify", {"model": name, "input": text})
    if kind == "reward":
        return Question("/pooling", {"model": name, "input": text})
    if kind == "transcribe":
        more = {} if text == TEXT else {"prompt": text}
        return Question(SPEECH, speech_form(name, tone_samples(), more), (("Content-Type", FORM),))
    if kind == PICTURE:
        chat = picture_chat(name, picture(), "Which colour is this?")
        return Question("/v1/chat/completions", {**chat, "max_tokens": 1, "temperature": 0})
    body = {"model": name, "prompt": text, "max_tokens": 1, "temperature": 0}
    return Question("/v1/completions", body)


def picture_chat(name: str, png: bytes, text: str) -> "dict[str, Any]":
    """Return a chat about a picture, without a limit for the answer."""
    address = "data:image/png;base64," + base64.b64encode(png).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "text", "text": text},
    ]
    return {"model": name, "messages": [{"role": "user", "content": parts}]}


def picture() -> bytes:
    """Return a red square as a PNG file: 8 bits of red, green and blue."""
    row = b"\0" + b"\xff\0\0" * PIXELS
    return png_file(PIXELS, 8, 2, (b"IDAT", zlib.compress(row * PIXELS)))


def png_file(pixels: int, bits: int, colours: int, *chunks: "tuple[bytes, bytes]") -> bytes:
    """Return a square PNG file from its chunks, with `bits` per sample and a colour type."""
    head = struct.pack(">IIBBBBB", pixels, pixels, bits, colours, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in ((b"IHDR", head), *chunks, (b"IEND", b""))
    )


def speech_form(name: str, samples: bytes, more: "Optional[dict[str, str]]" = None) -> bytes:
    """Return the body of a request to transcribe a sound in the format of `tone_samples`."""
    # Without a language vLLM first asks the model which one it hears, of a tone.
    fields = {"model": name, "language": "en", "temperature": "0", "response_format": "json"}
    return multipart_body({**fields, **(more or {})}, "tone.wav", wav_file(samples))


def multipart_body(fields: "dict[str, str]", file_name: str, content: bytes) -> bytes:
    """Return the body of a form with a file (RFC 7578)."""
    parts = [
        '--%s\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (BOUNDARY, name, value)
        for name, value in fields.items()
    ]
    head = (
        '--%s\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\n'
        "Content-Type: audio/wav\r\n\r\n" % (BOUNDARY, file_name)
    )
    return "".join([*parts, head]).encode() + content + ("\r\n--%s--\r\n" % BOUNDARY).encode()


def tone_samples() -> bytes:
    """Return a second of tone with one channel, 16 bits and `RATE` samples a second."""
    return struct.pack(
        "<%dh" % RATE,
        *(int(8000 * math.sin(2 * math.pi * TONE_HZ * at / RATE)) for at in range(RATE)),
    )


def wav_file(samples: bytes) -> bytes:
    """Return samples as a WAV file."""
    head = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, RATE, 2 * RATE, 2, 16)
    chunks = head + struct.pack("<4sI", b"data", len(samples)) + samples
    return struct.pack("<4sI4s", b"RIFF", 4 + len(chunks), b"WAVE") + chunks


# --- how an answer is judged


def judge(kind: str, put: Question, document: Any, known: Expected) -> Judged:
    """Judge a JSON answer to a question; no answer of a server raises an exception."""
    try:
        if kind == "embed":
            return embedding(document, known)
        if kind == "rerank":
            return judge_order(put.body, judge_scores(document, len(put.body["documents"])))
        if kind == "classify":
            return judge_label(document, known)
        if kind == "reward":
            return numbers("its answer", flatten_numbers(document["data"][0]["data"]))
        if kind == "transcribe":
            return judge_text(document["text"])
        if kind == GENERATE:
            return judge_text(document["choices"][0]["text"])
        if kind == PICTURE:  # the one token of a model that thinks first is no content
            return Judged(str(document["choices"][0]["message"].get("content") or ""))
    except OTHER_FORM as error:
        why = "%s: %s" % (type(error).__name__, error)
        return Judged(problem="its answer has another form (%s)" % why)
    return Judged(problem="its unit says `Kind=%s`, which this gpufleet does not know" % kind)


def judge_text(text: Any) -> Judged:
    """Judge a text."""
    if not isinstance(text, str):
        return Judged(problem="its answer has another form (its text is %s)" % type(text).__name__)
    return Judged(text)


def numbers(what: str, found: Sequence[Any]) -> Judged:
    """Judge numbers; vLLM writes null for a number that is not finite."""
    if not found:
        return Judged(problem="%s has no numbers" % what)
    # bool is an int.
    fine = [isinstance(each, (int, float)) and not isinstance(each, bool) for each in found]
    bad = sum(not good or not math.isfinite(each) for good, each in zip(fine, found))
    if bad:
        return Judged(problem="%d of the %d numbers of %s are not finite" % (bad, len(found), what))
    values = [float(each) for each in found]
    return Judged("%d number%s" % (len(values), "" if len(values) == 1 else "s"), values)


def flatten_numbers(found: Any) -> List[Any]:
    """Return the numbers in nested lists, in order."""
    if not isinstance(found, list):
        return [found]
    return [each for part in found for each in flatten_numbers(part)]


def embedding(document: Any, known: Expected) -> Judged:
    """Judge an embedder's vector."""
    found = numbers("its vector", document["data"][0]["embedding"])
    if found.numbers is None:
        return found
    if known.dimension is not None and len(found.numbers) != known.dimension:
        return Judged(
            problem="its vector has %d numbers, and the model's files say %d"
            % (len(found.numbers), known.dimension)
        )
    length = math.sqrt(sum(each * each for each in found.numbers))
    if not length:
        return Judged(problem="all numbers of its vector are 0")
    if known.normalised and abs(length - 1) > LENGTH_ERROR:
        return Judged(
            problem="its vector has the length %.4f, and modules.json normalises it to 1" % length
        )
    return found


def judge_scores(document: Any, count: int) -> Judged:
    """Judge a reranker's scores, and return them in the order of the documents."""
    rows = {row["index"]: row["relevance_score"] for row in document["results"]}
    if sorted(rows) != list(range(count)):
        return Judged(problem="it was given %d documents, but scored %s" % (count, sorted(rows)))
    return numbers("its scores", [rows[at] for at in range(count)])


def judge_order(asked: "dict[str, Any]", found: Judged) -> Judged:
    """Return the scores, or a problem if the answer to `QUERY` does not have the highest."""
    scores = found.numbers
    if scores is None or (asked["query"], tuple(asked["documents"])) != (QUERY, DOCUMENTS):
        return found
    other, answer = scores
    if answer > other:
        return found
    return Judged(
        problem='for "%s" it scores "%s" %.4g and "%s" %.4g: %s'
        % (QUERY, DOCUMENTS[0], other, DOCUMENTS[1], answer, UNRANKED)
    )


def judge_label(document: Any, known: Expected) -> Judged:
    """Judge a classifier's label and probabilities."""
    row = document["data"][0]
    found = numbers("its probabilities", row["probs"])
    if found.numbers is None:
        return found
    named = row["label"] in known.labels and len(row["probs"]) == len(known.labels)
    if known.labels and not named:
        return Judged(
            problem="its label is %s of %d, and config.json names %d: %s"
            % (
                json.dumps(row["label"])[:100],
                len(row["probs"]),
                len(known.labels),
                ", ".join(known.labels)[:200],
            )
        )
    return Judged(str(row["label"]), found.numbers)
