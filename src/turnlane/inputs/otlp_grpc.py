"""The input ``otlp_grpc``: logs, metrics and traces from OpenTelemetry's exporters, over gRPC."""

from __future__ import annotations

import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Final, Literal, NoReturn

from pydantic import Field

from turnlane.errors import ConfigError, RetryLater
from turnlane.formats.otlp import (
    Signal,
    SplitUnit,
    encode_response,
    encode_retry_info,
    encode_status,
)
from turnlane.inputs.api import Host, Input, InputSettings
from turnlane.inputs.otlp import ExportPublisher
from turnlane.inputs.publishers import THREADS, RequestPublisher, RequestSettings
from turnlane.plugins import require_extra
from turnlane.runtime import PeriodicThread
from turnlane.serving.address import ConnectionWatch, normalize_host
from turnlane.serving.auth import Authority, Right, TlsSettings, parse_bearer
from turnlane.serving.body_budget import BodyBudget
from turnlane.serving.http_problems import get_retry_after, get_status
from turnlane.units import Duration, Size

with require_extra("grpc", "OTLP over gRPC"):
    import grpc

_SERVICES: Final = {
    Signal.LOGS: "opentelemetry.proto.collector.logs.v1.LogsService",
    Signal.METRICS: "opentelemetry.proto.collector.metrics.v1.MetricsService",
    Signal.TRACES: "opentelemetry.proto.collector.trace.v1.TraceService",
}

_CODES: Final = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}

_MAX_DETAILS: Final = 512
"""Characters: details are sent in a header."""

SHARE_OF_BUDGET: Final = 0.5
"""gRPC does not show a message before all of it has arrived. So as many messages may arrive at a
time as have room in this share of the node's budget, each with the largest size; a complete message
takes its own size from the budget, as bodies of HTTP do."""
SHORT_BODY_TIMEOUT: Final = 1.0
"""Seconds for the messages of other requests: silent clients must not block all threads."""


class OtlpGrpcSettings(RequestSettings, InputSettings):
    """The settings of the input ``otlp_grpc``."""

    type: Literal["otlp_grpc"] = "otlp_grpc"
    split: SplitUnit = Field(
        SplitUnit.RECORD,
        description="One event for each `record`, or for the whole `request`.",
    )
    max_message_bytes: Size = Field(
        16 * 2**20,
        ge=1,
        le=2**31 - 1,
        description="The largest request, also when decompressed.",
    )
    max_header_bytes: Size = Field(
        64 * 2**10, ge=1024, le=2**31 - 1, description="The most bytes of a request's headers."
    )
    max_connections: int = Field(1000, ge=1, description="The most connections at a time.")
    max_streams: int = Field(
        100, ge=1, description="The most requests at a time of one connection; others wait."
    )
    idle_timeout: Duration = Field(
        300.0, ge=1, description="How long a connection stays open without a request."
    )
    body_timeout: Duration = Field(
        30.0, gt=0, description="How long a request may take to send its message."
    )

    def build_options(self) -> list[tuple[str, int]]:
        """Return the settings as gRPC's options."""
        return [
            ("grpc.so_reuseport", 0),  # a second server on the same port is an error
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.absolute_max_metadata_size", self.max_header_bytes),
            ("grpc.max_metadata_size", self.max_header_bytes),
            ("grpc.max_concurrent_streams", self.max_streams),
            ("grpc.max_connection_idle_ms", round(self.idle_timeout * 1000)),
        ]


class OtlpGrpcInput(Input):
    """Accepts exports over gRPC; refuses with ``RetryInfo``, so exporters send them again later."""

    settings_type: ClassVar[type[InputSettings]] = OtlpGrpcSettings
    settings: OtlpGrpcSettings

    def __init__(self, settings: OtlpGrpcSettings, host: Host) -> None:
        super().__init__(settings, host)
        self._publisher = RequestPublisher(host, settings, settings.ack)
        self._exports = ExportPublisher(self._publisher, settings.queue, settings.split)
        self._authority = Authority(settings.tokens)
        self._address = settings.listen
        self._workers: ThreadPoolExecutor | None = None
        self._body_budget: BodyBudget = getattr(host, "body_budget", None) or BodyBudget()
        room = round(SHARE_OF_BUDGET * self._body_budget.limit) // settings.max_message_bytes
        arriving = min(max(2, room), THREADS)
        self._arrivals = threading.BoundedSemaphore(arriving)
        self._slow_requests = threading.BoundedSemaphore(arriving // 2)
        """The requests that may use all of ``body_timeout`` to send their message."""
        self._deadlines: dict[Any, float] = {}
        """Calls that wait for their message, and until when; guarded by the lock."""
        self._deadlines_lock = threading.Lock()
        self._canceller: PeriodicThread | None = None
        self._watch: ConnectionWatch | None = None
        self._server: Any = None

    @property
    def address(self) -> str:
        return str(self._address)

    def start(self) -> None:
        self.settings.check_exposed()
        self._publisher.check_queue("queue", self.settings.queue)
        if self.settings.listen.port:
            self.settings.listen.listen().close()  # gRPC gives no reason if the port is in use
        # Threads serve the requests in turn and read a request only then, so waiting requests cost
        # no memory. If they were refused here, exporters would drop their records.
        pause = min(self.settings.body_timeout, SHORT_BODY_TIMEOUT) / 10
        name = f"turnlane-{self.settings.label}-late"
        self._canceller = PeriodicThread(name, self._cancel_late_calls, pause)
        self._workers = ThreadPoolExecutor(THREADS, f"turnlane-{self.settings.label}")
        self._server = grpc.server(self._workers, options=self.settings.build_options())
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    service,
                    {"Export": grpc.stream_unary_rpc_method_handler(self._make_handler(signal))},
                )
                for signal, service in _SERVICES.items()
            ]
        )
        self._address = self.settings.listen.with_port(self._bind())
        self._server.start()
        self._watch = ConnectionWatch(self._address.port, self.settings.max_connections)

    def stop(self, timeout: float) -> None:
        if self._server is not None and self._workers is not None:
            self._server.stop(timeout).wait(timeout + 5.0)
            self._workers.shutdown(wait=False)
        if self._canceller is not None:
            self._canceller.close()
        if self._watch is not None:
            self._watch.close()

    def _bind(self) -> int:
        address = str(self.settings.listen)
        try:
            if self.settings.tls is None:
                port: int = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, _build_credentials(self.settings.tls))
        except RuntimeError as error:
            self.stop(0.0)
            raise ConfigError("listen", f"cannot listen on {address}: {error}") from None
        return port

    def _make_handler(self, signal: Signal) -> Callable[[Iterator[bytes], Any], bytes]:
        """Return the handler of a signal.

        It is a handler of streams although each stream has one message: gRPC calls it before that
        message has arrived, so clients without a token cannot keep a thread waiting.
        """

        def export(messages: Iterator[bytes], context: Any) -> bytes:  # noqa: ANN401
            try:
                self._authority.check(_get_token(context), Right.PUBLISH, self.settings.queue)
                with self._body_budget.open_share() as share:
                    body = self._read_message(messages, context)
                    share.add(len(body))
                    return self._publish(signal, body, context)
            except Exception as error:
                if get_status(error) not in _CODES:
                    raise  # a bug: gRPC logs it and answers UNKNOWN
                self._refuse(context, error)

        return export

    def _read_message(self, messages: Iterator[bytes], context: Any) -> bytes:  # noqa: ANN401
        """Return the message of a request; the call is cancelled if it does not arrive in time."""
        timeout = self.settings.body_timeout
        if not self._arrivals.acquire(timeout=self.settings.timeout):
            raise RetryLater("too many requests send their messages at the moment")
        may_be_slow = self._slow_requests.acquire(blocking=False)
        if not may_be_slow:
            timeout = min(timeout, SHORT_BODY_TIMEOUT)
        with self._deadlines_lock:
            self._deadlines[context] = time.monotonic() + timeout
        try:
            body = next(messages, None)
        finally:
            with self._deadlines_lock:
                self._deadlines.pop(context, None)
            if may_be_slow:
                self._slow_requests.release()
            self._arrivals.release()
        if body is None:
            raise ValueError("the request has no message")
        return body

    def _cancel_late_calls(self) -> None:
        now = time.monotonic()
        with self._deadlines_lock:
            late = [context for context, deadline in self._deadlines.items() if deadline <= now]
            for context in late:
                del self._deadlines[context]
        for context in late:
            context.cancel()

    def _publish(self, signal: Signal, body: bytes, context: Any) -> bytes:  # noqa: ANN401
        self.count(bytes=len(body))
        if not context.is_active():
            raise RetryLater("the exporter has stopped waiting")  # it sends this again
        deadline = self._publisher.get_deadline()
        source = parse_peer(context.peer())
        with self._publisher.refuse_costly_request():
            result = self._exports.publish(signal, body, deadline, source=source)
        self.count(events=result.events, invalid=1 if result.rejected else 0)
        return encode_response(signal, rejected=result.rejected, why=result.why)

    def _refuse(self, context: Any, error: Exception) -> NoReturn:  # noqa: ANN401
        code = _CODES[get_status(error)]
        message = str(error)[:_MAX_DETAILS]
        later = code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
        self.count(**{"refused" if later else "invalid": 1})
        if later:
            details = encode_retry_info(get_retry_after(error))
            full = encode_status(code.value[0], message, details=details)
            # Where the specification puts it, and where the Python exporter looks.
            context.set_trailing_metadata(
                (("grpc-status-details-bin", full), ("google.rpc.retryinfo-bin", details))
            )
        context.abort(code, message)
        raise AssertionError  # abort has raised


def _build_credentials(tls: TlsSettings) -> Any:  # noqa: ANN401
    tls.context()  # raises with the reason; gRPC gives none
    return grpc.ssl_server_credentials(
        [(tls.key.read_bytes(), tls.cert.read_bytes())],
        root_certificates=None if tls.client_ca is None else tls.client_ca.read_bytes(),
        require_client_auth=tls.client_ca is not None,
    )


def _get_token(context: Any) -> str | None:  # noqa: ANN401
    metadata: dict[str, str] = dict(context.invocation_metadata())
    return parse_bearer(metadata.get("authorization"))


def parse_peer(peer: str) -> str:
    """Return ``127.0.0.1`` from ``ipv4:127.0.0.1:51200``, ``::1`` from ``ipv6:%5B::1%5D:51200``."""
    kind, _, address = urllib.parse.unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return normalize_host(address.rpartition(":")[0].strip("[]"))
