"""Tests of addresses: parsing, and where a listener may listen."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from turnlane.errors import (
    AddressTaken,
    ConfigError,
)
from turnlane.serving.address import Address, check_exposure


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:8088", "127.0.0.1", 8088, True),
        (":8088", "127.0.0.1", 8088, True),
        ("localhost:1", "localhost", 1, True),
        ("[::1]:514", "::1", 514, True),
        ("127.9.9.9:0", "127.9.9.9", 0, True),
        ("0.0.0.0:80", "0.0.0.0", 80, False),
        ("*:80", "0.0.0.0", 80, False),
        ("[::]:80", "::", 80, False),
        ("10.0.0.1:80", "10.0.0.1", 80, False),
        ("logs.example:80", "logs.example", 80, False),
    ],
)
def test_valid_address_is_parsed_and_loopback_is_recognized(
    text: str, host: str, port: int, loopback: bool
) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, address.is_loopback) == (host, port, loopback)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "wrong", ["", "8088", 8088, "host", "host:", "host:99999", "::1:80", "a b:1"]
)
def test_invalid_address_is_refused_with_an_example(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"such as 127\.0\.0\.1:8088"):
        Address.parse(wrong)


def test_address_in_a_model_is_serialized_as_text() -> None:
    class Model(BaseModel):
        listen: Address

    model = Model.model_validate({"listen": ":80"})
    assert model.model_dump(mode="json") == {"listen": "127.0.0.1:80"}
    assert Model.model_json_schema()["properties"]["listen"]["type"] == "string"
    with pytest.raises(ValidationError, match="is not an address"):
        Model.model_validate({"listen": "x"})


def test_public_address_without_tls_or_tokens_is_refused() -> None:
    public = Address.parse("0.0.0.0:80")
    for tls, tokens, missing in ((False, False, "tls and tokens"), (True, False, "tokens")):
        with pytest.raises(ConfigError, match=f"needs {missing}: "):
            check_exposure(public, tls=tls, tokens=tokens, insecure=False)
    check_exposure(public, tls=True, tokens=True, insecure=False)
    check_exposure(public, tls=False, tokens=False, insecure=True)
    check_exposure(Address.parse(":80"), tls=False, tokens=False, insecure=False)


def test_taken_port_and_unknown_host_raise_different_errors() -> None:
    with Address.parse(":0").listen() as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressTaken, match=rf"listen: cannot listen on 127.0.0.1:{port}"):
            Address.parse(f":{port}").listen()
    with pytest.raises(ConfigError, match="no such host"):
        Address.parse("no-such-host.invalid:0").listen()
