"""Secrets in values that commands print as JSON."""

from gpufleet.redact import hide_in_value


def test_no_text_of_a_value_has_a_secret_at_any_depth() -> None:
    value = {
        "evidence": [{"text": "vllm serve m --api-key s3cret-word", "at": 5}],
        "do": ("curl -H 'Authorization: Bearer hf_" + "a" * 34 + "'",),
        "none": None,
        "serves": True,
    }

    shown = hide_in_value(value, ["s3cret-word"])

    assert shown == {
        "evidence": [{"text": "vllm serve m --api-key (not shown)", "at": 5}],
        "do": ["curl -H '(not shown)'"],
        "none": None,
        "serves": True,
    }
