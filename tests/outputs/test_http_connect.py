"""Does ``turnlane validate --connect`` find destinations that cannot be used, and say where?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.outputs.web_servers import Reply, Server, served, unused_url
from turnlane.cli.app import app

PIPELINE = """\
node: {{data: data}}
main: {{}}
actions:
  - name: good
    output: {{type: http, url: "{good}"}}
  - name: search
    queue: disk
    output: {{type: elasticsearch, url: "{search}", index: logs}}
  - name: traces
    delivery:
      failover:
        output: {{type: otlp, url: "{otlp}"}}
    output: {{type: discard}}
"""


@pytest.fixture
def server() -> Iterator[Server]:
    with served() as found:
        yield found


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command looks for modules beside the configuration; that ends with the test."""
    monkeypatch.syspath_prepend("")
    monkeypatch.setenv("PYTHONPATH", "")


def validate(file: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["validate", str(file), *options])


def pipeline(place: Path, **urls: str) -> Path:
    file = place / "turnlane.yaml"
    file.write_text(PIPELINE.format(**urls))
    return file


def test_reachable_destinations_are_counted(server: Server, tmp_path: Path) -> None:
    def behave(handler: object) -> Reply:
        seen = handler.read()  # type: ignore[attr-defined]
        server.seen.append(seen)
        return Reply(200, b"" if seen.path == "/v1/logs" else b"{}")

    server.behave = behave
    file = pipeline(tmp_path, good=server.url, search=server.url, otlp=server.url)
    run = validate(file, "--connect")
    assert run.output == f"{file}: ok, 0 queues, 0 inputs, 3 actions, 4 reachable outputs\n"
    assert run.exit_code == 0
    assert {(seen.method, seen.path) for seen in server.seen} == {
        ("HEAD", "/"),
        ("GET", "/"),
        ("POST", "/v1/logs"),
    }


def test_each_unreachable_destination_is_listed_with_position_and_reason(
    server: Server, tmp_path: Path
) -> None:
    server.answers(Reply(401, b"who are you?"))
    down = unused_url()
    file = pipeline(tmp_path, good=server.url, search=down, otlp=server.url)
    run = validate(file, "--connect")
    assert run.exit_code == 1
    assert run.stderr.splitlines() == [
        f"{file}:5:13: actions[0].output: {server.url}: HTTP 401",
        f"{file}:8:13: actions[1].output: {down}/: [Errno 111] Connection refused",
        (
            f"{file}:12:17: actions[2].delivery.failover.output: {server.url}/v1/logs: HTTP 401: "
            "who are you?"
        ),
    ]


def test_validate_without_connect_makes_no_request(server: Server, tmp_path: Path) -> None:
    file = pipeline(tmp_path, good=server.url, search=unused_url(), otlp=server.url)
    assert validate(file).exit_code == 0
    assert not server.seen


def test_plugin_output_that_raises_any_error_is_listed(tmp_path: Path) -> None:
    (tmp_path / "odd_output.py").write_text(
        "from turnlane.outputs.api import Output\n"
        "class Odd(Output):\n"
        "    def send(self, prepared): pass\n"
        "    def check(self): raise LookupError('nothing there')\n"
    )
    file = tmp_path / "turnlane.yaml"
    file.write_text(
        "node: {data: data}\nmain: {}\nactions:\n"
        "  - {name: odd, output: {type: 'odd_output:Odd'}}\n"
    )
    run = validate(file, "--connect")
    assert run.exit_code == 1
    assert run.stderr == f"{file}:4:25: actions[0].output: LookupError: nothing there\n"
