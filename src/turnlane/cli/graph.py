"""``turnlane graph``: a configuration's topology, drawn."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turnlane.cli import output
from turnlane.cli.failure import reported
from turnlane.cli.options import ConfigFile
from turnlane.cli.serve import loaded
from turnlane.errors import ConfigError

if TYPE_CHECKING:
    from turnlane.config import Config
    from turnlane.inputs.contract import InputSettings
    from turnlane.pipeline.graph import Topology
    from turnlane.pipeline.settings import ActionSettings


@reported
def graph(
    config: ConfigFile,
    *,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an SVG picture instead; - is stdout.")
    ] = None,
) -> None:
    """Draw the topology: inputs, main queue, actions with their filters, queues, outputs."""
    from turnlane.pipeline.graph import text_lines
    from turnlane.pipeline.picture import svg as drawn

    topology = topology_of(loaded(config))
    if svg is None:
        for line in text_lines(topology, shutil.get_terminal_size((100, 24)).columns):
            output.say(line)
    elif str(svg) == "-":
        typer.echo(drawn(topology), nl=False)
    else:
        svg.write_text(drawn(topology), encoding="utf-8")
        output.warn(f"drawn in {svg}")


def topology_of(config: Config) -> Topology:
    """What there is to be drawn. Raises ``ConfigError`` if that is no pipeline."""
    from turnlane.config import shown
    from turnlane.pipeline.graph import Source, Topology

    pipeline = config.pipeline()
    if pipeline is None:
        raise config.placed(ConfigError("actions", "there are none, so there is nothing to draw"))
    inputs = tuple(Source(each.label, _where(each), each.queue) for each in config.inputs)
    kinds = {name: str(knobs.get("kind", "disk")) for name, knobs in config.knobs().items()}
    actions = tuple(map(_as_shown, pipeline.actions, shown(config)["actions"]))
    return Topology(inputs, pipeline.model_copy(update={"actions": actions}), kinds)


def _as_shown(action: ActionSettings, shown: dict[str, Any]) -> ActionSettings:
    """An action that says what ``turnlane validate --show`` does: no secrets, no variables."""
    from turnlane.pipeline.graph import PLACES

    places = {name: shown["output"][name] for name in PLACES if name in shown["output"]}
    output = action.output.model_copy(update=places)
    return action.model_copy(update={"filter": shown["filter"], "output": output})


def _where(settings: InputSettings) -> str:
    """Where an input listens or reads: addresses and paths, whatever they are called."""
    from turnlane.serving.address import Address

    found = []
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        listen = getattr(value, "listen", None)
        if isinstance(value, Address):
            found.append(str(value) if name == "listen" else f"{name} {value}")
        elif isinstance(listen, Address):
            found.append(f"{name} {listen}")
        elif name in {"path", "paths"} and value:
            paths = value if isinstance(value, list | tuple) else [value]
            found.append(", ".join(map(str, paths)))
    return ", ".join(found)
