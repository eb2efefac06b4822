"""Tests of publishing over Flight: the reports to the client, their time, and their truth."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import flight

from tests.contract.harness import NOTICEABLE, PATIENCE, Task, assert_never, wait_until
from tests.node.conftest import QUEUES, Serve, ServedNode, Stream, values
from tests.queue_internals import state_of
from turnlane.events import block_of
from turnlane.node import event_refs
from turnlane.node.flight import publish
from turnlane.node.flight.messages import FlightLimits
from turnlane.node.flight.publish import MAX_PAIRS, SequenceMap
from turnlane.outputs.connections import abort_descriptor
from turnlane.queues import open_buffered_queue
from turnlane.serving.address import shut_down_connections
from turnlane.storage.producer_sequences import MAX_RUNS
from turnlane.testing import FaultyDisk


def test_first_message_has_the_instance_and_the_next_sequence(served: ServedNode) -> None:
    stream = served.stream("disk", "p")
    assert stream.read_greeting() == {
        "instance": served.node.instance,
        "resume_at": 0,
        "durability": "always",
    }


def test_progress_follows_events_from_accepted_to_delivered(served: ServedNode) -> None:
    stream = served.stream("disk", "p", ack="delivered")
    stream.read_greeting()
    stream.write(b"a", b"b", sequence=0)
    stream.write(b"c", sequence=2)
    stream.wait_for_progress(accepted=3, persisted=3, delivered=0)
    served.node.queue("disk").get(2).done()
    stream.wait_for_progress(delivered=2)
    served.node.queue("disk").get().done()
    assert stream.finish() == {"accepted": 3, "persisted": 3, "delivered": 3}


def test_event_is_not_reported_persisted_before_the_sync(served: ServedNode) -> None:
    first = served.stream("slow", ack="persisted")  # the next sync is in an hour
    first.write(b"a")
    first.finish()
    stream = served.stream("slow", ack="accepted")
    stream.read_greeting()
    stream.write(b"a")
    assert stream.finish() == {"accepted": 1, "persisted": 0, "delivered": 0}


def test_wait_for_persisted_causes_an_early_sync(served: ServedNode) -> None:
    first = served.stream("slow")
    first.write(b"a")
    assert first.finish() is not None
    second = served.stream("slow", ack="persisted")
    second.read_greeting()
    second.write(b"b")
    second.wait_for_progress(accepted=1)
    second.writer.write_metadata(pa.py_buffer(b'{"urge": true}'))
    second.wait_for_progress(persisted=1)
    second.finish()


def test_many_unsynced_bytes_cause_an_early_sync(served: ServedNode) -> None:
    """A client keeps unpersisted events in memory, so a sync cannot wait for an hour."""
    stream = served.stream("slow", "p", ack="accepted")
    stream.read_greeting()
    stream.write(bytes(publish.SYNC_REQUEST_BYTES), sequence=0)
    stream.wait_for_progress(accepted=1, persisted=1)
    stream.finish()


def test_event_reported_persisted_after_a_failed_sync_is_stored(
    serve: Serve,
) -> None:
    disk = FaultyDisk()
    with contextlib.closing(serve({"slow": QUEUES["slow"]}, disk=disk)) as served:
        first = served.stream("slow", "p", ack="persisted")
        first.write(b"first", sequence=0)
        first.finish()
        stream = served.stream("slow", "p", ack="persisted")
        assert stream.read_greeting()["resume_at"] == 1
        stream.write(b"a", b"b", sequence=1)
        stream.wait_for_progress(accepted=3)
        disk.forget(match=".chunk")
        stream.write(b"c", sequence=3)
        stream.finish()
        assert served.node.queue("slow").stats().disk_errors == 1
        assert not served.node.queue("slow").stats().ledger.dropped
    again = serve({"slow": QUEUES["slow"]})
    assert values(again.node, "slow") == [b"first", b"a", b"b", b"c"]


def test_full_queue_without_timeout_is_not_polled(serve: Serve) -> None:
    served = serve({"full": {"kind": "memory", "size": 1, "full_timeout": 0}})
    stream = served.stream("full", ack="accepted")
    stream.write(b"a")
    stream.wait_for_progress(accepted=1)
    stream.write(b"b")
    queue = served.node.queue("full")
    wait_until(lambda: queue.stats().full_waits > 0)
    assert_never(lambda: queue.stats().full_waits > 3)
    queue.get(1).done()
    stream.finish()
    assert queue.end == 2


def test_unnamed_stream_counts_from_zero(served: ServedNode) -> None:
    for _ in range(2):
        stream = served.stream("disk")
        assert stream.read_greeting()["resume_at"] == 0
        stream.write(b"a", b"b")
        assert stream.finish() == {"accepted": 2, "persisted": 2, "delivered": 0}
    assert values(served.node, "disk") == [b"a", b"b"] * 2


def test_events_of_a_finished_stream_are_persisted(served: ServedNode) -> None:
    stream = served.stream("disk")
    stream.write(b"a")
    stream.writer.close()
    queue = served.node.queue("disk")
    assert state_of(queue).acks.persisted.position == 1


def test_repeated_events_are_dropped_and_acked(served: ServedNode) -> None:
    first = served.stream("disk", "p")
    first.read_greeting()
    first.write(b"a", b"b", b"c", sequence=0)
    first.finish()
    second = served.stream("disk", "p")
    assert second.read_greeting()["resume_at"] == 3
    second.write(b"b", b"c", b"d", sequence=1)
    assert second.finish() == {"accepted": 4, "persisted": 4, "delivered": 0}
    assert values(served.node, "disk") == [b"a", b"b", b"c", b"d"]


def test_late_lower_sequence_is_accepted(serve: Serve) -> None:
    """On the same stream, on another stream, and after a restart: each event once."""
    served = serve(name="same")
    first = served.stream("disk", "p")
    first.read_greeting()
    for number in (20, 10, 10, 20):
        first.write(b"%d" % number, sequence=number)
    assert first.finish() == {"accepted": 21, "persisted": 21, "delivered": 0}
    queue = served.node.queue("disk")
    assert state_of(queue).acks.persisted.position == 2
    second = served.stream("disk", "p")
    assert second.read_greeting()["resume_at"] == 21
    second.write(b"12", b"13", sequence=12)
    second.finish()
    assert state_of(queue).acks.persisted.position == 4
    served.close()
    after = serve(name="same")
    third = after.stream("disk", "p")
    assert third.read_greeting()["resume_at"] == 21
    third.write(*[b"%d" % number for number in range(10, 22)], sequence=10)
    third.finish()
    expected = [20, 10, 12, 13, 11, 14, 15, 16, 17, 18, 19, 21]
    assert values(after.node, "disk") == [b"%d" % number for number in expected]


def test_late_sequence_reaches_its_level_before_the_stream_ends(served: ServedNode) -> None:
    """The reports are already beyond it; the end of the stream waits for it."""
    stream = served.stream("memory", "p", ack="delivered")
    stream.read_greeting()
    stream.write(b"20", sequence=20)
    stream.wait_for_progress(accepted=21)
    served.node.queue("memory").get().done()
    stream.write(b"10", sequence=10)
    wait_until(lambda: served.node.queue("memory").end == 2)
    finishing = Task(stream.finish)
    time.sleep(NOTICEABLE)
    assert finishing.running
    served.node.queue("memory").get().done()
    finishing.result()


def test_client_may_skip_any_number_of_sequences(served: ServedNode) -> None:
    """A client that drops events itself has a gap for each drop."""
    stream = served.stream("disk", "p")
    stream.read_greeting()
    for number in range(0, 6 * MAX_RUNS, 2):
        stream.write(b"%d" % number, sequence=number)
    end = 6 * MAX_RUNS - 1
    assert stream.finish() == {"accepted": end, "persisted": end, "delivered": 0}
    assert len(values(served.node, "disk")) == 3 * MAX_RUNS


def test_repeats_of_delivered_events_are_reported_delivered(served: ServedNode) -> None:
    first = served.stream("memory", "p")
    first.write(b"a", b"b", sequence=0)
    first.finish()
    served.node.queue("memory").get().done()
    second = served.stream("memory", "p", ack="delivered")
    second.write(b"a", b"b", sequence=0)
    assert second.finish() == {"accepted": 2, "persisted": 2, "delivered": 2}


def test_restarted_node_reports_the_known_sequence(serve: Serve) -> None:
    before = serve(name="same")
    stream = before.stream("disk", "p")
    stream.write(b"a", b"b", sequence=0)
    stream.finish()
    before.close()
    after = serve(name="same")
    again = after.stream("disk", "p")
    assert again.read_greeting()["resume_at"] == 2
    again.write(b"a", b"b", sequence=0)
    assert again.finish() == {"accepted": 2, "persisted": 2, "delivered": 0}
    assert values(after.node, "disk") == [b"a", b"b"]


def test_other_producers_do_not_cause_early_acks(served: ServedNode) -> None:
    """Many producers share one queue that is consumed slowly: no report is too early."""
    streams = [served.stream("memory", name, ack="delivered") for name in "abc"]
    for number in range(5):
        for stream in streams:
            stream.write(b"%d" % number, sequence=number)
    wait_until(lambda: served.node.queue("memory").end == 15)
    queue = served.node.queue("memory")
    order = values(served.node, "memory")
    assert sorted(order) == sorted([b"%d" % n for n in range(5)] * 3)
    while queue.low < 15:
        queue.get(1).done()
    for stream in streams:
        reported = []
        stream.writer.done_writing()
        while (news := stream.read_message()) is not None:
            reported.append(news.get("delivered", 0))
        stream.writer.close()
        assert reported == sorted(reported)
        assert reported[-1] == 5


def test_full_queue_delays_only_its_own_stream(served: ServedNode) -> None:
    """Reports continue while the stream waits, and other queues are not affected."""
    stream = served.stream("memory", "p")
    stream.read_greeting()

    def send() -> None:
        for number in range(3):
            stream.write(*[b"x"] * 60, sequence=60 * number)

    sending = Task(send)
    stream.wait_for_progress(accepted=60)
    wait_until(lambda: served.node.queue("memory").stats().blocked_publishers == 1)
    other = served.stream("disk")
    other.write(b"other")
    assert other.finish() == {"accepted": 1, "persisted": 1, "delivered": 0}
    with served.node.queue("memory").get() as batch:
        assert len(batch) == 60
    stream.wait_for_progress(accepted=120, delivered=60)
    served.node.queue("memory").get().done()
    stream.wait_for_progress(accepted=180, delivered=120)
    sending.result()
    stream.finish()


def test_events_dropped_during_a_wait_are_counted_once(serve: Serve) -> None:
    """A wait for room is one attempt, however long it takes."""
    knobs = {"kind": "memory", "size": 10, "discard_mark": 5, "discard_severity": 6}
    served = serve({"shedding": knobs})
    stream = served.stream("shedding", "p")
    stream.read_greeting()
    stream.write(*[b"x"] * 10, sequence=0)
    stream.wait_for_progress(accepted=10)
    stream.write_block(block_of([b"y", b"z"], severities=[7, 1]), 10)
    queue = served.node.queue("shedding")
    wait_until(lambda: queue.stats().blocked_publishers == 1)
    time.sleep(NOTICEABLE)
    queue.get().done()
    stream.wait_for_progress(accepted=12)
    assert queue.stats().ledger.dropped == {"severity": 1}


def test_new_stream_of_a_producer_ends_the_old_stream(served: ServedNode) -> None:
    """The remaining events of the old stream are refused: the new stream has their numbers."""
    old = served.stream("memory", "p")
    old.read_greeting()
    old.write(*[b"old"] * 100, sequence=0)
    old.wait_for_progress(accepted=100)
    old.write(b"late", sequence=100)
    wait_until(lambda: served.node.queue("memory").stats().blocked_publishers == 1)
    new = served.stream("memory", "p")
    assert new.read_greeting()["resume_at"] == 100
    assert served.node.queue("memory").stats().blocked_publishers == 0
    served.node.queue("memory").get().done()
    new.write(b"new", sequence=100)
    new.wait_for_progress(accepted=101)
    with pytest.raises(flight.FlightUnavailableError, match=r"turnlane:TransportDown: .*newer"):
        old.finish()
    assert values(served.node, "memory") == [b"new"]


def test_competing_streams_publish_every_event_once(served: ServedNode) -> None:
    """Clients that believe each other dead send the same events: each is stored once, in order."""
    everything = [b"%d" % number for number in range(40)]

    def send() -> None:
        stream = served.stream("disk", "p")
        first = stream.read_greeting()["resume_at"]
        try:
            for number in range(first, 40):
                stream.write(everything[number], sequence=number)
            stream.finish()
        except flight.FlightError:
            return  # a newer stream took over

    tasks = [Task(send) for _ in range(6)]
    for task in tasks:
        task.result()
    final = served.stream("disk", "p")
    first = final.read_greeting()["resume_at"]
    for number in range(first, 40):
        final.write(everything[number], sequence=number)
    assert final.finish() == {"accepted": 40, "persisted": 40, "delivered": 0}
    assert values(served.node, "disk") == everything


def test_client_that_leaves_is_removed_from_the_waiting_line(served: ServedNode) -> None:
    client = served.client()
    command = {"publish": "memory", "producer": "p"}
    writer, reader = client.nodes[0].exchange(command)
    writer.begin(block_of([]).schema)
    writer.write_batch(block_of([b"x"] * 60))
    writer.write_batch(block_of([b"y"] * 60))
    queue = served.node.queue("memory")
    wait_until(lambda: queue.stats().blocked_publishers == 1)
    reader.cancel()
    wait_until(lambda: queue.stats().blocked_publishers == 0)
    assert values(served.node, "memory") == [b"x"] * 60


def test_extra_columns_are_kept(served: ServedNode) -> None:
    block = block_of([b"a"]).append_column("user", pa.array([7]))
    descriptor = flight.FlightDescriptor.for_command(b'{"publish": "disk"}')
    writer, _ = served.flight().do_put(descriptor, block.schema)
    writer.write_batch(block)
    writer.close()
    (_, read), *_ = served.client().read("disk")
    assert read.column("user").to_pylist() == [7]


def test_stop_ends_idle_and_waiting_streams(serve: Serve) -> None:
    """Flight itself would wait for their clients without end."""
    served = serve()
    idle = served.stream("disk", "idle")
    idle.read_greeting()
    waiting = served.stream("memory", "waiting")
    waiting.read_greeting()
    waiting.write(*[b"x"] * 100)
    waiting.wait_for_progress(accepted=100)
    waiting.write(b"y")
    wait_until(lambda: served.node.queue("memory").stats().blocked_publishers == 1)
    started = time.monotonic()
    served.plane.stop(timeout=10.0)
    assert time.monotonic() - started < 5
    assert idle.read_message() is not None  # progress, or the end
    assert [thread for thread in threading.enumerate() if thread.name == "turnlane-reporter"] == []


LEAVING = """
import sys
from pathlib import Path
from turnlane.node.flight.server import FlightPlane
from turnlane.node.node import Node
from turnlane.serving.address import Address
from turnlane.serving.auth import Authority

plane = FlightPlane(Node(Path(sys.argv[1]), {"q": {}}), Authority(), Address("127.0.0.1", 0))
plane.start()
print(plane.address, flush=True)
sys.stdin.readline()
"""


def test_program_that_ends_without_stop_does_not_hang(tmp_path: Path) -> None:
    """A client is connected and idle."""
    command = [sys.executable, "-c", LEAVING, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        with flight.FlightClient(f"grpc://{program.stdout.readline().strip()}") as client:
            stream = Stream(client, b'{"publish": "q"}')
            stream.read_greeting()
            program.stdin.write("\n")
            program.stdin.flush()
            assert program.wait(PATIENCE) == 0


def test_stop_ends_waiting_calls(serve: Serve) -> None:
    served = serve()
    client = served.client().nodes[0]
    wait = Task(lambda: client.wait("disk", 0, 60.0))
    consume = Task(lambda: list(client.get({"consume": "disk", "wait": 60}, None)))
    wait_until(lambda: len(state_of(served.node.queue("disk")).waiting_readers) == 2)
    started = time.monotonic()
    served.plane.stop(timeout=10.0)
    assert time.monotonic() - started < 5
    for task in (wait, consume):
        with pytest.raises(Exception, match=r"stopping|TransportDown|down|closed"):
            task.result()


def test_shutdown_of_connections_leaves_no_open_files(served: ServedNode) -> None:
    """A stop does this repeatedly, and most open files are not connections."""
    client = served.client()
    client.queue("disk").producer(ack="persisted").publish(b"x")
    shut_down_connections(0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert shut_down_connections(0) == 0
    assert (
        len(os.listdir("/proc/self/fd")) <= before + 2
    )  # other threads may open a few files, not twice as many


def test_check_of_connections_keeps_file_locks(served: ServedNode, tmp_path: Path) -> None:
    """A process that closes any descriptor of a file loses its locks on it; SQLite needs them."""
    address = served.plane.address
    with (
        (tmp_path / "locked").open("w") as file,
        socket.create_connection((address.host, address.port), PATIENCE) as client,
    ):
        fcntl.lockf(file, fcntl.LOCK_EX)
        wait_until(lambda: shut_down_connections(address.port) > 0)
        while client.recv(4096):  # HTTP/2 begins with settings
            pass
        abort_descriptor(file.fileno())
        attempt = "lockf(open(sys.argv[1], 'w'), LOCK_EX | LOCK_NB)"
        other = subprocess.run(
            [sys.executable, "-c", f"import sys; from fcntl import *; {attempt}", file.name],
            capture_output=True,
            check=False,
            text=True,
        )
        assert "BlockingIOError" in other.stderr


def test_hundred_waiting_calls_do_not_delay_publishing(served: ServedNode) -> None:
    node = served.client().nodes[0]
    waits = [Task(lambda: node.wait("memory", 0, 60.0)) for _ in range(100)]
    wait_until(lambda: len(state_of(served.node.queue("memory")).waiting_readers) == 100)
    stream = served.stream("disk")
    stream.write(b"a")
    started = time.monotonic()
    stream.finish()
    assert time.monotonic() - started < 5
    served.node.queue("memory").producer().publish(b"wake up")
    for wait in waits:
        assert wait.result().end == 1


def test_calls_beyond_the_limit_are_refused_temporarily(serve: Serve) -> None:
    served = serve(limits=FlightLimits(max_calls=1))
    stream = served.stream("disk")
    stream.read_greeting()
    with pytest.raises(flight.FlightUnavailableError, match="too many calls"):
        served.act("ping")
    stream.finish()
    wait_until(lambda: _is_answering(served))


def test_reading_streams_count_as_calls_until_they_end(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_refs, "READ_EVENTS", 10)
    served = serve(limits=FlightLimits(max_calls=2))
    served.node.queue("disk").producer().publish_block(block_of([bytes(100_000)] * 500))
    ticket = flight.Ticket(b'{"read": "disk"}')
    readers = [served.flight().do_get(ticket) for _ in range(2)]
    for reader in readers:
        reader.read_chunk()
    with pytest.raises(flight.FlightUnavailableError, match="too many calls"):
        served.act("ping")
    assert readers[0].read_all().num_rows < 500
    wait_until(lambda: _is_answering(served))
    readers[1].cancel()
    wait_until(lambda: served.plane.calls.running == 0)


def _is_answering(served: ServedNode) -> bool:
    try:
        return bool(served.act("ping"))
    except flight.FlightUnavailableError:
        return False


def test_sequence_map_stays_small_and_never_acks_early() -> None:
    """Without a consumer the map stays bounded, and no report comes too early."""
    queue = open_buffered_queue(kind="memory", size=10 * MAX_PAIRS)
    route = SequenceMap(queue)
    producer = queue.producer()
    for number in range(3 * MAX_PAIRS):
        producer.publish(b"x")
        route.record(number + 1)
    assert len(route._numbers) <= MAX_PAIRS
    assert route.get_progress().delivered == 0
    while queue.low < queue.end:
        queue.get(100).done()
        assert route.get_progress().delivered <= queue.low
    assert route.get_progress() == (3 * MAX_PAIRS,) * 3
    queue.close()


def test_stage_id_is_sent_after_the_sync(served: ServedNode, tmp_path: Path) -> None:
    stream = Stream(served.flight(), json.dumps({"stage": "disk"}).encode())
    stream.write(b"a", b"b")
    stream.write(b"c")
    answer = stream.finish()
    assert answer is not None
    assert answer["events"] == 3
    assert values(served.node, "disk") == []
    assert (tmp_path / "node" / "staging" / f"{answer['stage']}.stage").stat().st_size > 0
    assert served.act("commit", stages=[answer["stage"]]) == {"committed": True}
    assert values(served.node, "disk") == [b"a", b"b", b"c"]
