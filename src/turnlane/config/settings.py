"""What a configuration says, section by section, checked, complete and unchangeable.

A section is a field of :class:`Config`; whoever adds one gets places, hints, substitution, schema
and hidden secrets without doing anything for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    SerializeAsAny,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from turnlane.config.document import Document, dotted, undotted
from turnlane.config.faults import ConfigFaults, Fault
from turnlane.config.nodes import NodesSettings
from turnlane.config.pipeline import ActionSection, queue_knobs, with_queue
from turnlane.config.plugged import Plugged
from turnlane.errors import ConfigError
from turnlane.formats.parse_settings import ParseSettings
from turnlane.inputs import registry
from turnlane.inputs.contract import InputSettings
from turnlane.node.flight_limits import FlightLimits
from turnlane.node.table_settings import ServedTableSettings
from turnlane.pipeline.cases import Case
from turnlane.pipeline.settings import (
    MAIN,
    FunctionName,
    LaneSettings,
    PipelineSettings,
    SparkSettings,
)
from turnlane.problems import Contradiction, Problem, problems_of
from turnlane.quantities import Duration
from turnlane.queues.settings import QueueSettings
from turnlane.serving.address import Address, check_exposed
from turnlane.serving.rights import TokenSettings
from turnlane.serving.tls import TlsSettings
from turnlane.serving.web import WebSettings

FLIGHT: Final = Address("127.0.0.1", 8815)
HTTP: Final = Address("127.0.0.1", 8088)

ANY_INPUT: Final = "any input"
"""Marks the place in the JSON Schema where the settings of every input type go."""


class Section(BaseModel):
    """A part of the configuration."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )


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


class NodeSettings(Section):
    """The node: where its data is, and how it is reached."""

    data: Path = Field(
        description="The data directory, made if it is not there.", examples=["/var/lib/turnlane"]
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
    def _complete(self) -> Self:
        """Give both planes the node's certificate; refuse what is open to everybody."""
        if self.tls is not None:
            for plane in ("flight", "http"):
                settings: FlightSettings | HttpSettings = getattr(self, plane)
                tls = settings.tls or self.tls
                # Past the freeze: nobody has seen this object yet.
                self.__dict__[plane] = settings.model_copy(update={"tls": tls})
        problems = [*self._exposed(), *self._tokens_twice()]
        if problems:
            raise Contradiction(problems)
        return self

    def _exposed(self) -> Iterator[Problem]:
        for name, plane in (("flight", self.flight), ("http", self.http)):
            try:
                if plane.enabled:
                    check_exposed(
                        plane.listen,
                        tls=plane.tls is not None,
                        tokens=bool(self.tokens),
                        insecure=self.insecure,
                    )
            except ConfigError as error:
                yield from (each._replace(knob=f"{name}.listen") for each in problems_of(error))

    def _tokens_twice(self) -> Iterator[Problem]:
        counts = Counter(token.name for token in self.tokens)
        for name, count in counts.items():
            if count > 1:
                yield Problem("tokens", f"{count} tokens are called {name!r}; give each its name")


INPUTS: Final = Plugged(registry)

AnyInput = Annotated[
    SerializeAsAny[InputSettings],
    PlainValidator(INPUTS.validated),
    WithJsonSchema({"type": "object", "title": ANY_INPUT}),
    INPUTS,
]


class Config(Section):
    """Everything that a configuration file says."""

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

    @model_validator(mode="before")
    @classmethod
    def _with_main(cls, data: object) -> object:
        """A pipeline has a main queue, also if nothing is said about it."""
        if not isinstance(data, dict):
            return data
        queues = data.get("queues")
        if data.get("actions") and not (isinstance(queues, dict) and MAIN in queues):
            data = {"main": None, **data}
        return {**data, "main": data["main"] or {}} if "main" in data else data

    @field_validator("queues", mode="before")
    @classmethod
    def _placed(cls, queues: object) -> object:
        """Give every queue its name, its kind, and a path where the kind has one."""
        if queues is None:
            return {}
        if not isinstance(queues, dict):
            return queues
        return {name: queue_knobs(name, knobs) for name, knobs in queues.items()}

    @field_validator("main", mode="before")
    @classmethod
    def _named_main(cls, knobs: object) -> object:
        return None if knobs is None else queue_knobs(MAIN, knobs)

    @field_validator("actions", mode="before")
    @classmethod
    def _with_queues(cls, actions: object) -> object:
        if actions is None:
            return ()
        return [with_queue(each) for each in actions] if isinstance(actions, list) else actions

    @field_validator("parse", "lane", "nodes", "spark", "tables", mode="before")
    @classmethod
    def _sectioned(cls, section: object) -> object:
        return {} if section is None else section

    @field_validator("inputs", "tests", mode="before")
    @classmethod
    def _listed(cls, parts: object) -> object:
        return () if parts is None else parts

    @model_validator(mode="after")
    def _named(self) -> Self:
        """Tell inputs of one type apart that were given no name: syslog, syslog-2."""
        taken = {each.name for each in self.inputs}
        named = []
        for each in self.inputs:
            name = each.name or _free_name(each.type, taken)
            taken.add(name)
            named.append(each if each.name else each.model_copy(update={"name": name}))
        self.__dict__["inputs"] = tuple(named)
        return self

    def knobs(self) -> dict[str, dict[str, Any]]:
        """The queues as a node takes them, those of the pipeline too: what was set, by queue."""
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
        """What there is between the main queue and the outputs; ``None`` without actions."""
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
        """Where stateful lanes keep their state."""
        return self.spark.checkpoints or self.node.data / "checkpoints"

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Names only: what is in the sections may be secret, as headers and addresses are."""
        yield "data", self.node.data
        yield "queues", list(self.knobs())
        yield "inputs", [each.name for each in self.inputs]
        yield "actions", [each.name for each in self.actions]

    def placed(self, error: ConfigError) -> ConfigError:
        """What was found wrong later, by Spark say, each thing with its place in the file.

        Their knobs are dotted paths such as ``actions[1].filter``. Settings that came from no
        file have no place: then it is the same error.
        """
        if self._document is None or isinstance(error, ConfigFaults):
            return error
        found = [(undotted(knob), message) for knob, message in problems_of(error)]
        place = self._document.place
        faults = [Fault(place(path), dotted(path), message) for path, message in found]
        return ConfigFaults(self._document.file, faults)


def _free_name(kind: str, taken: set[str | None]) -> str:
    number = 1
    name = kind
    while name in taken:
        number += 1
        name = f"{kind}-{number}"
    return name
