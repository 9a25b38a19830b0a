"""What is shown of a place or of a message: everything but what would let somebody in."""

import pytest

from ckptstore.core.text import redact, secrets_of

SECRET = "SEKRIT+xyz"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"s3://KEY:{SECRET}@bucket/x", "s3://***@bucket/x"),
        (f"s3://KEY:SE/{SECRET}@bucket/x", "s3://***@bucket/x"),
        (f"s3://KEY:SE/{SECRET}/@/@bucket", "s3://***@bucket"),
        (
            f"s3://bucket/x?aws_secret_access_key={SECRET}",
            "s3://bucket/x?aws_secret_access_key=***",
        ),
        (
            f"s3://bucket/x?client=obstore&aws_secret_access_key={SECRET}&b=1",
            "s3://bucket/x?client=obstore&aws_secret_access_key=***&b=1",
        ),
        (f"az://c/x?sv=1&sig={SECRET}", "az://c/x?sv=1&sig=***"),
        (f"https://h/x?X-Amz-Signature={SECRET}", "https://h/x?X-Amz-Signature=***"),
        (f"postgresql://h/x?sslpassword={SECRET}", "postgresql://h/x?sslpassword=***"),
        (f"admin:{SECRET}@host/db", "***@host/db"),
        (f"admin:a/{SECRET}@host/db", "***@host/db"),
        (f"index='admin:{SECRET}@host/db' is no URL", "index='***@host/db' is no URL"),
        (f"host=h password={SECRET} dbname=x", "host=h password=*** dbname=x"),
        (f"password='{SECRET}'", "password='***'"),
        (f"password = '{SECRET} and {SECRET}' x", "password = '***' x"),
        (f"aws_secret_access_key: {SECRET}", "aws_secret_access_key: ***"),
        (f'{{"aws_secret_access_key": "{SECRET}"}}', '{"aws_secret_access_key": "***"}'),
        (f"{{'secret': '{SECRET}', 'anon': False}}", "{'secret': '***', 'anon': False}"),
    ],
)
def test_a_secret_is_not_shown(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/runs/a@b",
        "s3://bucket/x?client=obstore",
        "postgresql://host:5432/db",
        "/data/runs:1/a@b",
        "commit 91bc: main@3 is not in main@latest",
        "keys: a, b",
        "no key 'b' in it",
        "/home/a/tokens=3/x",
        "monkey=3",
        "s3://[::1]:9000/x",
    ],
)
def test_what_is_no_secret_is_shown(text: str) -> None:
    assert redact(text) == text


def test_options_named_like_secrets_are_secret() -> None:
    options = {
        "key": "not-short",
        "secret": "abcdefgh",
        "client_kwargs": {"aws_session_token": "tokentoken"},
        "sas_token": "sassas1",
        "sig": "sigsig1",
    }
    assert secrets_of({**options, "endpoint_url": "http://h"}) == {
        "not-short",
        "abcdefgh",
        "tokentoken",
        "sassas1",
        "sigsig1",
    }
