"""How do URLs and messages lose their credentials before people see them?"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"

_SECRET_NAME = re.compile(
    r"key|secret|token|passw|pwd|credential|sas|signature$|^sig$", re.IGNORECASE
)
_USER_INFO = re.compile(
    r"(?<=://)(?:[^/@:\s]*:\S*|[^/\s]*)@|(?<![^\s'\"=(])[^/@:\s'\"=(]+:(?!//)[^\s'\"]*@"
)
"""An unquoted password may contain any character, `/` and `@` too: it runs from the colon to the
last `@`. Without a scheme in front (`USER:PASSWORD@HOST/DATABASE`), it ends at a quote."""

_SECRET_OPTION = re.compile(
    r"([?&](?:[^=&\s]*(?:key|secret|token|passw|pwd|credential|signature)[^=&\s]*|sig|sas)=)[^&\s'\"]*",
    re.IGNORECASE,
)
_PLAIN_NAME = (
    r"\w*(?:secret|passw(?:or)?d|pwd|credential)\w*"
    r"|\w*(?:access|account|api|session)_?(?:key|token)\w*"
)
_ASSIGNED = re.compile(
    rf"""(?<![\w/.-])((?:(?:{_PLAIN_NAME})\s*=\s*|(['"])(?:{_PLAIN_NAME})\2\s*:\s*|(?=\w*_)(?:{_PLAIN_NAME}):\s*)(['"]?))"""
    r"""((?<=')[^']*|(?<=")[^"]*|(?<!['"])[^\s'",;)}\]&]+)""",
    re.IGNORECASE,
)
"""As connection strings, JSON and Python write it: `password=…`, `"secret": "…"`,
`aws_secret_access_key: …`."""

_SHORTEST = 6
"""Shorter values are ordinary words (`test`), not secrets."""


def redact(text: str) -> str:
    """`text` with the user part of every URL, and every value named like a secret, replaced by
    `***`."""
    return _ASSIGNED.sub(
        rf"\1{MASK}", _SECRET_OPTION.sub(rf"\1{MASK}", _USER_INFO.sub(f"{MASK}@", text))
    )


def without(text: str, secrets: frozenset[str]) -> str:
    """`redact(text)` with every occurrence of `secrets` replaced, too."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return redact(text)


def secrets_of(options: Mapping[str, Any]) -> frozenset[str]:
    """The values in `options`, at any depth, whose names mark them as secret."""
    return frozenset(value for value in _secrets(options) if len(value) >= _SHORTEST)


def _secrets(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secrets(value)
        elif isinstance(value, str) and _SECRET_NAME.search(str(name)):
            yield value
