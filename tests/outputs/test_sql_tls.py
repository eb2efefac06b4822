"""The SQL output with TLS: it requires TLS if the settings ask for it, and checks the server."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.certificates import Certificates
from tests.databases import mariadb_server
from tests.outputs.blocks import make_block, make_values
from tests.outputs.event_databases import EventDatabase
from turnlane.errors import RetryLater


def get_client_files(certificates: Certificates) -> dict[str, Path]:
    knob = certificates.client_knob()
    knob["key"].chmod(0o600)  # libpq uses no key that others may read
    return knob


def test_mariadb_accepts_mutual_tls(certificates: Certificates) -> None:
    cert, key = certificates.server
    options = [f"--ssl-ca={certificates.ca}", f"--ssl-cert={cert}", f"--ssl-key={key}"]
    with mariadb_server(*options) as url:
        database = EventDatabase(url)
        database.make_table()
        database.run(
            "CREATE USER shop@localhost REQUIRE X509", "GRANT ALL ON *.* TO shop@localhost"
        )
        there = EventDatabase(url.replace("root@", "shop@"))
        with there.make_output(tls=get_client_files(certificates)) as output:
            output.check()
            output.send(output.prepare(make_block(make_values(0, 3))))
        assert database.read_ids() == [0, 1, 2]
        for tls in ({"ca": certificates.ca}, {}, None):
            with there.make_output(tls=tls) as output, pytest.raises(RetryLater):
                output.check()


class Postgres:
    """Speaks PostgreSQL up to the TLS handshake, and closes the connection after the first data."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"postgresql://shop@127.0.0.1:{self._listener.getsockname()[1]}/shop"
        self.heard: list[tuple[bytes, object]] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._listener.settimeout(60)
        with self._listener.accept()[0] as plain:
            plain.settimeout(60)
            assert plain.recv(8)[4:] == bytes([4, 210, 22, 47]), "the request for TLS"
            plain.sendall(b"S" if self._context else b"N")
            if self._context is None:
                return
            try:
                with self._context.wrap_socket(plain, server_side=True) as secured:
                    self.heard.append((secured.recv(1000), secured.getpeercert()))
            except OSError:
                return  # the client refused the certificate

    def close(self) -> None:
        self._thread.join(60)
        self._listener.close()


@contextmanager
def postgres(context: ssl.SSLContext | None) -> Iterator[Postgres]:
    server = Postgres(context)
    try:
        yield server
    finally:
        server.close()


def test_postgresql_gets_the_client_certificate_and_no_plain_text(
    certificates: Certificates,
) -> None:
    with (
        postgres(certificates.server_context(mutual=True)) as server,
        EventDatabase(server.url).make_output(tls=get_client_files(certificates)) as output,
        pytest.raises(RetryLater),
    ):
        output.check()
    ((words, certificate),) = server.heard
    assert b"user\x00shop" in words
    assert "client" in str(certificate)


@pytest.mark.parametrize("wrong", ["no TLS", "an unknown authority"])
def test_an_untrusted_postgresql_server_gets_no_data(
    certificates: Certificates, wrong: str, tmp_path: Path
) -> None:
    tls = get_client_files(certificates)
    if wrong == "an unknown authority":
        tls["ca"] = Certificates(tmp_path).ca
    context = None if wrong == "no TLS" else certificates.server_context(mutual=True)
    with (
        postgres(context) as server,
        EventDatabase(server.url).make_output(tls=tls) as output,
        pytest.raises(RetryLater, match=r"SSL|certificate"),
    ):
        output.check()
    assert server.heard == []
