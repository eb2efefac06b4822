"""Tests of the TLS versions and certificates that all listeners accept."""

from __future__ import annotations

import datetime as dt
import socket
import ssl
import threading
import warnings
from collections.abc import Iterator

import pytest

from tests.certificates import CertAndKey, Certificates
from tests.contract.harness import PATIENCE
from turnlane.config import Config
from turnlane.service import Service

LISTENERS = ("flight", "http", "syslog", "otlp_grpc")
PAST = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
Place = tuple[str, int]


def build_client_context(
    certificates: Certificates, identity: CertAndKey, version: ssl.TLSVersion
) -> ssl.SSLContext:
    """A client that speaks this version and no other.

    Up to 1.2 a handshake ends well only once the server has judged the certificate.
    """
    context = certificates.client_context(identity)
    _allow_only(context, version)
    context.set_alpn_protocols(["h2"])  # gRPC accepts no other client
    return context


def _allow_only(context: ssl.SSLContext, version: ssl.TLSVersion) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the test needs the old version
        context.minimum_version = context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")  # old versions use weak signatures


@pytest.fixture(scope="module")
def listeners(
    certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Place]]:
    """The addresses of all listeners, each with mutual TLS."""
    tls = certificates.server_knob(mutual=True)
    anywhere = "127.0.0.1:0"
    config = Config.model_validate(
        {
            "node": {
                "data": str(tmp_path_factory.mktemp("node")),
                "tls": tls,
                "flight": {"listen": anywhere},
                "http": {"listen": anywhere},
            },
            "queues": {"main": {"kind": "memory"}},
            "inputs": [
                {"type": "syslog", "queue": "main", "tls": {**tls, "listen": anywhere}},
                {"type": "otlp_grpc", "queue": "main", "listen": anywhere, "tls": tls},
            ],
        }
    )
    with Service(config).start() as service:
        found = {name: str(plane.address) for name, plane in service.planes.items()}
        found |= {name: str(each.address) for name, each in service.inputs.items()}
        yield {name: _parse_address(address) for name, address in found.items()}


def _parse_address(address: str) -> Place:
    host, _, port = address.rpartition("/")[2].rpartition(":")
    return host, int(port)


def negotiate(place: Place, context: ssl.SSLContext) -> str | None:
    """Return the negotiated version. Raises if the server refuses."""
    with (
        socket.create_connection(place, PATIENCE) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        return secured.version()


@pytest.mark.parametrize("listener", LISTENERS)
def test_listeners_speak_tls(
    certificates: Certificates, listeners: dict[str, Place], listener: str
) -> None:
    context = build_client_context(certificates, certificates.client, ssl.TLSVersion.TLSv1_2)
    assert negotiate(listeners[listener], context) == "TLSv1.2"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
@pytest.mark.parametrize("listener", LISTENERS)
def test_old_tls_is_refused(
    certificates: Certificates, listeners: dict[str, Place], listener: str, version: ssl.TLSVersion
) -> None:
    with pytest.raises((ssl.SSLError, ConnectionError)):
        negotiate(
            listeners[listener], build_client_context(certificates, certificates.client, version)
        )


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_refused_client_can_speak_old_tls(
    certificates: Certificates, version: ssl.TLSVersion
) -> None:
    """A server that allows old TLS accepts it, so the refusal was not the client's."""
    context = certificates.server_context()
    _allow_only(context, version)

    def serve() -> None:
        accepted, _ = listening.accept()
        with accepted, context.wrap_socket(accepted, server_side=True) as secured:
            secured.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=serve)
        server.start()
        spoken = negotiate(
            listening.getsockname(),
            build_client_context(certificates, certificates.client, version),
        )
        server.join(PATIENCE)
    assert spoken == version.name.replace("_", ".")


@pytest.mark.parametrize("listener", LISTENERS)
def test_expired_client_certificate_is_refused(
    certificates: Certificates, listeners: dict[str, Place], listener: str
) -> None:
    expired = certificates.issue("expired", not_before=PAST, not_after=PAST)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        negotiate(
            listeners[listener], build_client_context(certificates, expired, ssl.TLSVersion.TLSv1_2)
        )
