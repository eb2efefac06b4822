"""The URL of a database selects its dialect; an invalid URL is refused with the reason."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from turnlane.databases import (
    ConnectOptions,
    add_password,
    check_url_setting,
    get_dialect_name,
    load_dialect,
    remove_password,
)
from turnlane.errors import ConfigError, NotSupported, RetryLater


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("sqlite:///a.db", "sqlite"),
        ("postgresql://u@h/d", "postgres"),
        ("postgres://u@h/d", "postgres"),
        ("mysql://u@h/d", "mysql"),
        ("mariadb://u@h/d", "mysql"),
    ],
)
def test_a_url_selects_its_dialect(url: str, name: str) -> None:
    assert get_dialect_name(url) == load_dialect(url).name == name


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("oracle://u:secret@h/d", "'oracle' is not a database that turnlane supports"),
        ("u:secret@h", "is not a URL"),
        ("sqlite:///", "name a file"),
        ("sqlite:///:memory:", "name a file"),
        ("mysql://u:secret@h/d?pool=3", "there is no option 'pool'"),
        ("mysql://u:secret@h/d?read_timeout=soon", "number of seconds"),
        ("postgresql://u:secret@h/d?pool=3", "is not a URL that PostgreSQL's driver can read"),
    ],
)
def test_a_wrong_url_is_refused_without_its_password(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_dialect(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://u:secret@h/d", "contains a password"),
        ("mysql://u@h/d?pool=3", "there is no option 'pool'; there are unix_socket, ssl_ca, "),
        ("mariadb://u@h/d?read_timeout=0", "read_timeout is a number of seconds, not '0'"),
    ],
)
def test_a_url_setting_is_checked_without_a_driver(
    url: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pymysql", None)
    with pytest.raises(ValueError, match=message):
        check_url_setting(url)
    for right in ("mysql://u@h/d?read_timeout=5&ssl_ca=a.pem", "sqlite:///a.db?pool=3"):
        assert check_url_setting(right) == right


@pytest.mark.parametrize(
    ("driver", "module", "extra"),
    [("psycopg", "postgres", "postgres"), ("pymysql", "mysql", "mysql")],
)
def test_a_missing_driver_names_the_extra_to_install(
    driver: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, driver, None)
    monkeypatch.delitem(sys.modules, f"turnlane.databases.{module}", raising=False)
    with pytest.raises(NotSupported, match=rf"pip install 'turnlane\[{extra}\]'.*{driver}"):
        load_dialect(f"{extra}://u@h/d")


def test_passwords_are_added_and_removed() -> None:
    assert add_password("mysql://u@h:1/d", "a/b@") == "mysql://u:a%2Fb%40@h:1/d"
    assert add_password("mysql://u:old@h/d", "new") == "mysql://u:new@h/d"
    assert add_password("sqlite:///a.db", "x") == "sqlite:///a.db"
    assert remove_password("mysql://u:x@h/d?read_timeout=1") == "mysql://u@h/d?read_timeout=1"
    with pytest.raises(ConfigError, match="names no user"):
        add_password("mysql://h/d", "x")


def test_options_take_precedence_over_the_url() -> None:
    options = ConnectOptions(password="mine", connect_timeout=3.0, timeout=7.5, mysql_user="root")
    mysql: Any = load_dialect("mysql://h/d?connect_timeout=9&read_timeout=9", options)
    given = mysql._arguments
    assert (given["user"], given["password"]) == ("root", "mine")
    assert (given["connect_timeout"], given["read_timeout"], given["write_timeout"]) == (3, 7, 7)
    postgres: Any = load_dialect("postgresql://u:theirs@h/d?connect_timeout=9", options)
    given = postgres._arguments
    assert (given["password"], given["connect_timeout"]) == ("mine", 3)
    assert given["tcp_user_timeout"] == 7_500
    assert "options" not in given, "poolers refuse it"
    assert postgres._limit == 7_500


def test_a_file_of_another_program_is_neither_created_nor_changed(tmp_path: Path) -> None:
    file = tmp_path / "a.db"
    options = ConnectOptions(sqlite_must_exist=True)
    with pytest.raises(RetryLater, match=r"SQLite: there is no .*a\.db"):
        load_dialect(f"sqlite:///{file}", options).connect()
    assert not file.exists()
    file.touch()
    connection = load_dialect(f"sqlite:///{file}", options).connect()
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    connection.close()
