"""HTTP: record requests and answers, and send the same requests again."""

from __future__ import annotations

import base64
import http.client
import json
from contextlib import closing
from typing import Any, Final
from urllib.parse import urlsplit

from tests.compatibility.comparison import find_differences, mask
from tests.compatibility.flight_exchange import VARYING
from tests.compatibility.identifiers import Identifiers
from tests.compatibility.running import TIMEOUT

Exchange = dict[str, Any]

KEPT_HEADERS: Final = ("content-type", "retry-after", "allow", "www-authenticate", "location")
WORDS: Final = {"detail", "timestamp", "took", "reasons", "_id", "cluster_uuid", "uid", "reason"}


class HttpRecorder:
    """Sends requests, and keeps them with their answers."""

    def __init__(self, servers: dict[str, str]) -> None:
        self.servers = servers
        """The addresses of a node and of its inputs, by name."""
        self.exchanges: list[Exchange] = []

    def send(
        self,
        method: str,
        path: str,
        body: Any = b"",
        *,
        server: str = "node",
        lines: int | None = None,
        **headers: str,
    ) -> dict[str, Any]:
        """Send a request, and return the JSON of its answer. Anything but bytes is sent as JSON."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if not isinstance(body, bytes):
            sent.setdefault("content-type", "application/json")
            body = json.dumps(body).encode()
        request: Exchange = {"server": server, "method": method, "path": path, "headers": sent}
        request["body"] = _encode_body(body)
        if lines is not None:
            request["lines"] = lines
        answer = send_request(request, self.servers, Identifiers())
        self.exchanges.append({"request": request, "answer": answer})
        found = answer.get("json", answer.get("lines", [{}])[0])
        return found if isinstance(found, dict) else {}


def send_request(
    request: Exchange, servers: dict[str, str], identifiers: Identifiers
) -> dict[str, Any]:
    """Send a recorded request and describe the answer."""
    address = urlsplit(servers[request["server"]]).netloc or servers[request["server"]]
    with closing(http.client.HTTPConnection(address, timeout=TIMEOUT)) as connection:
        connection.request(
            request["method"],
            identifiers.to_actual(request["path"]),
            _decode_body(identifiers.to_actual(request["body"])),
            request["headers"],
        )
        response = connection.getresponse()
        answer: dict[str, Any] = {
            "status": response.status,
            "headers": {
                name: value for name in KEPT_HEADERS if (value := response.getheader(name))
            },
        }
        if "allow" in answer["headers"]:
            answer["headers"]["allow"] = sorted(answer["headers"]["allow"].split(", "))
        if "lines" in request:  # of a stream that does not end by itself
            answer["lines"] = [_shorten(response.readline()) for _ in range(request["lines"])]
            return answer
        content = response.read()
    if "json" in answer["headers"].get("content-type", ""):
        answer["json"] = json.loads(content)
    elif answer["status"] < 400:  # else it is a text for people, in some encoding
        answer["body"] = _encode_body(content)
    return answer


def _shorten(line: bytes) -> Any:
    """Keep one row of a line: it is chance how many events come in one."""
    found = json.loads(line)
    return {**found, "rows": found["rows"][:1]} if "rows" in found else found


def replay_requests(exchanges: list[Exchange], servers: dict[str, str]) -> list[str]:
    """Send recorded requests to a node and its inputs; return the differences of the answers."""
    identifiers = Identifiers()
    differences: list[str] = []
    for number, exchange in enumerate(exchanges):
        request = exchange["request"]
        answer = send_request(request, servers, identifiers)
        identifiers.bind(exchange["answer"], answer)
        place = f"request {number}, {request['method']} {request['path']}"
        differences += find_differences(
            mask(exchange["answer"], VARYING | WORDS),
            mask(identifiers.to_recorded(answer), VARYING | WORDS),
            place,
        )
    return differences


def _encode_body(body: bytes) -> str:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(body).decode()
    return text


def _decode_body(text: str) -> bytes:
    prefix = "base64:"
    return base64.b64decode(text[len(prefix) :]) if text.startswith(prefix) else text.encode()
