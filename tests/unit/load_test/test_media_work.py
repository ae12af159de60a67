"""Load with pictures and sounds: made by the client, unlike each other, read by others' parsers."""

from __future__ import annotations

import base64
import binascii
import io
import json
import wave
import zlib
from typing import Any

import pytest

from gpufleet.cli.measure_wanted import work_json
from gpufleet.errors import FleetError
from gpufleet.load_test.client_places import this_machine
from gpufleet.load_test.level_runs import measure_client
from gpufleet.load_test.load_target import contract_of, kind_of
from gpufleet.load_test.media_work import (
    PICTURES,
    RECORDINGS,
    parse_picture_work,
    parse_sound_work,
)
from gpufleet.load_test.outcomes import Contract
from gpufleet.on_node.load.client import DRAWN
from gpufleet.on_node.serving import questions
from gpufleet.settings.serving_settings import ModelKind
from tests.support.queue_server import SECRET_TEXT, QueueServer, read_form
from tests.support.rows import each_row
from tests.unit.load_test.test_pooled_work import IDS, of_kind, runs, wanted

SMALL = parse_picture_work("8,4,40")
SHORT = parse_sound_work("1-3")


def drawn(work: Any, count: int, process: int = 0, processes: int = 1) -> list[bytes]:
    form = work.requests("m", IDS, "salt")(process, processes)
    made = DRAWN[form["kind"]](form, 1, process, processes)
    return [made.next().body for _ in range(count)]


def pixels_of(png: bytes) -> tuple[int, int, set[bytes]]:
    """Return a PNG's width, height and colours, by its chunks."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(png):
        size = int.from_bytes(png[at : at + 4])
        data = png[at + 4 : at + 8 + size]
        assert binascii.crc32(data) == int.from_bytes(png[at + 8 + size : at + 12 + size])
        chunks[data[:4]] = data[4:]
        at += 12 + size
    head = chunks[b"IHDR"]
    width, height = int.from_bytes(head[:4]), int.from_bytes(head[4:8])
    assert head[8:] == b"\x01\x03\0\0\0"  # a bit a pixel, a palette, no interlacing
    rows = zlib.decompress(chunks[b"IDAT"])
    assert rows == bytes(height * (1 + -(-width // 8)))  # no filter; each pixel is colour 0
    return width, height, {chunks[b"PLTE"][:3]}


def test_a_picture_has_its_size_and_a_colour_of_its_own() -> None:
    colours: set[bytes] = set()
    for body in (json.loads(each) for part in (0, 1) for each in drawn(SMALL, 50, part, 2)):
        (message,) = body["messages"]
        picture, text = message["content"]
        kind, _, data = picture["image_url"]["url"].partition(",")
        assert kind == "data:image/png;base64"
        width, height, found = pixels_of(base64.b64decode(data))
        assert (width, height) == (40, 40)
        colours |= found
        assert len(text["text"].split()) == 8
        assert (body["max_tokens"], body["min_tokens"], body["stream"]) == (4, 4, True)
    assert len(colours) == 100


def test_a_sound_has_its_seconds_and_no_two_are_equal() -> None:
    sounds = []
    for body in (each for part in (0, 1) for each in drawn(SHORT, 20, part, 2)):
        form = read_form(questions.FORM, body)
        assert {name: form[name] for name in ("model", "language", "response_format")} == {
            "model": "m", "language": "en", "response_format": "json",
        }  # fmt: skip
        with wave.open(io.BytesIO(form["file"])) as sound:
            assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (
                1, 2, questions.RATE,
            )  # fmt: skip
            sounds.append(sound.readframes(sound.getnframes()))
    assert {len(each) / 2 / questions.RATE for each in sounds} == {1, 2, 3}
    assert len(set(sounds)) == 40
    # All but the first four samples is the tone that readiness asks about.
    second = questions.tone_samples()
    assert all(each[8 : len(second)] == second[8:] for each in sounds)


def test_pictures_are_streams_with_tokens_and_sounds_are_documents() -> None:
    contract = Contract(e2e_seconds=5.0, share=0.5)
    with QueueServer(slots=4, first_seconds=0.01) as server:
        seen = runs(server, SMALL, contract).run(20.0, 10.0)
        heard = runs(server, SHORT, contract).run(10.0, 10.0)
    # A busy machine may make the client late: then a level is not known.
    assert seen.errors == heard.errors == {}
    assert "missed" not in {seen.verdict, heard.verdict}
    assert seen.requests > 0 < heard.requests
    assert seen.ttft["p50"] > 0
    assert seen.output_tokens_per_second > 0
    assert (heard.ttft, heard.itl, heard.output_tokens_per_second) == ({}, {}, 0)
    assert {each.path for each in server.record} == {
        "/v1/chat/completions", "/v1/audio/transcriptions",
    }  # fmt: skip
    assert {each.body["model"] for each in server.record} == {"served"}
    assert SECRET_TEXT not in repr((seen, heard))


@each_row(
    ("work", "fault", "says"),
    [
        (SHORT, "not a number", "(wrong answer)"),
        (SHORT, "not a stream", ""),
        (SMALL, "not a stream", "not a stream"),
        (SHORT, "500", "(lengths: sounds of 3 seconds) failed (500)"),
        (SMALL, "cut off", "40 x 40 pixels"),
    ],
)
def test_an_answer_of_another_form_is_refused_before_any_load(
    work: Any, fault: Any, says: str
) -> None:
    with QueueServer(slots=1, faults=(fault,)) as server:
        if not says:
            runs(server, work).try_largest()
            return
        with pytest.raises(FleetError) as refused:
            runs(server, work).try_largest()
    assert says in str(refused.value)


def test_the_largest_sound_and_picture_are_tried_first() -> None:
    with QueueServer(slots=1) as server:
        runs(server, parse_sound_work("1-4")).try_largest()
        runs(server, parse_picture_work("2-9,3-5,16")).try_largest()
    first, last = server.record[0].body, server.record[-1].body
    with wave.open(io.BytesIO(first["file"])) as sound:
        assert sound.getnframes() == 4 * questions.RATE
    assert last["max_tokens"] == 5
    assert len(last["messages"][0]["content"][1]["text"].split()) == 9


@pytest.mark.parametrize("work", [SMALL, SHORT], ids=["pictures", "sounds"])
def test_what_a_client_can_send_of_them_is_measured(work: Any) -> None:
    found = measure_client(work, 1, this_machine())
    assert found.tokens == round(work.mean_tokens)
    assert found.requests_per_second > 5


def test_the_presets_are_those_of_models_that_see_and_that_hear() -> None:
    assert wanted(preset="pictures").work("generate") == PICTURES
    assert wanted().work("transcribe") == RECORDINGS
    PICTURES.check_context(449)
    with pytest.raises(
        FleetError, match="448 tokens in addition to its picture, but the model's context has 448"
    ):
        PICTURES.check_context(448)
    RECORDINGS.check_context(1)
    assert work_json(SMALL, 7, None) == {
        "preset": "lengths", "kind": "generate", "words": "8", "output": "4", "pixels": 40,
        "seed": 7,
    }  # fmt: skip
    assert work_json(SHORT, 7, None) == {
        "preset": "lengths", "kind": "transcribe", "seconds": "1-3", "seed": 7,
    }  # fmt: skip


@each_row(
    ("kind", "typed", "words"),
    [
        ("transcribe", {"preset": "chat"}, "the presets for `kind: transcribe` are recordings"),
        ("embed", {"preset": "pictures"}, "are documents, queries"),
        ("transcribe", {"lengths": "x"}, "'x' is not a length"),
        ("transcribe", {"lengths": "601"}, "write at most 600"),
        ("transcribe", {"prompts": "own.jsonl"}, "cannot read sounds from files:"),
        (
            "generate",
            {"lengths": "8,4,0"},
            "a picture with 0 pixels a side is invalid: write 1 to 4096",
        ),
        ("generate", {"lengths": "8,4,x"}, "a picture with 0 pixels"),
        ("generate", {"lengths": "8,4,5000"}, "a picture with 5000 pixels"),
        ("generate", {"lengths": "8"}, "a picture, write WORDS,ANSWER_TOKENS,PIXELS, for"),
        ("generate", {"lengths": "8,4,40,1"}, "is not a length"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_write(
    kind: ModelKind, typed: dict[str, str], words: str
) -> None:
    with pytest.raises(FleetError) as refused:
        wanted(**typed).work(kind)
    assert words in str(refused.value)


def test_a_model_of_speech_is_measured_by_the_time_to_its_transcript() -> None:
    assert kind_of("tiny", of_kind("transcribe")) == "transcribe"
    found = contract_of("tiny", of_kind("transcribe", e2e_p99_seconds=3), 0.9)
    assert found == Contract(e2e_seconds=3, share=0.9)
    with pytest.raises(FleetError, match="set only `e2e_p99_seconds`"):
        contract_of("tiny", of_kind("transcribe", e2e_p99_seconds=3, ttft_p99_seconds=1), 0.9)
    with pytest.raises(FleetError, match="set `e2e_p99_seconds`"):
        contract_of("tiny", of_kind("transcribe"), 0.9)
