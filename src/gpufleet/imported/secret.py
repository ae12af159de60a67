"""What must not be printed: keys and tokens in command lines and variables.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Words of a variable's name that say what its value is. Not TOKENIZER, not ..._TOKENS.
_NAME = re.compile(
    r"(?:^|_)(?:API_?KEYS?|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)(?:_|$)",
    re.IGNORECASE,
)
_NOT = re.compile(r"(?:FILE|PATH|DIR)$", re.IGNORECASE)
# Forms that only secrets have: Hugging Face, OpenAI and LiteLLM, GitHub, Weights & Biases, AWS.
_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{8,}|\bgh[pousr]_[A-Za-z0-9]{20,}"
    r"|\bAKIA[A-Z0-9]{16}|://[^/\s:@]+:[^/\s@]+@"
)

HIDDEN = "(not shown)"


def names_one(variable: str) -> bool:
    """
    Say whether a variable's name says that its value is a secret.

    >>> names_one("HF_TOKEN"), names_one("TOKENIZERS_PARALLELISM"), names_one("API_KEY_FILE")
    (True, False, False)
    """
    return bool(_NAME.search(variable)) and not _NOT.search(variable)


def is_one(value: str) -> bool:
    """Say whether a value has the form of a known kind of key."""
    return bool(_VALUE.search(value))


def hide(text: str, secrets: Iterable[str]) -> str:
    """Return the text without these secrets and without whatever looks like one."""
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) > 3:  # a shorter one is a word that sentences may need
            text = text.replace(secret, HIDDEN)
    return _VALUE.sub(HIDDEN, text)
