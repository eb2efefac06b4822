"""The input ``otlp_grpc``: logs, metrics and traces from OpenTelemetry's exporters, over gRPC."""

from __future__ import annotations

import contextlib
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Final, Literal, NoReturn

from pydantic import Field

from turnlane.errors import ConfigError, RetryLater
from turnlane.formats.otlp import Grain, Signal, answer, retry_info, status
from turnlane.inputs.api import Host, Input, InputSettings
from turnlane.inputs.otlp import Exports
from turnlane.inputs.publishers import THREADS, AnsweringPublisher, AnsweringSettings
from turnlane.serving.address import ConnectionWatch, normalize_host
from turnlane.serving.auth import Authority, Right, TlsSettings, parse_bearer
from turnlane.serving.http_body import get_retry_after, get_status
from turnlane.serving.threads import DeadlineTimer
from turnlane.units import Duration, Size

try:
    import grpc
except ImportError as missing:
    raise ImportError(
        f"OTLP over gRPC needs {missing.name}: pip install 'turnlane[grpc]'", name=missing.name
    ) from missing

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

_LONGEST_DETAILS: Final = 512
"""Characters: details travel in a header."""

PATIENT: Final = THREADS // 2
"""So many requests may take ``body_timeout`` to send their message at one time."""
HURRIED_SECONDS: Final = 1.0
"""How long the others may take, so that nobody who sends nothing can keep all threads waiting."""


class OtlpGrpcSettings(AnsweringSettings):
    """The settings of the input ``otlp_grpc``."""

    type: Literal["otlp_grpc"] = "otlp_grpc"
    split: Grain = Field(
        Grain.RECORD, description="What becomes one event: a `record`, or the whole `request`."
    )
    max_message_bytes: Size = Field(
        16 * 2**20, ge=1, le=2**31 - 1, description="The largest request, also once it is unpacked."
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
        30.0, gt=0, description="How long a request's message may take to come."
    )

    def options(self) -> list[tuple[str, int]]:
        """The settings in gRPC's words."""
        return [
            ("grpc.so_reuseport", 0),  # a second server on the same port is an error, not a twin
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.absolute_max_metadata_size", self.max_header_bytes),
            ("grpc.max_metadata_size", self.max_header_bytes),
            ("grpc.max_concurrent_streams", self.max_streams),
            ("grpc.max_connection_idle_ms", round(self.idle_timeout * 1000)),
        ]


class OtlpGrpcInput(Input):
    """Refuses with ``RetryInfo``, so that exporters send again what there was no room for."""

    settings_type: ClassVar[type[InputSettings]] = OtlpGrpcSettings
    settings: OtlpGrpcSettings

    def __init__(self, settings: OtlpGrpcSettings, host: Host) -> None:
        super().__init__(settings, host)
        self._publisher = AnsweringPublisher(host, settings)
        self._exports = Exports(self._publisher, settings.queue, settings.split)
        self._authority = Authority(settings.tokens)
        self._address = settings.listen
        self._workers: ThreadPoolExecutor | None = None
        self._patient = threading.BoundedSemaphore(PATIENT)
        self._deadlines: DeadlineTimer | None = None
        self._hurried: DeadlineTimer | None = None
        self._watch: ConnectionWatch | None = None
        self._server: Any = None

    @property
    def address(self) -> str:
        return str(self._address)

    def start(self) -> None:
        self.settings.check_exposed()
        self._publisher.check("queue", self.settings.queue)
        if self.settings.listen.port:
            self.settings.listen.listen().close()  # gRPC does not say so that a port is taken
        # Threads take the requests in turn. A request is read when its turn comes, so those
        # that wait cost no memory; refusing them here would make exporters drop what they hold.
        seconds, name = self.settings.body_timeout, f"turnlane-{self.settings.label}-late"
        self._deadlines = DeadlineTimer(seconds, name)
        self._hurried = DeadlineTimer(min(seconds, HURRIED_SECONDS), name)
        self._workers = ThreadPoolExecutor(THREADS, f"turnlane-{self.settings.label}")
        self._server = grpc.server(self._workers, options=self.settings.options())
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    service, {"Export": grpc.stream_unary_rpc_method_handler(self._export(signal))}
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
        for deadlines in filter(None, (self._deadlines, self._hurried)):
            deadlines.close()
        if self._watch is not None:
            self._watch.close()

    def _bind(self) -> int:
        place = str(self.settings.listen)
        try:
            if self.settings.tls is None:
                port: int = self._server.add_insecure_port(place)
            else:
                port = self._server.add_secure_port(place, _credentials(self.settings.tls))
        except RuntimeError as error:
            self.stop(0.0)
            raise ConfigError("listen", f"cannot listen on {place}: {error}") from None
        return port

    def _export(self, signal: Signal) -> Callable[[Iterator[bytes], Any], bytes]:
        """The handler of a signal.

        To gRPC it is one of streams, though one message comes: only so is it called before that,
        and strangers are refused before they can keep a thread waiting.
        """

        def export(messages: Iterator[bytes], context: Any) -> bytes:  # noqa: ANN401
            try:
                self._authority.check(_token(context), Right.PUBLISH, self.settings.queue)
                return self._take(signal, self._message(messages, context), context)
            except Exception as error:
                if get_status(error) not in _CODES:
                    raise  # a bug: gRPC logs it and answers UNKNOWN
                self._refuse(context, error)

        return export

    def _message(self, messages: Iterator[bytes], context: Any) -> bytes:  # noqa: ANN401
        """The message of a request; one that does not come in time is cancelled."""
        with self._limited(context.cancel):
            body = next(messages, None)
        if body is None:
            raise ValueError("the request has no message")
        return body

    @contextlib.contextmanager
    def _limited(self, call_off: Callable[[], object]) -> Iterator[None]:
        """Wait for a message no longer than may be while others do."""
        assert self._deadlines is not None
        assert self._hurried is not None
        if not self._patient.acquire(blocking=False):
            with self._hurried.limit(call_off):
                yield
            return
        try:
            with self._deadlines.limit(call_off):
                yield
        finally:
            self._patient.release()

    def _take(self, signal: Signal, body: bytes, context: Any) -> bytes:  # noqa: ANN401
        self.count(bytes=len(body))
        if not context.is_active():
            raise RetryLater("the exporter has stopped waiting")  # it will send this again
        deadline = self._publisher.deadline()
        done = self._exports.take(signal, body, deadline, source=_source(context.peer()))
        self.count(events=done.events, invalid=1 if done.rejected else 0)
        return answer(signal, rejected=done.rejected, why=done.why)

    def _refuse(self, context: Any, error: Exception) -> NoReturn:  # noqa: ANN401
        code = _CODES[get_status(error)]
        message = str(error)[:_LONGEST_DETAILS]
        details = b""
        later = code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
        self.count(**{"refused" if later else "invalid": 1})
        if later:
            details = retry_info(get_retry_after(error))
            found = status(code.value[0], message, details=details)
            # The specification's place for it, and the one where the Python exporter looks.
            context.set_trailing_metadata(
                (("grpc-status-details-bin", found), ("google.rpc.retryinfo-bin", details))
            )
        context.abort(code, message)
        raise AssertionError  # abort has raised


def _credentials(tls: TlsSettings) -> Any:  # noqa: ANN401
    tls.context()  # gRPC would only say that it failed, not why
    return grpc.ssl_server_credentials(
        [(tls.key.read_bytes(), tls.cert.read_bytes())],
        root_certificates=None if tls.client_ca is None else tls.client_ca.read_bytes(),
        require_client_auth=tls.client_ca is not None,
    )


def _token(context: Any) -> str | None:  # noqa: ANN401
    shown: dict[str, str] = dict(context.invocation_metadata())
    return parse_bearer(shown.get("authorization"))


def _source(peer: str) -> str:
    """``127.0.0.1`` from ``ipv4:127.0.0.1:51200``, ``::1`` from ``ipv6:%5B::1%5D:51200``."""
    kind, _, place = urllib.parse.unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return normalize_host(place.rpartition(":")[0].strip("[]"))
