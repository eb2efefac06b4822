"""Acknowledged events survive kill -9 under load."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.contract.harness import wait_until
from tests.inputs.otlp_senders import make_logs_request, parse_request
from tests.inputs.web_inputs import WEB, open_node, read_events

ROOT = Path(__file__).parents[2]
ENOUGH = 15


def post_http(address: str, name: str) -> bool:
    answer = WEB.post(f"http://{address}/", content=name.encode())
    return answer.status_code == 200


def post_otlp(address: str, name: str) -> bool:
    body = make_logs_request(name).SerializeToString()
    headers = {"content-type": "application/x-protobuf"}
    return WEB.post(f"http://{address}/v1/logs", content=body, headers=headers).status_code == 200


def post_bulk(address: str, name: str) -> bool:
    body = json.dumps({"index": {"_id": name}}) + "\n{}\n"
    answer = WEB.post(f"http://{address}/shop/_bulk", content=body)
    return answer.status_code == 200 and not answer.json()["errors"]


SENDERS = {"http": post_http, "otlp": post_otlp, "elasticsearch": post_bulk}


def send(kind: str, post: Callable[[str, str], bool], address: str, told: list[str]) -> None:
    """Post until the server is gone; collect the acknowledged events."""
    number = 0
    while True:
        name = f"{kind}-{number}"
        try:
            if post(address, name):
                told.append(name)
        except httpx.TransportError:
            return
        number += 1


def test_acknowledged_events_survive_a_kill(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.inputs.killed_web_process", str(tmp_path)]
    told: dict[str, list[str]] = {kind: [] for kind in SENDERS}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as victim:
        assert victim.stdout is not None
        addresses = json.loads(victim.stdout.readline())
        senders = [
            threading.Thread(target=send, args=(kind, post, addresses[kind], told[kind]))
            for kind, post in SENDERS.items()
        ]
        for sender in senders:
            sender.start()
        try:
            wait_until(lambda: all(len(names) >= ENOUGH for names in told.values()), "enough")
        finally:
            victim.kill()
            for sender in senders:
                sender.join()
    with open_node(tmp_path) as node:
        there = set()
        for event in read_events(node):
            headers = event.headers or {}
            if "signal" in headers:
                [resource] = parse_request(event).resource_logs
                there.add(resource.scope_logs[0].log_records[0].body.string_value)
            else:
                there.add(event.key if "index" in headers else (event.value or b"").decode())
    for names in told.values():
        assert set(names) <= there
