"""TLS as a client speaks it: whom an output trusts, and what it shows of itself."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnlane.errors import RetryLater
from turnlane.problems import Contradiction, Problem


class ClientTls(BaseModel):
    """Files in PEM. They are read where the task runs, when it connects."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ca: Path | None = Field(
        default=None, description="The authorities to trust. Default: those of the system."
    )
    cert: Path | None = Field(
        default=None, description="The certificate to show, followed by its chain."
    )
    key: Path | None = Field(default=None, description="Its private key, not encrypted.")
    verify: bool = Field(
        default=True,
        description="Whether the other side's certificate and name are checked. Without it anybody "
        "can pass for the destination.",
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise Contradiction([Problem("cert", "and key belong together: give both or neither")])
        return self

    def context(self) -> ssl.SSLContext:
        """A client's context, TLS 1.2 or newer.

        Raises ``RetryLater`` naming the file: events wait until somebody has put it right.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None and self.key is not None:
                # No passphrase: without this, OpenSSL would ask for one at the terminal.
                context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(str(each) for each in (self.ca, self.cert, self.key) if each)
            raise RetryLater(f"tls: {files}: {error.strerror or error}") from error
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context
