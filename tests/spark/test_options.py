"""Invalid options fail at once, with the option's name and the allowed values."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo
from pyspark.sql.types import StructType

from turnlane.errors import ConfigError
from turnlane.spark.options import (
    Options,
    ReadOptions,
    SourceOptions,
    WriteOptions,
    merge_path,
    parse_read_options,
    parse_write_options,
)
from turnlane.spark.queue_reader import QueueBatchReader
from turnlane.spark.row_codec import get_read_schema
from turnlane.spark.source import TurnlaneSource

PAGE = Path(__file__).parents[2] / "docs" / "spark-source.md"
NODE = {"endpoint": "turnlane://127.0.0.1:1"}


def test_option_names_may_be_in_any_case() -> None:
    given = {**NODE, "QUEUE": "main", "startingoffsets": "LATEST", "maxBytesPerTrigger": "1Mi"}
    options = ReadOptions.from_spark(given)
    assert (options.queue, options.starting_offsets) == ("main", "latest")
    assert options.max_bytes_per_trigger == 1 << 20


def test_offsets_by_node_are_parsed() -> None:
    options = ReadOptions.from_spark(
        {**NODE, "queue": "main", "startingOffsets": '{"0": 23, "1": 7}'}
    )
    assert options.starting_offsets == {0: 23, 1: 7}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"startingOffset": "earliest"}, "startingOffset: .*did you mean startingOffsets"),
        ({"startingOffsets": "begin"}, "^startingOffsets: must be earliest, .*, or JSON .*'begin'"),
        ({"startingOffsets": "{0: 1}"}, "^startingOffsets: .*JSON"),
        ({"startingOffsets": '{"0": "1"}'}, "^startingOffsets: .*JSON"),
        ({"startingOffsets": "[1]"}, "^startingOffsets: .*JSON"),
        (
            {"endpoint": "http://x"},
            "^endpoint: 'http://x' is not the URL of a node; write turnlane://",
        ),
        ({"tlsCert": "c.pem"}, "^tlsCert: and tlsKey belong together"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger: must be at least 1"),
        ({"maxOffsetsPerTrigger": "many"}, "maxOffsetsPerTrigger: must be a whole number"),
        ({"failOnDataLoss": "perhaps"}, "failOnDataLoss: must be true or false"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay"),
        ({"minPartitions": "-1"}, "minPartitions"),
        (
            {"startingOffsets": '{"0": -3}'},
            "startingOffsets: has -3 for node 0; .*-1 .latest. or -2 .earliest",
        ),
        ({"endingOffsets": "earliest"}, "endingOffsets: cannot be earliest"),
        ({"endingOffsets": '{"0": -2}'}, "endingOffsets: cannot be earliest"),
    ],
)
def test_invalid_option_is_named_in_the_error(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReadOptions.from_spark({**NODE, "queue": "main", **given})


def test_stream_refuses_ending_offsets() -> None:
    source = TurnlaneSource({**NODE, "queue": "main", "endingOffsets": "latest"})
    with pytest.raises(ConfigError, match="endingOffsets: is for batch queries"):
        source.streamReader(StructType())
    assert isinstance(source.reader(StructType()), QueueBatchReader)


@pytest.mark.parametrize("option", ["queue", "QUEUE"])
def test_path_is_the_queue_and_must_not_contradict_it(option: str) -> None:
    schema = StructType().add("value", "binary")
    assert merge_path({"path": "main"}, "queue") == {"queue": "main"}
    assert merge_path({option: "main", "path": "main"}, "queue") == {option: "main"}
    source = TurnlaneSource({**NODE, option: "main", "path": "other"})
    for ask in (source.reader, source.streamReader, partial(source.writer, overwrite=False)):
        with pytest.raises(ConfigError, match=r"^queue: is 'main', but 'other' is loaded or saved"):
            ask(schema)


def test_missing_required_option_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNLANE_URL", raising=False)
    with pytest.raises(ConfigError, match="queue: is required"):
        ReadOptions.from_spark(NODE)
    with pytest.raises(
        ConfigError, match=r"endpoint: is required, as in turnlane://127\.0\.0\.1:8815"
    ):
        ReadOptions.from_spark({"queue": "main"})
    monkeypatch.setenv("TURNLANE_URL", "turnlane://elsewhere:1")
    assert ReadOptions.from_spark({"queue": "main"}).endpoint == "turnlane://elsewhere:1"


def test_token_is_never_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    options = WriteOptions.from_spark({**NODE, "token": "s3cret"})
    assert "s3cret" not in repr(options)
    assert options.read_token() == "s3cret"
    with pytest.raises(ConfigError, match="tokenEnv: the variable NOT_SET"):
        WriteOptions.from_spark({**NODE, "tokenEnv": "NOT_SET"}).read_token()
    with pytest.raises(ConfigError, match=r"tokenFile: .*No such file"):
        WriteOptions.from_spark({**NODE, "tokenFile": "/nowhere/token"}).read_token()


def test_options_of_lanes_are_refused_for_others() -> None:
    for name in ("steps", "run", "ways", "probeEvents"):
        with pytest.raises(ConfigError, match="there is no such option") as error:
            ReadOptions.from_spark({**NODE, "queue": "main", name: "1"})
        assert "did you mean" not in str(error.value)
    with pytest.raises(ConfigError, match="run: is required"):
        parse_read_options({**NODE, "queue": "main", "lane": "main"})
    with pytest.raises(ConfigError, match="run: and lane belong together"):
        parse_write_options({**NODE, "LANE": "main"})
    assert type(parse_read_options({**NODE, "queue": "main"})) is ReadOptions
    assert type(parse_write_options(NODE)) is WriteOptions


@pytest.mark.parametrize("kind", [SourceOptions, ReadOptions, WriteOptions])
def test_every_option_is_documented(kind: type[Options]) -> None:
    page = PAGE.read_text()
    missing = [row for row in map(format_row, kind.model_fields.values()) if row not in page]
    assert not missing, "\n".join(missing)


def test_every_column_is_documented() -> None:
    page = PAGE.read_text()
    for column in get_read_schema(include_headers=True).split(", "):
        name, kind = column.split()
        assert f"| `{name}` | {kind} |" in page


def format_row(field: FieldInfo) -> str:
    """Return an option's row in the documentation."""
    return f"| `{field.alias}` | {format_default(field)} | {field.description} |"


def format_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return ""  # The description names the default.
    match field.get_default():  # A computed default is described in words.
        case None:
            return ""
        case bool() as value:
            return f"`{str(value).lower()}`"
        case float() as seconds:
            return f"`{seconds:g}s`"
        case other:
            return f"`{other}`"
