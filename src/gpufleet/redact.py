"""Redact keys and tokens in command lines and variables.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Words of a name that say what its value is. Not TOKENIZER, not ..._TOKENS; SGLang has flags named
# speculative-token-map and forward-pass-metrics-ipc-name.
_WORDS = re.compile(
    r"(?:^|[_.-])(?:KEYS?|(?<!FORWARD_)PASS|PWD|PAT|CREDENTIALS?|AUTH|AUTHORIZATION|BEARER|COOKIE)(?:[_.-]|$)"
    r"|(?:API_?KEYS?|TOKEN|SECRETS?|PASSWORD|PASSWD|PASSPHRASE)(?:[_.-]|$)"
    r"|PRIVATE_?KEY",
    re.IGNORECASE,
)
_HUMPS = re.compile(r"(?<=[a-z])(?=[A-Z])")
_NOT = re.compile(
    r"(?:FILE|PATH|DIR|THRESHOLD|TOKEN_MAP|IDS?(?<!KEY_ID)"
    r"|(?:BOS|EOS|PAD|UNK|SEP|CLS|MASK|IMAGE|AUDIO|VIDEO)_TOKEN)$",
    re.IGNORECASE,
)
# Forms that only secrets have: Hugging Face, OpenAI and LiteLLM, GitHub, GitLab, Slack, Google,
# NVIDIA, AWS, JSON web tokens, private keys; what stands in URLs and in headers.
_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{8,}|\bgh[pousr]_[A-Za-z0-9]{20,}"
    r"|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bxox[a-z]-[\w-]{10,}|\bAIza[\w-]{30,}"
    r"|\bnvapi-[\w-]{8,}|\bAKIA[A-Z0-9]{16}|\beyJ[\w-]{10,}\.[\w.-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
    r"|[?&](?:api[_-]?key|(?:\w+_)?token|key|password|secret|sig(?:nature)?)=[^&\s'\"]+"
    r"|\bauthorization[\"']?\s*[=:]\s*[\"']?(?:(?:bearer|basic|token)(?:\s+|%20))?[^\s'\",]+"
    r"|\bbearer\s+[\w.~+/=-]{8,}",
    re.IGNORECASE,
)
# Values of any form after the name of a key: `'admin_api_key': 'K'` or `api_key='K'` in SGLang's
# log line `server_args=`, `"api_key": "K"` of its /server_info, the same as text in JSON, and
# `unrecognized arguments: --api_key K`. The line may end within the value.
_NAMED = re.compile(
    r"((?:api[_-]?key|keyfile[_-]password)\\{0,8}[\"']?\s{0,4}[=:]\s{0,4})"
    r"(?:'(?:[^'\\\n]|\\.)*'?|\"(?:[^\"\\\n]|\\.)*\"?|\\{1,8}[\"'][^\"'\\\n]*\\{0,8}[\"']?)"
    r"|(--(?:admin[_-])?api[_-]key[ =])(?!\(not shown\))[^\s\"'-][^\s\"']{7,}",
    re.IGNORECASE,
)

HIDDEN = "(not shown)"


def is_secret_name(name: str) -> bool:
    """
    Return whether the name of a variable, a flag or a key marks its value as a secret.

    >>> is_secret_name("HF_TOKEN")
    True
    >>> is_secret_name("TOKENIZERS_PARALLELISM"), is_secret_name("API_KEY_FILE")
    (False, False)
    >>> is_secret_name("--api-key"), is_secret_name("secretKey"), is_secret_name("max-tokens")
    (True, True, False)
    """
    plain = _HUMPS.sub("_", name.lstrip("-")).replace("-", "_")
    return bool(_WORDS.search(plain)) and not _NOT.search(plain)


def is_secret(value: str) -> bool:
    """Return whether a value has the form of a known kind of key."""
    return bool(_VALUE.search(value))


def find_secrets(value: Any) -> Iterator[str]:
    """Yield the secrets in a JSON value: the texts whose key is a secret name, at any depth."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            if isinstance(below, str) and below and is_secret_name(str(name)):
                yield below
            else:
                yield from find_secrets(below)
    elif isinstance(value, list):
        for below in value:
            yield from find_secrets(below)


def hide_secrets(text: str, secrets: Iterable[str]) -> str:
    """
    Return the text with all secrets replaced by `HIDDEN`.

    These are the given secrets, other texts that look like secrets, and the values of API keys.

    Given secrets of up to three characters are not replaced, because sentences may need such words.
    """
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) > 3:  # a shorter one is a word that sentences may need
            text = text.replace(secret, HIDDEN)
    return _VALUE.sub(HIDDEN, _NAMED.sub(lambda found: f"{found[1] or found[2]}{HIDDEN}", text))


def hide_in_value(value: Any, secrets: Iterable[str]) -> Any:
    """
    Apply `hide_secrets` to all texts of a JSON value, at any depth.

    >>> hide_in_value({"line": ["--api-key sk-1", 5]}, ["sk-1"])
    {'line': ['--api-key (not shown)', 5]}
    """
    hidden = tuple(secrets)
    if isinstance(value, str):
        return hide_secrets(value, hidden)
    if isinstance(value, Mapping):
        return {name: hide_in_value(below, hidden) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [hide_in_value(below, hidden) for below in value]
    return value
