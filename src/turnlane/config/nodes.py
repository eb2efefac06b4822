"""The section of a configuration that says how its pipeline reaches the nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic.alias_generators import to_camel

from turnlane.client.url import Url
from turnlane.errors import ConfigError
from turnlane.pipeline.settings import Part
from turnlane.problems import ConfigProblems, Contradiction, Problem, problems_of

SECTION: Final = "nodes"


def _endpoint(url: str) -> str:
    Url.of_setting(url)
    return url


class NodesSettings(Part):
    """How the pipeline reaches its nodes."""

    endpoint: Annotated[str, AfterValidator(_endpoint)] | None = Field(
        default=None,
        description="The nodes. Default: the node of this configuration.",
        examples=["turnlane://host-1:8815,host-2:8815"],
    )
    token_env: str | None = Field(
        default=None, description="The environment variable that has the token."
    )
    token_file: Path | None = Field(default=None, description="The file that has the token.")
    tls_ca: Path | None = Field(default=None, description="The certificates to trust.")
    tls_cert: Path | None = Field(default=None, description="The pipeline's own certificate.")
    tls_key: Path | None = Field(default=None, description="Its key.")

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            both = ("tls_cert", "tls_key")
            given, other = both if self.tls_key is None else reversed(both)
            problem = Problem(given, f"and {other} belong together: give both or neither")
            raise Contradiction([problem])
        return self

    def access(self) -> dict[str, str]:
        """As the options of ``format("turnlane")``."""
        return {to_camel(name): str(value) for name, value in self if value is not None}

    def token(self) -> str | None:
        """The token, wherever it is kept. Raises ``ConfigError``."""
        if self.token_env is not None:
            found, where = os.environ.get(self.token_env), f"the variable {self.token_env}"
            return self._some(found, "token_env", where)
        if self.token_file is None:
            return None
        try:
            found = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{SECTION}.token_file", f"cannot be read: {error}") from None
        return self._some(found, "token_file", str(self.token_file))

    def _some(self, token: str | None, knob: str, where: str) -> str:
        if not token:
            raise ConfigError(f"{SECTION}.{knob}", f"{where} is empty or not set")
        return token


def of_the_file(error: ConfigError) -> ConfigError:
    """What is wrong with options of ``format("turnlane")``, by the settings that they came from."""
    knobs = {to_camel(name): f"{SECTION}.{name}" for name in NodesSettings.model_fields}
    problems = [each._replace(knob=knobs.get(each.knob, each.knob)) for each in problems_of(error)]
    return ConfigProblems(problems)
