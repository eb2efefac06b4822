"""The settings of a configuration, section by section: checked, complete and frozen.

A section is a field of :class:`Config`. A new field needs nothing more: positions, suggestions,
variables, the schema and hidden secrets work for every field.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    SerializeAsAny,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel

from turnlane.client.address import NodeUrl
from turnlane.config.document import ConfigFileError, Document, SettingIssue, parse_path
from turnlane.delivery.settings import DeliverySettings, FailoverSettings
from turnlane.errors import ConfigError, RetryLater
from turnlane.formats.parse_settings import ParseSettings
from turnlane.inputs import api as api_inputs
from turnlane.inputs.api import InputSettings
from turnlane.memory import assume_process_limit
from turnlane.node.flight.messages import FlightLimits
from turnlane.node.tables import ServedTableSettings
from turnlane.outputs import api
from turnlane.outputs.api import OutputSettings
from turnlane.pipeline.cases import Case
from turnlane.pipeline.settings import (
    MAIN,
    ActionSettings,
    FunctionName,
    LaneSettings,
    PipelineSettings,
    SparkSettings,
)
from turnlane.plugins import PluginSettings
from turnlane.queues.settings import ON_DISK, Kind, QueueSettings
from turnlane.runtime import read_secret
from turnlane.serving.address import Address, check_exposure
from turnlane.serving.auth import TlsSettings, TokenSettings
from turnlane.serving.http_server import WebSettings
from turnlane.units import Duration, Size, SizeOrShare, parse_size_or_share
from turnlane.validation import (
    ConfigIssue,
    ConfigIssues,
    ContradictorySettings,
    SettingsModel,
    get_issues,
)

# ── how a pipeline reaches its nodes ──

SECTION: Final = "nodes"


def _check_endpoint(url: str) -> str:
    NodeUrl.from_setting(url)
    return url


class NodesSettings(SettingsModel):
    """How the pipeline reaches its nodes."""

    endpoint: Annotated[str, AfterValidator(_check_endpoint)] | None = Field(
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
    def _check_pair(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            both = ("tls_cert", "tls_key")
            given, other = both if self.tls_key is None else reversed(both)
            issue = ConfigIssue(given, f"and {other} belong together: give both or neither")
            raise ContradictorySettings([issue])
        return self

    def access(self) -> dict[str, str]:
        """Return the settings as options of ``format("turnlane")``."""
        return {to_camel(name): str(value) for name, value in self if value is not None}

    def token(self) -> str | None:
        """Return the token from its file or variable. Raises ``ConfigError``."""
        knob = "token_file" if self.token_env is None else "token_env"
        try:
            return read_secret("token", self.token_env, self.token_file)
        except RetryLater as error:
            raise ConfigError(f"{SECTION}.{knob}", str(error)) from None


def convert_option_error(error: ConfigError) -> ConfigError:
    """Return an error in options of ``format("turnlane")`` with the names of the settings."""
    knobs = {to_camel(name): f"{SECTION}.{name}" for name in NodesSettings.model_fields}
    return ConfigIssues(
        [each._replace(knob=knobs.get(each.knob, each.knob)) for each in get_issues(error)]
    )


# ── the pipeline ──

ANY_OUTPUT: Final = "any output"
"""The title in the JSON Schema that stands for the settings of every output type."""

OUTPUTS: Final = PluginSettings(api)

AnyOutput = Annotated[
    SerializeAsAny[OutputSettings],
    PlainValidator(OUTPUTS.validate),
    WithJsonSchema({"type": "object", "title": ANY_OUTPUT}),
    OUTPUTS,
]


class FailoverSection(FailoverSettings):
    """A second output, used while the first one is down."""

    output: AnyOutput = Field(description="Where the events go then.")


class DeliverySection(DeliverySettings):
    """How an action's events are delivered."""

    failover: FailoverSection | None = Field(
        default=None, description="A second output, for when the first one stays away."
    )


class ActionSection(ActionSettings):
    """An action: which events it takes, the queue in front of it, and its output."""

    delivery: DeliverySection = Field(
        default_factory=DeliverySection, description="How the events are brought to the output."
    )
    output: AnyOutput = Field(description="Where the events go; `type` says which output it is.")


def complete_queue(name: object, knobs: object) -> object:
    """Return the knobs of a queue with its name, its kind, and a path if the kind needs one.

    The path is only a placeholder: the node keeps queues below its data directory.
    """
    if isinstance(knobs, BaseModel):
        return knobs
    if knobs is None:
        knobs = {}
    if not isinstance(knobs, Mapping):
        return knobs
    kind = Kind.DISK if knobs.get("kind") is None else knobs["kind"]
    place = {"path": Path("queues") / str(name)} if kind in ON_DISK else {}
    return {**knobs, "name": name, "kind": kind, **place}


def complete_action(action: object) -> object:
    """Return an action whose queue has the name of the action. A bare word is the queue's kind."""
    if not isinstance(action, Mapping) or "queue" not in action:
        return action
    queue: Any = action["queue"]
    if isinstance(queue, str):
        queue = {"kind": queue}
    return {**action, "queue": complete_queue(action.get("name"), queue)}


FLIGHT: Final = Address("127.0.0.1", 8815)
HTTP: Final = Address("127.0.0.1", 8088)

ANY_INPUT: Final = "any input"
"""The title in the JSON Schema that stands for the settings of every input type."""


class FlightSettings(FlightLimits):
    """The Arrow Flight plane."""

    enabled: bool = Field(default=True, description="Whether it is served at all.")
    listen: Address = Field(default=FLIGHT, description="Where it listens.")
    tls: TlsSettings | None = Field(
        default=None, description="Its certificate; default: the node's."
    )


class HttpSettings(WebSettings):
    """The HTTP plane."""

    enabled: bool = Field(default=True, description="Whether it is served at all.")
    listen: Address = Field(default=HTTP, description="Where it listens.")
    max_memory: Size | None = Field(
        default=None,
        ge=1,
        description="The most memory of all bodies under way, of this plane and of all HTTP and "
        "gRPC inputs together; default: a quarter of what the process may use.",
    )


class NodeSettings(SettingsModel):
    """The node: where its data is, and how it is reached."""

    data: Path = Field(
        description="The data directory, made if it is not there.", examples=["/var/lib/turnlane"]
    )
    group: str | None = Field(
        default=None,
        description="The group that may read the data directory; by default only the user of the "
        "node may.",
        examples=["backup"],
    )
    memory_limit: SizeOrShare | None = Field(
        default=None,
        description="How much memory the process of the node may use: a percentage of the limit of "
        "its container or machine, or a size. All shares of memory are shares of it: "
        "`memory_percent` and `size: auto` of queues, and the defaults of `max_memory`.",
        examples=["80%"],
    )
    flight: FlightSettings = Field(
        default_factory=FlightSettings, description="The Arrow Flight plane."
    )
    http: HttpSettings = Field(default_factory=HttpSettings, description="The HTTP plane.")
    tls: TlsSettings | None = Field(default=None, description="The certificate of both planes.")
    tokens: tuple[TokenSettings, ...] = Field(
        (), description="Who may do what; without any, everybody may do everything."
    )
    insecure: bool = Field(
        default=False, description="Listen on public addresses even without TLS and tokens."
    )
    shutdown_timeout: Duration = Field(
        30.0, description="How long a stop waits for clients and inputs.", examples=["30s"]
    )

    @model_validator(mode="after")
    def _share_certificate(self) -> Self:
        """Give both planes the node's certificate; refuse unprotected public addresses."""
        if self.tls is not None:
            for plane in ("flight", "http"):
                settings: FlightSettings | HttpSettings = getattr(self, plane)
                tls = settings.tls or self.tls
                # The model is frozen, but no other code has this object yet.
                self.__dict__[plane] = settings.model_copy(update={"tls": tls})
        issues = [*self._check_exposure(), *self._check_token_names()]
        if issues:
            raise ContradictorySettings(issues)
        return self

    def _check_exposure(self) -> Iterator[ConfigIssue]:
        for name, plane in (("flight", self.flight), ("http", self.http)):
            try:
                if plane.enabled:
                    check_exposure(
                        plane.listen,
                        tls=plane.tls is not None,
                        tokens=bool(self.tokens),
                        insecure=self.insecure,
                    )
            except ConfigError as error:
                yield from (each._replace(knob=f"{name}.listen") for each in get_issues(error))

    def _check_token_names(self) -> Iterator[ConfigIssue]:
        counts = Counter(token.name for token in self.tokens)
        for name, number in counts.items():
            if number > 1:
                yield ConfigIssue(
                    "tokens", f"{number} tokens are called {name!r}; give each its name"
                )


INPUTS: Final = PluginSettings(api_inputs)

AnyInput = Annotated[
    SerializeAsAny[InputSettings],
    PlainValidator(INPUTS.validate),
    WithJsonSchema({"type": "object", "title": ANY_INPUT}),
    INPUTS,
]


class Config(SettingsModel):
    """All settings of a configuration file."""

    node: NodeSettings = Field(description="The node: its data, how it is reached, who may.")
    queues: dict[str, QueueSettings] = Field(
        {}, description="The node's queues by name; `kind` is `disk` if it is not given."
    )
    inputs: tuple[AnyInput, ...] = Field((), description="How events come in.")
    tables: dict[str, ServedTableSettings] = Field(
        {}, description="Queue tables, by name, that the node serves to receivers elsewhere."
    )
    main: QueueSettings | None = Field(
        default=None, description="The main queue, `main`: all events of the pipeline wait here."
    )
    parse: ParseSettings = Field(
        default_factory=ParseSettings, description="How values become columns."
    )
    transform: FunctionName | None = Field(
        default=None,
        description="A function from DataFrame to DataFrame for all events, `module:function`.",
    )
    actions: tuple[ActionSection, ...] = Field(
        (), description="What becomes of events, in this order."
    )
    lane: LaneSettings = Field(
        default_factory=LaneSettings, description="How much the main lane takes at a time."
    )
    nodes: NodesSettings = Field(
        default_factory=NodesSettings,
        description="How the pipeline reaches its nodes, if not as the one above.",
    )
    spark: SparkSettings = Field(default_factory=SparkSettings, description="How Spark runs.")
    tests: tuple[Case, ...] = Field((), description="Cases for `turnlane test`.")

    _document: Document | None = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _assume_memory_limit(cls, data: object, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Compute shares of memory as the node will, whose limit may be lower."""
        node = data.get("node") if isinstance(data, dict) else None
        written = node.get("memory_limit") if isinstance(node, dict) else None
        try:
            limit = None if written is None else parse_size_or_share(written)
        except ValueError:
            limit = None  # the setting itself is refused below
        with assume_process_limit(limit):
            return validate(data)

    @model_validator(mode="before")
    @classmethod
    def _add_main_queue(cls, data: object) -> object:
        """Add a main queue to a pipeline that has no section for it."""
        if not isinstance(data, dict):
            return data
        queues = data.get("queues")
        if data.get("actions") and not (isinstance(queues, dict) and MAIN in queues):
            data = {"main": None, **data}
        return {**data, "main": data["main"] or {}} if "main" in data else data

    @field_validator("queues", mode="before")
    @classmethod
    def _complete_queues(cls, queues: object) -> object:
        if queues is None:
            return {}
        if not isinstance(queues, dict):
            return queues
        return {name: complete_queue(name, knobs) for name, knobs in queues.items()}

    @field_validator("main", mode="before")
    @classmethod
    def _complete_main_queue(cls, knobs: object) -> object:
        return None if knobs is None else complete_queue(MAIN, knobs)

    @field_validator("actions", mode="before")
    @classmethod
    def _complete_actions(cls, actions: object) -> object:
        if actions is None:
            return ()
        return [complete_action(each) for each in actions] if isinstance(actions, list) else actions

    @field_validator("parse", "lane", "nodes", "spark", "tables", mode="before")
    @classmethod
    def _replace_null_section(cls, section: object) -> object:
        return {} if section is None else section

    @field_validator("inputs", "tests", mode="before")
    @classmethod
    def _replace_null_list(cls, parts: object) -> object:
        return () if parts is None else parts

    @model_validator(mode="after")
    def _name_inputs(self) -> Self:
        """Give inputs without a name different names: syslog, syslog-2."""
        taken = {each.name for each in self.inputs}
        named = []
        for each in self.inputs:
            name = each.name or _find_free_name(each.type, taken)
            taken.add(name)
            named.append(each if each.name else each.model_copy(update={"name": name}))
        self.__dict__["inputs"] = tuple(named)
        return self

    def knobs(self) -> dict[str, dict[str, Any]]:
        """Return the queues of the node and of the pipeline, with their explicit settings."""
        every = dict(self.queues)
        if self.main is not None:
            every[MAIN] = self.main
        every |= {
            action.name: action.queue
            for action in self.actions
            if action.queue is not None and not action.is_direct
        }
        knobs = {
            name: {knob: getattr(queue, knob) for knob in queue.model_fields_set - {"name", "path"}}
            for name, queue in every.items()
        }
        pipeline = self.pipeline()
        for name in () if pipeline is None else pipeline.dead_letter_queues:
            knobs.setdefault(name, {})
        return knobs

    def pipeline(self) -> PipelineSettings | None:
        """Return the pipeline between the main queue and the outputs; ``None`` without actions."""
        if not self.actions:
            return None
        return PipelineSettings(
            parse=self.parse,
            transform=self.transform,
            actions=self.actions,
            lane=self.lane,
            spark=self.spark,
        )

    def checkpoints(self) -> Path:
        """Return the directory in which stateful lanes keep their state."""
        return self.spark.checkpoints or self.node.data / "checkpoints"

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Return only names: values such as headers and addresses may be secret."""
        yield "data", self.node.data
        yield "queues", list(self.knobs())
        yield "inputs", [each.name for each in self.inputs]
        yield "actions", [each.name for each in self.actions]

    def locate(self, error: ConfigError) -> ConfigError:
        """Return an error that was found later, for example by Spark, with positions in the file.

        Its knobs are dotted paths such as ``actions[1].filter``. For settings that came from no
        file it is the same error.
        """
        document = self._document
        if document is None or isinstance(error, ConfigFileError):
            return error
        found = [SettingIssue(parse_path(knob), message) for knob, message in get_issues(error)]
        return ConfigFileError(document.file, [document.locate(issue) for issue in found])


def _find_free_name(kind: str, taken: set[str | None]) -> str:
    names = chain([kind], (f"{kind}-{number}" for number in count(2)))
    return next(name for name in names if name not in taken)
