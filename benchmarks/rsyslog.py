"""Runs rsyslogd for comparison: a daemon with one ruleset behind a queue, which receives by TCP.

It has its default settings: it never syncs its queue files, and writes their index only at the end.
That is faster than turnlane's way, and loses messages in a crash.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

DISK, ASSISTED = "rsyslogd disk", "rsyslogd disk-assisted"
START_SECONDS = 20.0

QUEUES = {
    DISK: 'queue.type="Disk" queue.size="100000000"',
    ASSISTED: 'queue.type="LinkedList" queue.size="50000" queue.lightDelayMark="0"',
}
"""A disk queue has a limit of messages, too. Without a delay mark, imptcp is not slowed down."""

_CONFIG = """
global(workDirectory="{place}")
module(load="imptcp")
template(name="raw" type="string" string="%rawmsg%\\n")
input(type="imptcp" address="127.0.0.1" port="{port}" ruleset="in")
ruleset(name="in" queue.filename="queue" queue.timeoutEnqueue="600000" {queue}) {{
{rules}
}}
"""


def find_program() -> str | None:
    """Return the path of rsyslogd, if it is installed."""
    return shutil.which("rsyslogd", path="/usr/sbin:/usr/bin:/sbin:/bin")


@contextlib.contextmanager
def run_rsyslogd(place: Path, kind: str, rules: str) -> Iterator[int]:
    """Run a daemon with a queue of this kind in front of the rules; yields its port."""
    port = _find_free_port()
    config = place / "rsyslog.conf"
    config.write_text(_CONFIG.format(place=place, port=port, queue=QUEUES[kind], rules=rules))
    found = find_program()
    assert found is not None, "the caller has checked that rsyslogd is installed"
    daemon = subprocess.Popen([found, "-n", "-f", str(config), "-i", str(place / "pid")])
    try:
        _wait_for_listener(port)
        yield port
    finally:
        daemon.kill()  # The rest of its queue is not needed.
        daemon.wait()


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait_for_listener(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return
