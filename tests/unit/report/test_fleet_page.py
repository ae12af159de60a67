"""A fleet as a page: structure for readers and screen readers, the same bytes, no markup of nodes.

Pages are parsed, and compared by their elements and texts, never by their bytes.
"""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufleet.report.fleet_document import Checkout, Document, Drift, Node, Plan
from gpufleet.report.fleet_page import fleet_page
from gpufleet.sanitize import PAGE_STYLE, printable
from tests.unit.report.sample_fleet import NOW, SILENT, document

VOID = {"meta", "line", "rect", "link", "br"}
SECTIONS = [
    "Summary", "Nodes", "Plan", "Capacity", "Versions", "Findings", "Drift", "Last upgrades",
    "Certificates", "What is not known",
]  # fmt: skip
FIXED = {"severity", "status", "schema", "when", "measured", "started", "ended", "ends"}
"""Keys whose values are words of a set, numbers and times."""


class Parsed(HTMLParser):
    """The elements of a page in their order, each with its attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[int] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for each in self._open:
            self.elements[each][2].append(data)

    def texts(self, tag: str) -> list[str]:
        return ["".join(text) for name, _, text in self.elements if name == tag]

    def tags(self) -> list[str]:
        return [name for name, _, _ in self.elements]


def parsed(**changed: Any) -> Parsed:
    return Parsed(fleet_page(document(**changed)))


def test_the_same_document_gives_the_same_bytes_and_another_one_others() -> None:
    assert fleet_page(document()) == fleet_page(document())
    assert fleet_page(document()) != fleet_page(document(version="0.2.1"))


def test_the_sections_stand_in_their_order_and_the_list_leads_to_each() -> None:
    page = parsed()
    assert page.texts("h2") == SECTIONS
    ids = [attrs["id"] for tag, attrs, _ in page.elements if tag == "h2"]
    links = [attrs["href"] for tag, attrs, _ in page.elements if tag == "a"]
    assert links == [f"#{each}" for each in ids]


def test_it_has_landmarks_and_no_heading_skips_a_level() -> None:
    tags = parsed().tags()
    for landmark in ("header", "nav", "main", "footer"):
        assert tags.count(landmark) == 1
    levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_each_header_of_a_table_says_what_it_heads_and_has_words() -> None:
    heads = [(attrs, "".join(text)) for tag, attrs, text in parsed().elements if tag == "th"]
    assert {attrs["scope"] for attrs, _ in heads} == {"row", "col"}
    assert all(text.strip() for _, text in heads)


def test_each_node_with_gpus_has_a_picture_with_its_words() -> None:
    page = parsed()
    pictures = [attrs for tag, attrs, _ in page.elements if tag == "svg"]
    assert [each["role"] for each in pictures] == ["img"] * 3
    titles = page.texts("title")[1:]
    assert [each.partition(":")[0] for each in titles] == ["gpu-01", "gpu-02", "gpu-03"]
    assert "GPUs 0-1: q-0" in titles[0]
    assert "NVLink connects GPUs 0-7 (NV18)" in titles[0]


def test_what_is_not_known_is_said_where_it_would_stand_and_at_the_end() -> None:
    articles = parsed().texts("article")
    (silent,) = [each for each in articles if each.startswith(SILENT)]
    assert "UNKNOWN: silent: no answer within 20 s" in silent
    last = parsed().texts("section")[-1]
    assert f"{SILENT}: no answer within 20 s" in last


def test_replicas_that_are_not_ready_have_a_table_where_there_are_any() -> None:
    heading = "Replicas that are not ready"
    assert heading in parsed().texts("h3")
    assert heading not in parsed(replicas=()).texts("h3")


def test_a_status_is_a_word_and_not_a_colour_alone() -> None:
    for tag, attrs, text in parsed().elements:
        if tag == "strong" and attrs.get("class"):
            assert "".join(text).strip()


def test_a_measured_rate_has_its_age_and_what_was_never_measured_is_not_known() -> None:
    (capacity,) = [each for each in parsed().texts("section") if each.startswith("Capacity")]
    assert "12.5 requests/s each" in capacity
    assert "measured on 2026-11-18, 10 days old" in capacity
    assert "UNKNOWN" in capacity


def test_without_git_nodes_or_a_plan_it_is_a_page_that_says_so() -> None:
    empty = Document(
        inventory="i.py", when=NOW, version="0.2.0", checkout=Checkout(problem="no repository"),
        nodes=(), plan=Plan(unknown=("no node answers",)), drift=Drift(whole=False),
    )  # fmt: skip
    text = "".join(Parsed(fleet_page(empty)).texts("body"))
    for words in ("not in git (no repository", "no node answers", "no model is declared",
                  "gpufleet report --drift"):  # fmt: skip
        assert words in text


def test_a_plan_that_is_refused_is_known_and_has_every_reason() -> None:
    (plan,) = [
        each
        for each in parsed(plan=Plan(refused=("q: does not fit", "r: too"))).texts("section")
        if each.startswith("Plan")
    ]
    assert "NO PLAN" in plan
    assert "UNKNOWN" not in plan
    assert "q: does not fit" in plan
    assert "r: too" in plan


def test_nothing_is_loaded_and_nothing_runs() -> None:
    page = parsed()
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags())
    policy = [attrs.get("content") for tag, attrs, _ in page.elements if tag == "meta"]
    assert "default-src 'none'; style-src 'unsafe-inline'" in policy
    assert "url(" not in page.texts("style")[0]
    for _, attrs, _ in page.elements:
        assert not {"src", "onload", "onclick", "style"} & attrs.keys()


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title></svg></style><b>",
    "]]>&amp;<!-- -->",
    "\x1b[2J\x00\u202e",
    "line\nline",
)


def with_texts(value: Any, word: str) -> Any:
    """Return a document's JSON in which each text of nodes and operators has a word added."""
    if isinstance(value, str):
        return value + word if value else value  # an empty one is a state
    if isinstance(value, list):
        return [with_texts(each, word) for each in value]
    if isinstance(value, dict):
        return {
            key: each
            if key in FIXED or (key == "source" and each in {"measured", "estimate", "not known"})
            else with_texts(each, word)
            for key, each in value.items()
        }
    return value


def check_no_markup(word: str) -> None:
    before = parsed()
    texts = json.loads(document().model_dump_json(by_alias=True))
    changed = Document.model_validate_json(json.dumps(with_texts(texts, word)))
    page = Parsed(fleet_page(changed))
    # Versions of nodes, and with them rows, are grouped by words: all have the same one.
    assert page.tags() == before.tags()
    names = [{*attrs} for _, attrs, _ in page.elements]
    assert names == [{*attrs} for _, attrs, _ in before.elements]
    shown = "\n".join(printable(each) for each in word.splitlines())
    assert shown in "".join(page.texts("h1"))


@pytest.mark.parametrize("word", HOSTILE)
def test_what_nodes_and_operators_wrote_is_never_markup(word: str) -> None:
    check_no_markup(word)


@settings(max_examples=25, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20).map("x{}x".format))
def test_no_text_at_all_is_markup(word: str) -> None:
    check_no_markup(word)


def test_nodes_in_another_order_are_shown_as_the_document_has_them() -> None:
    nodes = tuple(Node(name=name, silent="off") for name in ("b", "a"))
    assert [each[0] for each in parsed(nodes=nodes).texts("article")] == ["b", "a"]


# -- colours


def luminance(colour: str) -> float:
    """WCAG 2.2's relative luminance."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_each_colour_of_words_has_enough_contrast_on_each_ground_in_each_mode() -> None:
    blocks = re.findall(r":root \{([^}]*)\}", PAGE_STYLE)
    assert len(blocks) == 3, "light, dark, print"
    for block in blocks:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))
        every = ("ink", "pale", "ok", "warn", "unknown", "fail", "link")
        pairs = [("ground", words) for words in every] + [("shade", "ink"), ("shade", "pale")]
        for pair in pairs:
            dark, light = sorted(luminance(colours[each]) for each in pair)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, pair
