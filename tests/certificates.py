"""Certificates as files, by authorities of the tests' own."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import trustme

CertAndKey = tuple[Path, Path]


class Certificates:
    """An authority, certificates of it for a server and a client, and a stranger's, as files."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._authority, strangers = trustme.CA(), trustme.CA()
        self.ca, self.strangers_ca = place / "ca.pem", place / "strangers-ca.pem"
        self._authority.cert_pem.write_to_path(self.ca)
        strangers.cert_pem.write_to_path(self.strangers_ca)
        self.server = self.issue("server")
        self.client = self.issue("client")
        self.stranger = self._written("stranger", strangers)

    def issue(self, name: str, *hosts: str, **knobs: Any) -> CertAndKey:
        """Another one of the authority: for this machine, unless told."""
        return self._written(name, self._authority, *hosts, **knobs)

    def _written(self, name: str, authority: trustme.CA, *hosts: str, **knobs: Any) -> CertAndKey:
        named = hosts or ("127.0.0.1", "localhost")
        issued = authority.issue_cert(*named, common_name=name, **knobs)
        cert, key = self._place / f"{name}.pem", self._place / f"{name}.key"
        for index, part in enumerate(issued.cert_chain_pems):
            part.write_to_path(cert, append=index > 0)
        issued.private_key_pem.write_to_path(key)
        return cert, key

    def server_knob(self, *, mutual: bool = False) -> dict[str, Path]:
        """The knob ``tls`` of whatever serves; ``mutual``: it asks for clients' certificates."""
        cert, key = self.server
        knob = {"cert": cert, "key": key}
        return {**knob, "client_ca": self.ca} if mutual else knob

    def client_knob(self) -> dict[str, Path]:
        """The knob ``tls`` of an output."""
        cert, key = self.client
        return {"ca": self.ca, "cert": cert, "key": key}

    def client_context(self, identity: CertAndKey | None = None) -> ssl.SSLContext:
        """The side of a client that trusts the authority, and may have a certificate itself."""
        context = ssl.create_default_context(cafile=self.ca)
        if identity is not None:
            context.load_cert_chain(*identity)
        return context

    def server_context(
        self, identity: CertAndKey | None = None, *, mutual: bool = False
    ) -> ssl.SSLContext:
        """The side of a server; ``mutual``: it asks for clients' certificates."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.ca)
        context.load_cert_chain(*(identity or self.server))
        if mutual:
            context.verify_mode = ssl.CERT_REQUIRED
        return context
