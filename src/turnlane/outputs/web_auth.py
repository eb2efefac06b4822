"""Who we are to a web server: a token or a password, kept in the environment or in a file."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnlane.errors import RetryLater
from turnlane.problems import Contradiction, Problem
from turnlane.secret import revealed


class AuthSettings(BaseModel):
    """The header ``Authorization``. The secret itself never stands in a configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token_env: str | None = Field(
        default=None, description="The environment variable that has the token."
    )
    token_file: Path | None = Field(default=None, description="The file that has the token.")
    scheme: str = Field(
        default="Bearer",
        pattern=r"^[A-Za-z][A-Za-z0-9-]*$",
        description="The word before the token, such as `ApiKey` for Elasticsearch.",
    )
    username: str | None = Field(
        default=None,
        pattern=r"^[^:\x00-\x1f]+$",
        description="The user, with a password instead of a token (basic authentication).",
    )
    password_env: str | None = Field(
        default=None, description="The environment variable that has the password."
    )
    password_file: Path | None = Field(default=None, description="The file that has the password.")

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        given = [
            name
            for name in ("token_env", "token_file", "password_env", "password_file")
            if getattr(self, name) is not None
        ]
        if len(given) != 1:
            said = f"not {' and '.join(given)}" if given else "and there is none"
            message = f"one of token_env, token_file, password_env, password_file, {said}"
            raise Contradiction([Problem(given[-1] if given else "token_env", message)])
        if (self.username is not None) != given[0].startswith("password"):
            message = "belongs to a password: username with password_env or password_file"
            raise Contradiction([Problem("username", message)])
        return self

    def header(self) -> str:
        """The header's value. Raises ``RetryLater`` while the secret is not there."""
        if self.username is None:
            return f"{self.scheme} {_line('token', self.token_env, self.token_file)}"
        password = _line("password", self.password_env, self.password_file)
        pair = base64.b64encode(f"{self.username}:{password}".encode()).decode()
        return f"Basic {pair}"


def _line(what: str, variable: str | None, file: Path | None) -> str:
    """The secret, which a header can hold only if it is on one line."""
    found = revealed(what, variable, file)
    assert found is not None
    if not found.strip().isprintable():
        raise RetryLater(f"the {what} in {variable or file} is not one line of text")
    return found.strip()
