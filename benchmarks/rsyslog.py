"""rsyslogd as a peer: a daemon with one ruleset behind a queue, fed over TCP.

It is left at its default of never syncing its queue files and of writing their index only at the
end, which is faster than what turnlane does and loses messages in a crash.
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
"""A pure disk queue is bounded in messages too; imptcp is not slowed down by a delay mark."""

_CONFIG = """
global(workDirectory="{place}")
module(load="imptcp")
template(name="raw" type="string" string="%rawmsg%\\n")
input(type="imptcp" address="127.0.0.1" port="{port}" ruleset="in")
ruleset(name="in" queue.filename="queue" queue.timeoutEnqueue="600000" {queue}) {{
{rules}
}}
"""


def program() -> str | None:
    """Where rsyslogd is, if it is installed."""
    return shutil.which("rsyslogd", path="/usr/sbin:/usr/bin:/sbin:/bin")


@contextlib.contextmanager
def running(place: Path, kind: str, rules: str) -> Iterator[int]:
    """A daemon with a queue of this kind in front of the rules; gives the port it listens on."""
    port = _free_port()
    config = place / "rsyslog.conf"
    config.write_text(_CONFIG.format(place=place, port=port, queue=QUEUES[kind], rules=rules))
    found = program()
    assert found is not None, "asked for before"
    daemon = subprocess.Popen([found, "-n", "-f", str(config), "-i", str(place / "pid")])
    try:
        _await_listener(port)
        yield port
    finally:
        daemon.kill()  # what is left in its queue nobody wants
        daemon.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _await_listener(port: int) -> None:
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
