"""Does ``turnlane validate --connect`` list unusable destinations with their positions?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.outputs.web_servers import Reply, Server, get_unused_url, run_server
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
    with run_server() as found:
        yield found


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the changes of the import path that the command makes."""
    monkeypatch.syspath_prepend("")
    monkeypatch.setenv("PYTHONPATH", "")


def validate(file: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["validate", str(file), *options])


def write_config(place: Path, **urls: str) -> Path:
    file = place / "turnlane.yaml"
    file.write_text(PIPELINE.format(**urls))
    return file


def test_reachable_destinations_are_counted(server: Server, tmp_path: Path) -> None:
    def behave(handler: object) -> Reply:
        request = handler.read()  # type: ignore[attr-defined]
        server.requests.append(request)
        return Reply(200, b"" if request.path == "/v1/logs" else b"{}")

    server.behave = behave
    file = write_config(tmp_path, good=server.url, search=server.url, otlp=server.url)
    run = validate(file, "--connect")
    assert run.output == f"{file}: ok, 2 queues, 0 inputs, 3 actions, 4 reachable outputs\n"
    assert run.exit_code == 0
    assert {(request.method, request.path) for request in server.requests} == {
        ("HEAD", "/"),
        ("GET", "/"),
        ("POST", "/v1/logs"),
    }


def test_each_unreachable_destination_is_listed_with_position_and_reason(
    server: Server, tmp_path: Path
) -> None:
    server.set_replies(Reply(401, b"who are you?"))
    down = get_unused_url()
    file = write_config(tmp_path, good=server.url, search=down, otlp=server.url)
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
    file = write_config(tmp_path, good=server.url, search=get_unused_url(), otlp=server.url)
    assert validate(file).exit_code == 0
    assert not server.requests


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
