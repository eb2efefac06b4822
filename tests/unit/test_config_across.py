"""Sections that are valid alone and wrong together are refused with their positions."""

from __future__ import annotations

import pytest

from turnlane.config import ConfigFileError, loads


def load_with_issues(text: str) -> list[str]:
    try:
        loads(text, "c.yaml", {})
    except ConfigFileError as faults:
        return str(faults).splitlines()
    return []


# ── two listeners in one place ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("node", "inputs", "fault"),
    [
        (
            "flight: {listen: ':9000'}, http: {listen: ':9000'}",
            "[]",
            "1:59: node.http.listen: node.flight.listen listens on 127.0.0.1:9000 already",
        ),
        (  # with the address that a plane has if nothing is said
            "http: {}",
            "[{type: http, listen: 'localhost:8088', queue: a}]",
            "3:31: inputs[0].listen: node.http.listen listens on 127.0.0.1:8088 already",
        ),
        (
            "flight: {listen: ':8088'}",
            "[]",
            "1:34: node.flight.listen: node.http.listen listens on 127.0.0.1:8088 already",
        ),
        (
            "http: {}",
            "[{type: syslog, tcp: ':514', queue: a}, {type: syslog, tcp: ':514', queue: a}]",
            "3:69: inputs[1].tcp: inputs[0].tcp listens on 127.0.0.1:514 already",
        ),
        (  # everywhere is also here
            "insecure: true, http: {listen: '*:514'}",
            "[{type: syslog, tcp: ':514', queue: a}]",
            "3:30: inputs[0].tcp: node.http.listen listens on 0.0.0.0:514 already",
        ),
    ],
)
def test_two_listeners_on_one_address_are_refused(node: str, inputs: str, fault: str) -> None:
    text = f"node: {{data: d, {node}}}\nqueues: {{a: {{}}}}\ninputs: {inputs}\n"
    assert load_with_issues(text) == [f"c.yaml:{fault}; choose another port"]


def test_listeners_on_different_addresses_are_accepted() -> None:
    """Other hosts, other protocols, free ports, planes that are not served."""
    assert not load_with_issues(
        "node: {data: d, flight: {enabled: false, listen: ':9000'}, http: {listen: ':9000'}}\n"
        "queues: {a: {}}\n"
        "inputs:\n"
        "  - {type: syslog, tcp: ':514', udp: ':514', queue: a}\n"
        "  - {type: syslog, tcp: '127.0.0.2:514', queue: a}\n"
        "  - {type: http, listen: ':0', queue: a}\n"
        "  - {type: http, listen: ':0', queue: a}\n"
    )


def test_invalid_address_is_reported_once() -> None:
    (fault,) = load_with_issues(
        "node: {data: d, http: {listen: nowhere}, flight: {listen: nowhere:1}}"
    )
    assert "1:32: node.http.listen: " in fault


# ── names of queues ──────────────────────────────────────────────────────────────────────────────


def test_route_to_an_unknown_queue_is_refused() -> None:
    routes = "{/a/*: orders, /b/*: order, /c/*: bills}"
    assert load_with_issues(
        "node: {data: d}\nqueues: {orders: {}}\n"
        f"inputs: [{{type: http, listen: ':0', queue: orders, routes: {routes}}}]"
    ) == [
        "c.yaml:3:81: inputs[0].routes./b/*: there is no queue 'order'; did you mean orders?",
        "c.yaml:3:94: inputs[0].routes./c/*: there is no queue 'bills'; add it to queues",
    ]


def node_with(*tokens: str) -> str:
    entries = "".join(
        f"    - {{name: t{at}, secret: s{at}, rights: {{{rights}}}}}\n"
        for at, rights in enumerate(tokens)
    )
    return f"node:\n  data: d\n  tokens:\n{entries}queues: {{orders: {{}}}}\n"


def test_right_on_an_unknown_queue_is_refused() -> None:
    (fault,) = load_with_issues(node_with("orders: [read], ordres: [publish]"))
    assert fault.startswith("c.yaml:4:55: node.tokens[0].rights.ordres: there is no queue 'ordres'")
    assert fault.endswith("did you mean orders?")


def test_rights_on_patterns_and_creatable_queues_are_accepted() -> None:
    assert not load_with_issues(node_with("team-*: [read], 'order?': [publish]"))
    assert not load_with_issues(node_with("jobs: [publish]", "jo*: [admin]")), "made while it runs"
    assert load_with_issues(node_with("jobs: [publish]", "other*: [admin]"))


def test_rights_on_queues_of_the_pipeline_are_accepted() -> None:
    assert not load_with_issues(
        node_with("main: [publish], main.dead: [read], alerts: [read]")
        + "parse: {format: json, on_error: dead}\n"
        "actions: [{name: alerts, queue: disk, output: {type: file, path: x}}]\n"
    )


# ── files inputs that would read files of the node ───────────────────────────────────────────────

OWN_FILES = """
node: {{data: {data}}}
queues: {{a: {{}}}}
tables: {{jobs: {{url: "sqlite:////srv/shop/jobs.db"}}}}
inputs: [{{type: files, queue: a, {knobs}}}]
"""


@pytest.mark.parametrize(
    ("knobs", "found"),
    [
        ("paths: /srv/node/queues/*/*", "the data directory"),
        ("paths: [/var/log/*.log, /srv/**]", "the data directory"),
        ("paths: '/srv/**/*.json'", "the data directory"),
        ("paths: /srv/node/*", "the data directory"),
        ("paths: /srv/node/inputs/files.json", "the data directory"),
        ("paths: '/srv/**', exclude: '*.chunk'", "the data directory"),
        ("paths: /srv/shop/*", "a SQLite database that the node uses"),
        ("paths: /srv/shop/jobs.db", "a SQLite database that the node uses"),
        ("paths: '/srv/shop/*-wal'", "a SQLite database that the node uses"),
    ],
)
def test_files_input_that_reads_files_of_the_node_is_refused(knobs: str, found: str) -> None:
    (issue,) = load_with_issues(OWN_FILES.format(data="/srv/node", knobs=knobs))
    assert "inputs[0].paths" in issue
    assert f"matches files of {found}; choose other globs, or add `exclude`" in issue


@pytest.mark.parametrize(
    "knobs",
    [
        "paths: /var/log/**",
        "paths: '/srv/*'",
        "paths: '/srv/**/*.log'",
        "paths: /srv/shop/*.log",
        "paths: /srv/nodes/*",
        "paths: '/srv/**', exclude: ['/srv/node/*', '/srv/shop/jobs.db*']",
        "paths: '/srv/shop/*', exclude: 'jobs.db*'",
    ],
)
def test_files_input_beside_files_of_the_node_is_accepted(knobs: str) -> None:
    assert not load_with_issues(OWN_FILES.format(data="/srv/node", knobs=knobs))


def test_files_input_below_a_relative_data_directory_is_refused() -> None:
    (issue,) = load_with_issues(OWN_FILES.format(data="data", knobs="paths: './**'"))
    assert "'./**' matches files of the data directory" in issue


def test_files_input_above_a_hidden_data_directory_is_accepted() -> None:
    """A glob does not find hidden names."""
    assert not load_with_issues(OWN_FILES.format(data="/opt/.node", knobs="paths: '/opt/**'"))
    assert load_with_issues(OWN_FILES.format(data="/opt/.node", knobs="paths: '/opt/.*/**'"))


def test_files_input_that_reads_the_database_of_a_table_input_is_refused() -> None:
    (issue,) = load_with_issues(
        "node: {data: d}\nqueues: {a: {}}\ninputs:\n"
        "  - {type: table, queue: a, table: jobs, url: 'sqlite:///shop/jobs.db'}\n"
        "  - {type: files, queue: a, paths: 'shop/*'}\n"
    )
    assert "inputs[1].paths: 'shop/*' matches files of a SQLite database" in issue
