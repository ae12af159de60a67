"""What a dump shows of a process: no secret of its command line."""

from __future__ import annotations

from gpufleet.on_node.watchdog.dump import without_secrets
from tests.support.rows import each_row


@each_row(
    ("word", "shown"),
    [
        ('{"token":"abc"}', '{"token":"<hidden>"}'),
        ('{"a": {"api_key": "abc", "b": 1}}', '{"a": {"api_key": "<hidden>", "b": 1}}'),
        ('{"password": 123456}', '{"password": "<hidden>"}'),
        ('{"api_keys": ["abc", "def"], "n": 1}', '{"api_keys": "<hidden>", "n": 1}'),
        ('{"secret": "a\\"bc"}', '{"secret": "<hidden>"}'),
        ("{'token': 'abc'}", "{'token': \"<hidden>\"}"),
        ('--kv-transfer-config={"token":"abc"}', '--kv-transfer-config={"token":"<hidden>"}'),
        ('{"num_speculative_tokens": 3}', '{"num_speculative_tokens": 3}'),
        ('{"method": "ngram"}', '{"method": "ngram"}'),
    ],
)
def test_a_secret_in_a_json_argument_is_hidden(word: str, shown: str) -> None:
    assert without_secrets(["vllm", word, "--port", "1"]) == "vllm " + shown + " --port 1"


def test_a_secret_in_a_text_in_json_is_hidden() -> None:
    assert "abc" not in without_secrets(['{"extra": "{\\"token\\": \\"abc\\"}"}'])


def test_flags_and_pairs_are_hidden_as_well() -> None:
    words = ["vllm", "--api-key", "abc", "--hf-token=def", "TOKEN:ghi"]
    assert without_secrets(words) == "vllm --api-key <hidden> --hf-token=<hidden> TOKEN:<hidden>"
