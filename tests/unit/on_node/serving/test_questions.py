"""What a model of each kind is asked, and which answers are none. Forms are those of vLLM 0.32."""

from __future__ import annotations

import base64
import binascii
import email
import io
import itertools
import json
import math
import wave
import zlib
from pathlib import Path
from typing import Any

import pytest

from gpufleet.on_node.common import http, linux_facts
from gpufleet.on_node.serving import questions
from gpufleet.on_node.serving.questions import Expected
from gpufleet.planning.stage import Stage
from gpufleet.serving.unit import render_unit
from gpufleet.settings.serving_settings import Served, Vllm
from tests.support.rows import each_row

UNIT_VECTOR = [0.6, 0.8, 0.0]
LABELS = Expected(labels=("refund", "delivery"))


def embedding(vector: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"index": 0, "object": "embedding", "embedding": vector}]}


def ranking(*scores: Any) -> dict[str, Any]:
    rows = [{"index": at, "relevance_score": score} for at, score in enumerate(scores)]
    return {"results": sorted(rows, key=lambda row: -1 if row["index"] else 0)}


def label(name: Any, *probabilities: Any) -> dict[str, Any]:
    row = {"index": 0, "label": name, "probs": [*probabilities], "num_classes": len(probabilities)}
    return {"data": [row]}


def judged(kind: str, document: Any, known: Expected = Expected()) -> questions.Judged:  # noqa: B008
    return questions.judge(kind, questions.question(kind, "m"), document, known)


@each_row(
    ("kind", "document", "known", "text", "numbers"),
    [
        ("generate", {"choices": [{"text": "9"}]}, Expected(), "9", None),
        ("embed", embedding(UNIT_VECTOR), Expected(3, True), "3 numbers", UNIT_VECTOR),
        ("embed", embedding([3.0, 4.0]), Expected(), "2 numbers", [3.0, 4.0]),
        ("rerank", ranking(0.1, 0.9), Expected(), "2 numbers", [0.1, 0.9]),
        ("classify", label("refund", 0.7, 0.3), LABELS, "refund", [0.7, 0.3]),
        ("classify", label(None, 0.7, 0.3), Expected(), "None", [0.7, 0.3]),
        ("reward", {"data": [{"data": [[0.5], [0.25]]}]}, Expected(), "2 numbers", [0.5, 0.25]),
        ("transcribe", {"text": ""}, Expected(), "", None),
    ],
)
def test_a_good_answer_is_read(
    kind: str, document: Any, known: Expected, text: str, numbers: list[float] | None
) -> None:
    assert judged(kind, document, known) == (text, numbers, "")


@each_row(
    ("kind", "document", "known", "says"),
    [
        ("embed", embedding([0.1, None]), Expected(), "1 of the 2 numbers of its vector are not"),
        ("embed", embedding([math.nan, 1.0]), Expected(), "not finite"),
        ("embed", embedding([True, 1.0]), Expected(), "not finite"),
        ("embed", embedding([]), Expected(), "its vector has no numbers"),
        ("embed", embedding([0.0, 0.0]), Expected(), "all numbers of its vector are 0"),
        ("embed", embedding(UNIT_VECTOR), Expected(4), "3 numbers, and the model's files say 4"),
        ("embed", embedding([0.6, 0.9]), Expected(2, True), "the length 1.0817"),
        ("embed", embedding([10**400, 1.0]), Expected(), "another form (OverflowError"),
        ("embed", {"data": []}, Expected(), "another form (IndexError"),
        ("rerank", ranking(0.9, 0.1), Expected(), '"The capital of France is Paris." 0.1: it does'),
        ("rerank", ranking(0.5, 0.5), Expected(), "it does not rank by relevance"),
        ("rerank", ranking(0.5), Expected(), "given 2 documents, but scored [0]"),
        ("rerank", ranking(0.5, math.inf), Expected(), "1 of the 2 numbers of its scores"),
        ("classify", label("other", 0.7, 0.3), LABELS, 'its label is "other" of 2'),
        ("classify", label("refund", 0.7, 0.2, 0.1), LABELS, "of 3, and config.json names 2"),
        ("classify", label("refund", None), LABELS, "not finite"),
        ("reward", {"data": [{"data": ["x"]}]}, Expected(), "not finite"),
        ("transcribe", {"words": []}, Expected(), "another form (KeyError"),
        ("transcribe", {"text": None}, Expected(), "its text is NoneType"),
        ("generate", {"choices": []}, Expected(), "another form"),
        ("draw", {}, Expected(), "`Kind=draw`, which this gpufleet does not know"),
        *((kind, [], Expected(), "another form") for kind in questions.KINDS),
        *((kind, None, Expected(), "another form") for kind in questions.KINDS),
    ],
)
def test_an_answer_that_is_none_says_why(
    kind: str, document: Any, known: Expected, says: str
) -> None:
    found = judged(kind, document, known)
    assert says in found.problem
    assert found.numbers is None


def test_the_order_of_other_documents_and_of_another_query_is_not_judged() -> None:
    """Golden prompts compare it with before, and load tests send random words."""
    for query, documents in (
        (questions.TEXT, ["Paris", "London"]),
        ("Which vehicle has two wheels?", [*questions.DOCUMENTS]),
    ):
        put = questions.question("rerank", "m", query, documents)
        assert not questions.judge("rerank", put, ranking(0.9, 0.1), Expected()).problem


def test_speech_is_asked_with_a_form_that_others_read() -> None:
    """The form is taken apart by Python's parser of mail, the sound by its reader of WAV files."""
    put = questions.question("transcribe", "whisper", "Paris")
    sent = http.request("http://127.0.0.1:1", put.path, put.body, put.headers)
    head, _, body = sent.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v1/audio/transcriptions HTTP/1.0"
    assert f"Content-Length: {len(body)}" in lines
    (kind,) = (line for line in lines if line.startswith("Content-Type: "))
    read = email.message_from_bytes(kind.encode() + b"\r\n\r\n" + body)
    parts = {
        part.get_param("name", header="Content-Disposition"): part.get_payload(decode=True)
        for part in read.walk()
        if not part.is_multipart()
    }
    assert parts["model"] == b"whisper"
    assert parts["prompt"] == b"Paris"
    with wave.open(io.BytesIO(parts["file"])) as sound:
        assert sound.getnframes() / sound.getframerate() == 1
        samples = memoryview(sound.readframes(sound.getnframes())).cast("h").tolist()
    crossings = sum(a < 0 <= b for a, b in itertools.pairwise(samples))
    assert crossings == pytest.approx(questions.TONE_HZ, abs=1)


def test_a_model_of_text_is_asked_for_one_token() -> None:
    put = questions.question("generate", "tiny")
    sent = http.request("http://127.0.0.1:8000", put.path, put.body, put.headers)
    assert sent.startswith(b"POST /v1/completions HTTP/1.0\r\n")
    assert sent.endswith(
        b'\r\n\r\n{"model": "tiny", "prompt": "Hello", "max_tokens": 1, "temperature": 0}'
    )


# -- what runs, and what its files say


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    (tmp_path / "srv/m/1_Pooling").mkdir(parents=True)
    return tmp_path


def put_unit(node: Path, kind: str, **flags: Any) -> str:
    stage = Stage("m", 0, "n1", (0,), ("GPU-a",), 8000, 1, kind=kind)  # type: ignore[arg-type]
    vllm = Vllm(version="0.32.0", lock="x", listen="127.0.0.1")
    unit = render_unit(stage, Served(model="/srv/m", flags=flags), vllm, release="0.32.0-1a2b")
    (node / f"etc/systemd/system/{unit.unit}").write_text(unit.content)
    return unit.unit


def put_files(node: Path, **files: Any) -> None:
    for name, content in files.items():
        place = {"pooling": "1_Pooling/config"}.get(name, name)
        (node / f"srv/m/{place}.json").write_text(json.dumps(content))


def modules(*types: str) -> list[dict[str, str]]:
    paths = {"Pooling": "1_Pooling"}
    return [
        {"type": f"sentence_transformers.models.{each}", "path": paths.get(each, "")}
        for each in types
    ]


BERT = {"architectures": ["BertModel"], "hidden_size": 384}


@each_row(
    ("files", "known"),
    [
        ({"config": BERT}, Expected(384)),
        ({"config": BERT, "modules": modules("Transformer", "Normalize")}, Expected(384, True)),
        (
            {
                "config": BERT,
                "modules": modules("Transformer", "Pooling"),
                "pooling": {"word_embedding_dimension": 512},
            },
            Expected(512),
        ),
        ({"config": BERT, "modules": modules("Pooling", "Dense", "Normalize")},
         Expected(None, True)),
        ({"config": {**BERT, "architectures": ["CLIPModel"]}}, Expected()),
        ({"config": [1]}, Expected()),
        ({"config": {"architectures": 3, "hidden_size": "x"}, "modules": {"a": 1}}, Expected()),
        ({}, Expected()),
    ],
)  # fmt: skip
def test_what_a_vector_has_to_be_is_what_the_models_files_say(
    node: Path, files: dict[str, Any], known: Expected
) -> None:
    for left in (node / "srv/m").rglob("*.json"):
        left.unlink()
    put_files(node, **files)
    assert questions.expected_of_unit(put_unit(node, "embed")) == ("embed", known)


def test_labels_are_those_of_the_models_config(node: Path) -> None:
    put_files(node, config={"id2label": {"0": "yes", "1": "no"}})
    found = questions.expected_of_unit(put_unit(node, "classify"))
    assert found == ("classify", Expected(labels=("yes", "no")))


def test_flags_that_change_what_the_files_say_leave_the_answer_unjudged(node: Path) -> None:
    put_files(node, config=BERT)
    unit = put_unit(node, "embed", **{"hf-overrides": {"hidden_size": 9}})
    assert questions.expected_of_unit(unit) == ("embed", Expected())


def test_a_path_in_modules_json_leads_nowhere_else(node: Path) -> None:
    (node / "srv/config.json").write_text('{"word_embedding_dimension": 7}')
    wrong = [{"type": "x.Pooling", "path": ".."}]
    put_files(node, config=BERT, modules=wrong)
    assert questions.expected_of_unit(put_unit(node, "embed")) == ("embed", Expected(384))


def test_a_unit_without_a_word_of_it_completes_text(node: Path) -> None:
    """Those of older gpufleets; and one that is not there is asked as ever."""
    name = put_unit(node, "generate")
    assert "Kind=" not in (node / f"etc/systemd/system/{name}").read_text()
    assert questions.expected_of_unit(name) == ("generate", Expected())
    assert questions.expected_of_unit("vllm-gone-0.service") == ("generate", Expected())


# -- models that see


SEEING = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {"patch_size": 16}}
TEMPLATE = {"chat_template": "{{ messages }}"}


@each_row(
    ("config", "tokenizer", "flags", "sees"),
    [
        (SEEING, TEMPLATE, {}, True),
        (SEEING, {}, {"chat-template": "/srv/chat.jinja"}, True),
        (SEEING, TEMPLATE, {"limit-mm-per-prompt": {"image": 4, "video": 0}}, True),
        (SEEING, TEMPLATE, {"limit-mm-per-prompt": {"image": {"count": 1, "width": 512}}}, True),
        (SEEING, TEMPLATE, {"limit-mm-per-prompt": {"image": 0}}, False),
        (SEEING, TEMPLATE, {"limit-mm-per-prompt": {"image": {"count": 0}}}, False),
        (SEEING, TEMPLATE, {"language-model-only": True}, False),
        (SEEING, TEMPLATE, {"hf-overrides": {"a": 1}}, False),
        (SEEING, {}, {}, False),
        ({**SEEING, "architectures": ["Gemma3ForCausalLM"]}, TEMPLATE, {}, False),
        ({**SEEING, "vision_config": None}, TEMPLATE, {}, False),
        ({**SEEING, "architectures": []}, TEMPLATE, {}, False),
        ([1], TEMPLATE, {}, False),
    ],
)
def test_who_is_asked_about_a_picture_is_what_certainly_sees(
    node: Path, config: Any, tokenizer: Any, flags: dict[str, Any], sees: bool
) -> None:
    put_files(node, config=config, tokenizer_config=tokenizer)
    assert questions.expected_of_unit(put_unit(node, "generate", **flags)) == (
        "generate",
        Expected(sees=sees),
    )


def test_a_template_in_a_file_of_its_own_is_found(node: Path) -> None:
    put_files(node, config=SEEING, tokenizer_config={})
    (node / "srv/m/chat_template.jinja").write_text("{{ messages }}")
    assert questions.expected_of_unit(put_unit(node, "generate")) == (
        "generate",
        Expected(sees=True),
    )


def test_the_picture_is_a_red_square_to_others() -> None:
    body = questions.question("picture", "m").body
    address = body["messages"][0]["content"][0]["image_url"]["url"]
    kind, _, data = address.partition(",")
    assert kind == "data:image/png;base64"
    image = base64.b64decode(data)
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(image):
        size = int.from_bytes(image[at : at + 4])
        chunk, sum_ = image[at + 4 : at + 8 + size], image[at + 8 + size : at + 12 + size]
        assert binascii.crc32(chunk) == int.from_bytes(sum_)
        chunks[chunk[:4]] = chunk[4:]
        at += 12 + size
    assert [*chunks] == [b"IHDR", b"IDAT", b"IEND"]
    assert chunks[b"IHDR"].hex() == "0000004000000040" + "0802000000"  # 64 x 64, 8 bits of RGB
    rows = zlib.decompress(chunks[b"IDAT"])
    assert {rows[at : at + 193] for at in range(0, len(rows), 193)} == {b"\0" + b"\xff\0\0" * 64}
    assert len(rows) == 64 * 193


@each_row(
    ("document", "text", "problem"),
    [
        ({"choices": [{"message": {"content": "Red"}}]}, "Red", ""),
        ({"choices": [{"message": {"content": None, "reasoning_content": "I"}}]}, "", ""),
        ({"choices": []}, "", "IndexError"),
        ({"choices": [{"message": None}]}, "", "AttributeError"),
        ("text", "", "TypeError"),
        (None, "", "TypeError"),
    ],
)
def test_an_answer_about_a_picture_has_a_message(document: Any, text: str, problem: str) -> None:
    found = judged("picture", document)
    assert found.text == text
    assert problem in found.problem
    assert bool(problem) == bool(found.problem)
