"""Does cancelling a consumer leave the interpreter as it was?"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading, time
import turnlane

queue = turnlane.open_queue(kind="memory", completion_timeout="50ms")
begun, over = threading.Event(), threading.Event()

def consumer(batch):
    begun.set()
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            time.sleep(0.001)
    except BaseException:
        pass  # a consumer that swallows everything
    over.set()

with turnlane.WorkerPool(queue, consumer):
    queue.producer().publish(b"x")
    assert over.wait(20)
    while any(t.name.startswith("turnlane-worker") and t.name.endswith("-1")
              for t in threading.enumerate()):
        time.sleep(0.01)
queue.close()

def traced():
    return 1

sys.settrace(lambda *_: None)
traced()
sys.settrace(None)
print("went on")
"""


def test_a_traced_program_goes_on_after_a_consumer_was_cancelled() -> None:
    """Python 3.11 hangs for good if a cancellation was taken back instead of raised."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "went on\n", done.stderr
