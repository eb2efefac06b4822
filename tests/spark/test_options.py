"""Do wrong options fail at once, with the option's name and what is allowed?"""

from __future__ import annotations

import pytest

from turnlane.errors import ConfigError
from turnlane.spark.options import ReadOptions, WriteOptions

NODE = {"endpoint": "turnlane://127.0.0.1:1"}


def test_names_may_be_in_any_case() -> None:
    given = {**NODE, "QUEUE": "main", "startingoffsets": "LATEST", "maxBytesPerTrigger": "1Mi"}
    options = ReadOptions.of(given)
    assert (options.queue, options.starting_offsets) == ("main", "latest")
    assert options.max_bytes_per_trigger == 1 << 20


def test_offsets_by_node() -> None:
    options = ReadOptions.of({**NODE, "queue": "main", "startingOffsets": '{"0": 23, "1": 7}'})
    assert options.starting_offsets == {0: 23, 1: 7}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"startingOffset": "earliest"}, "startingOffset: .*did you mean startingOffsets"),
        ({"startingOffsets": "begin"}, "startingOffsets.*earliest"),
        ({"startingOffsets": "{0: 1}"}, "startingOffsets.*JSON"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger: must be at least 1"),
        ({"maxOffsetsPerTrigger": "many"}, "maxOffsetsPerTrigger: must be a whole number"),
        ({"failOnDataLoss": "perhaps"}, "failOnDataLoss: must be true or false"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay"),
        ({"minPartitions": "-1"}, "minPartitions"),
    ],
)
def test_wrong_ones_are_named(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReadOptions.of({**NODE, "queue": "main", **given})


def test_what_is_required_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNLANE_URL", raising=False)
    with pytest.raises(ConfigError, match="queue: is required"):
        ReadOptions.of(NODE)
    with pytest.raises(ConfigError, match="endpoint: is required, as in turnlane://"):
        ReadOptions.of({"queue": "main"})
    monkeypatch.setenv("TURNLANE_URL", "turnlane://elsewhere:1")
    assert ReadOptions.of({"queue": "main"}).endpoint == "turnlane://elsewhere:1"


def test_the_token_is_never_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    options = WriteOptions.of({**NODE, "token": "s3cret"})
    assert "s3cret" not in repr(options)
    assert options.secret() == "s3cret"
    with pytest.raises(ConfigError, match="tokenEnv: the variable NOT_SET"):
        WriteOptions.of({**NODE, "tokenEnv": "NOT_SET"}).secret()
    with pytest.raises(ConfigError, match=r"tokenFile: .*No such file"):
        WriteOptions.of({**NODE, "tokenFile": "/nowhere/token"}).secret()
