"""Inputs wait by their ``flow``: light ones first, full ones later, others never."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.harness import assert_never, publish_all, wait_until
from tests.inputs.syslog_harness import ANYWHERE, send, send_datagrams, send_to_socket
from turnlane.errors import AckPending
from turnlane.events import block_of
from turnlane.inputs import api
from turnlane.inputs.api import Input
from turnlane.inputs.publishers import RequestPublisher
from turnlane.inputs.stdin import StdinInput, StdinSettings
from turnlane.inputs.syslog import SyslogInput
from turnlane.node.node import Node
from turnlane.queues.api import FlowControl

LIGHT_MARK, FULL_MARK = 2, 4

Send = Callable[[bytes], object]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    queue = {
        "kind": "memory",
        "size": 10,
        "light_delay_mark": LIGHT_MARK,
        "full_delay_mark": FULL_MARK,
        "light_delay": "600s",
    }
    with Node(tmp_path / "data", {"main": queue}) as found:
        yield found


def settings(kind: str, **knobs: Any) -> Any:
    given = {"type": kind, "queue": "main", "ack": "accepted", **knobs}
    return api.load(kind).settings_type.model_validate(given)


@contextlib.contextmanager
def started(made: Input) -> Iterator[Any]:
    with made:
        made.start()
        yield made
        made.stop(0.1)


@contextlib.contextmanager
def syslog(node: Node, _place: Path, **flow: Any) -> Iterator[Send]:
    with started(SyslogInput(settings("syslog", tcp=ANYWHERE, **flow), node)) as source:
        yield lambda line: send(source, line)


@contextlib.contextmanager
def unix(node: Node, place: Path, **flow: Any) -> Iterator[Send]:
    door = place / "log"
    with started(api.load("unix")(settings("unix", path=door, **flow), node)):
        yield lambda line: send_to_socket(door, line)


@contextlib.contextmanager
def stdin(node: Node, _place: Path, **flow: Any) -> Iterator[Send]:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"), os.fdopen(writing, "wb", buffering=0) as pipe:
        knobs = StdinSettings.model_validate({"queue": "main", "ack": "accepted", **flow})
        with started(StdinInput(knobs, node, file=reading)):
            yield pipe.write


@contextlib.contextmanager
def files(node: Node, place: Path, **flow: Any) -> Iterator[Send]:
    knobs = {"paths": str(place / "*.log"), "scan_interval": 0.01, **flow}
    with started(api.load("files")(settings("files", **knobs), node)):
        yield (place / "app.log").write_bytes


@contextlib.contextmanager
def http(node: Node, _place: Path, **flow: Any) -> Iterator[Send]:
    knobs = settings("http", listen=ANYWHERE, timeout=20, **flow)
    sending: list[threading.Thread] = []

    with started(api.load("http")(knobs, node)) as source:

        def post(line: bytes) -> None:
            url = f"http://{source.address}"
            sending.append(
                threading.Thread(
                    target=httpx.post, args=(url,), kwargs={"content": line, "timeout": 20}
                )
            )
            sending[-1].start()

        yield post
        for each in sending:
            each.join()


@pytest.mark.parametrize("depth", [LIGHT_MARK, FULL_MARK])
@pytest.mark.parametrize("flow", FlowControl)
@pytest.mark.parametrize("way", [syslog, unix, stdin, files, http])
def test_input_waits_at_the_mark_of_its_flow_control(
    node: Node, tmp_path: Path, way: Any, flow: FlowControl, depth: int
) -> None:
    queue = node.queue("main")
    publish_all(queue.producer(), [b"before"] * depth)
    waits = depth >= {FlowControl.LIGHT: LIGHT_MARK, FlowControl.FULL: FULL_MARK}.get(flow, 100)
    with way(node, tmp_path, flow=flow) as write:
        write(b"<13>here\n")
        if waits:
            assert_never(lambda: queue.end > depth, "an event above the mark")
            queue.get(timeout=20).done()
        wait_until(lambda: queue.end == depth + 1)
    assert queue.stats().ledger.dropped == {}


@pytest.mark.parametrize(
    ("kind", "flow"),
    [
        ("syslog", "light"), ("files", "full"), ("stdin", "full"), ("unix", "none"),
        ("http", "none"), ("otlp", "none"), ("otlp_grpc", "none"), ("elasticsearch", "none"),
    ],
)  # fmt: skip
def test_default_flow_control_depends_on_the_input(kind: str, flow: str) -> None:
    fields = api.load(kind).settings_type.model_fields
    assert fields["flow"].default == flow


def test_udp_input_never_waits(node: Node) -> None:
    """The other transports of the same input may wait."""
    queue = node.queue("main")
    with started(SyslogInput(settings("syslog", udp=ANYWHERE, flow="full"), node)) as source:
        publish_all(queue.producer(), [b"before"] * 9)
        send_datagrams(source, b"<13>in", b"<13>dropped")
        wait_until(lambda: source.counters.events + source.counters.dropped == 2)
        assert (source.counters.events, source.counters.dropped) == (1, 1)


def test_full_flow_control_waits_longer_than_light(node: Node, tmp_path: Path) -> None:
    """A light producer enters after its delay, up to the bound; a full one waits for room."""
    queue = node.queue("main")
    publish_all(queue.producer(), [b"before"] * FULL_MARK)
    with stdin(node, tmp_path, flow="full") as write:
        write(b"patient\n")
        with syslog(node, tmp_path, flow="light") as say_quickly:
            say_quickly(b"<13>hasty\n")
            wait_until(lambda: queue.end == FULL_MARK + 1, "the end of the light delay")
        queue.get(timeout=20).done()
        wait_until(lambda: queue.end == FULL_MARK + 2)


@pytest.mark.parametrize("ack", ["accepted", "persisted"])
def test_events_of_a_full_queue_count_as_accepted_at_their_ack_level(node: Node, ack: str) -> None:
    """A sender never repeats events that were answered as accepted."""
    given = settings("elasticsearch", ack=ack, listen=ANYWHERE, timeout="200ms")
    publisher = RequestPublisher(node, given, given.ack)
    block = block_of([b"%d" % number for number in range(40)])
    if ack == "persisted":  # a memory queue acks this level when events are delivered
        with pytest.raises(AckPending):
            publisher.publish_fitting("main", block, publisher.get_deadline())
    else:
        taken = publisher.publish_fitting("main", block, publisher.get_deadline())
        assert taken.accepted == node.queue("main").end > 0
