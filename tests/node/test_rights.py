"""Tests of tokens and their rights."""

from __future__ import annotations

import hmac
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from turnlane.errors import (
    ConfigError,
    NotAllowed,
)
from turnlane.serving.auth import Authority, Right, TokenSettings, parse_bearer
from turnlane.validation import convert_validation_error


def build_token(**fields: Any) -> TokenSettings:
    return TokenSettings.model_validate(
        {"name": "t", "secret": "s3cret", "rights": {"web-*": ["publish"]}} | fields
    )


def test_token_gives_only_its_rights_on_its_queues() -> None:
    authority = Authority(
        [build_token(), build_token(name="other", secret="o", rights={"*": ["admin"]})]
    )
    authority.check("s3cret", Right.PUBLISH, "web-1")
    for right, queue in ((Right.READ, "web-1"), (Right.PUBLISH, "db"), (Right.PUBLISH, None)):
        with pytest.raises(NotAllowed, match="does not give the right") as refused:
            authority.check("s3cret", right, queue)
        assert refused.value.known
    authority.check("o", Right.ADMIN, None)
    assert not authority.allows("o", Right.READ, "web-1")


@pytest.mark.parametrize("bearer", [None, "", "wrong", "s3cre", "s3cret ", "\udcff"])
def test_missing_and_wrong_token_are_unknown(bearer: str | None) -> None:
    with pytest.raises(NotAllowed) as refused:
        Authority([build_token()]).check(bearer, Right.PUBLISH, "web-1")
    assert not refused.value.known


def test_token_is_compared_with_all_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def count_comparisons(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", count_comparisons)
    authority = Authority([build_token(name=name, secret=name) for name in "abc"])
    for bearer in ("a", "c", "wrong", "a" * 1000):
        compared.clear()
        authority.allows(bearer, Right.PUBLISH, "web-1")
        assert len(compared) == 3
        assert {len(side) for pair in compared for side in pair} == {32}  # without a length


def test_token_is_refused_after_it_expires() -> None:
    now = [0.0]
    expires = datetime(2030, 1, 1, tzinfo=UTC)
    authority = Authority([build_token(expires=expires)], now=lambda: now[0])
    now[0] = expires.timestamp() - 1
    authority.check("s3cret", Right.PUBLISH, "web-1")
    now[0] = expires.timestamp()
    with pytest.raises(NotAllowed, match="token t has expired"):
        authority.check("s3cret", Right.PUBLISH, "web-1")
    with pytest.raises(ValidationError, match="timezone"):
        build_token(expires=datetime(2030, 1, 1))  # noqa: DTZ001 - that is what is refused


def test_authority_without_tokens_allows_everything() -> None:
    authority = Authority()
    assert not authority.has_tokens
    authority.check(None, Right.ADMIN, None)
    assert authority.identify(None) is None


def test_secret_is_read_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_text("from-file\n")
    monkeypatch.setenv("TOKEN_X", "from-env")
    authority = Authority(
        [
            build_token(name="file", secret=None, secret_file=file),
            build_token(name="env", secret=None, secret_env="TOKEN_X"),
        ]
    )
    assert authority.identify("from-file") == "file"
    assert authority.identify("from-env") == "env"


def test_missing_secret_is_a_config_error(tmp_path: Path) -> None:
    for place in ({"secret_file": tmp_path / "none"}, {"secret_env": "NOT_SET_AT_ALL"}):
        with pytest.raises(ConfigError, match=r"tokens.t: .*(none|NOT_SET_AT_ALL)"):
            Authority([build_token(secret=None, **place)])
    with pytest.raises(ConfigError, match="same secret"):
        Authority([build_token(), build_token(name="again")])
    for fields in ({"secret": None}, {"secret_env": "X"}):
        with pytest.raises(ValidationError) as wrong:
            build_token(**fields)
        assert "exactly one of" in str(convert_validation_error(wrong.value))


def test_secret_is_never_shown() -> None:
    authority = Authority([build_token()])
    shown = repr(build_token()) + str(build_token()) + repr(authority) + repr(vars(authority))
    assert "s3cret" not in shown + build_token().model_dump_json()


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("Basic abc", None),
        ("Bearer", None),
        ("Bearer ", None),
        (None, None),
    ],
)
def test_token_is_parsed_from_the_header(header: str | None, found: str | None) -> None:
    assert parse_bearer(header) == found
