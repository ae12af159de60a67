"""A document: read back as it was written, refused in words, and without secrets."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from gpufleet.errors import FleetError
from gpufleet.fleet.measured_rates import ModelRate
from gpufleet.redact import HIDDEN
from gpufleet.report import fleet_parts
from gpufleet.report.fleet_document import Document, clean_document, form_text, read_form
from gpufleet.report.fleet_manifest import manifest_of
from gpufleet.report.fleet_page import fleet_page
from tests.support.hostile import SAID_BY_LIBRARIES, TEXTS, WRONG, as_bytes, changed
from tests.unit.report.sample_fleet import REVISION, document, settings, upgrade
from tests.unit.report.test_fleet_page import with_texts
from tools import report_schemas

CANARY = "canary7391"
TOKEN = "hf_abcdefghijklmnopqrstuvwx"


def refused(text: str) -> tuple[str, ...]:
    with pytest.raises(FleetError) as error:
        read_form(Document, text, "a.json", "gpufleet report --json")
    return error.value.problems


def test_what_was_written_is_read_back_and_gives_the_same_page() -> None:
    before = document()
    after = read_form(Document, form_text(before), "a.json", "")
    assert after == before
    assert fleet_page(after) == fleet_page(before)
    assert form_text(after) == form_text(before)


def test_the_schemas_are_those_of_the_forms_and_take_what_is_written() -> None:
    """Otherwise: `python -m tools.report_schemas`."""
    written = {"report": document(), "report-manifest": manifest_of(document())}
    for file, (kind, title) in report_schemas.SCHEMAS.items():
        assert file.read_text() == report_schemas.schema(kind, title)
        of = written[file.name.removesuffix(".schema.json")]
        jsonschema.validate(json.loads(form_text(of)), json.loads(file.read_text()))


def test_the_schema_takes_no_document_with_another_key_or_another_kind_of_value() -> None:
    (file, *_) = report_schemas.SCHEMAS
    schema = json.loads(file.read_text())
    plain = json.loads(form_text(document()))
    for wrong in ({**plain, "more": 1}, {**plain, "nodes": {}}, {**plain, "schema": 2}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.mark.parametrize("name", [name for name in TEXTS if name not in {"Latin-1", "UTF-16"}])
def test_what_is_no_document_is_refused_with_the_file_and_what_to_give(name: str) -> None:
    for problem in refused(TEXTS[name].decode("utf-8", "replace")):
        assert problem.startswith("a.json: ")
        assert "gpufleet report --json" in problem
        assert not [words for words in SAID_BY_LIBRARIES if words in problem]


def test_a_value_of_another_kind_anywhere_is_refused_or_read_and_never_a_traceback() -> None:
    plain = json.loads(form_text(document()))
    read = 0
    for _, put in changed(plain, 3):
        for wrong in WRONG:
            try:
                found = read_form(Document, as_bytes(put(wrong)).decode(), "a.json", "")
            except FleetError:
                continue
            read += 1
            fleet_page(found)
            manifest_of(found)
    assert read, "some places may be empty"


def test_a_key_that_is_not_there_is_named() -> None:
    plain = json.loads(form_text(document()))
    del plain["checkout"]
    assert "checkout: is missing" in refused(json.dumps(plain))[0]


@pytest.mark.parametrize("secret", [CANARY, TOKEN])
def test_no_text_of_it_has_a_secret_also_not_between_control_characters(secret: str) -> None:
    plain = json.loads(form_text(document()))
    for word in (f" {secret} ", f" Bearer\x1b[0m {secret}"):
        told = Document.model_validate_json(json.dumps(with_texts(plain, word)))
        hidden = clean_document(told, [CANARY])
        for text in (form_text(hidden), fleet_page(hidden), form_text(manifest_of(hidden))):
            assert secret not in text
            assert HIDDEN in text
            assert "\x1b" not in text
            assert "\\u001b" not in text


def test_a_secret_that_is_a_word_of_the_form_changes_no_such_word() -> None:
    hidden = clean_document(document(), ["measured", "outage", "FAIL"])
    assert read_form(Document, form_text(hidden), "a.json", "") == hidden


def test_lone_surrogates_of_nodes_are_written_as_escapes() -> None:
    told: Any = document(unknown=("a\ud800b",))
    assert "a\\\\ud800b" in form_text(clean_document(told, []))


def test_the_last_ten_upgrades_are_shown_and_the_newest_first() -> None:
    one = upgrade()
    every = [
        replace(one, id=f"u-{number:02}", started=one.started + number) for number in range(12)
    ]
    random.Random(5).shuffle(every)

    shown = [each.id for each in fleet_parts.upgrades(every)]

    assert shown == [f"u-{number:02}" for number in range(11, 1, -1)]


def test_a_model_without_a_measured_rate_has_the_reason_beside_its_capacity() -> None:
    model = document().models[0]
    reason = f"{model.name} was measured with other flags"
    rates = [ModelRate(model.name, (0,), reason, None)]
    (capacity,) = fleet_parts.capacities([model], None, rates)
    assert (capacity.source, capacity.why) == ("not known", reason)


def test_a_models_adapters_are_in_the_document_and_its_manifest() -> None:
    commit, digest = "a" * 40, "b" * 64
    adapters = {
        "sql": {"source": "org/sql", "revision": commit},
        "chat": {"source": "/srv/chat", "sha256": digest},
        "raw": {"source": "/srv/raw"},
    }
    served = {"qwen": {"model": "Qwen/Qwen3-32B", "revision": REVISION, "adapters": adapters}}
    [found] = fleet_parts.models({"gpu-1": settings(serving=served)}, {}, {})
    assert found.adapters == (
        f"chat: /srv/chat at {digest}",
        "raw: /srv/raw, without a revision or hash",
        f"sql: org/sql at {commit}",
    )
    whole = document(models=(found,))
    assert manifest_of(whole).models[0].adapters == found.adapters
    assert "sql: org/sql at" in fleet_page(whole)
