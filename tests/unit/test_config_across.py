"""What is right section by section and wrong together: is it found, and pointed at?"""

from __future__ import annotations

import pytest

from turnlane.config import ConfigFileError, loads


def faults_of(text: str) -> list[str]:
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
def test_two_listeners_cannot_have_one_place(node: str, inputs: str, fault: str) -> None:
    text = f"node: {{data: d, {node}}}\nqueues: {{a: {{}}}}\ninputs: {inputs}\n"
    assert faults_of(text) == [f"c.yaml:{fault}; choose another port"]


def test_listeners_in_different_places_do_not_disturb_each_other() -> None:
    """Other hosts, other protocols, free ports, planes that are not served."""
    assert not faults_of(
        "node: {data: d, flight: {enabled: false, listen: ':9000'}, http: {listen: ':9000'}}\n"
        "queues: {a: {}}\n"
        "inputs:\n"
        "  - {type: syslog, tcp: ':514', udp: ':514', queue: a}\n"
        "  - {type: syslog, tcp: '127.0.0.2:514', queue: a}\n"
        "  - {type: http, listen: ':0', queue: a}\n"
        "  - {type: http, listen: ':0', queue: a}\n"
    )


def test_an_address_that_is_none_is_told_once() -> None:
    (fault,) = faults_of("node: {data: d, http: {listen: nowhere}, flight: {listen: nowhere:1}}")
    assert "1:32: node.http.listen: " in fault


# ── names of queues ──────────────────────────────────────────────────────────────────────────────


def test_a_route_leads_to_a_queue_that_there_is() -> None:
    routes = "{/a/*: orders, /b/*: order, /c/*: bills}"
    assert faults_of(
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


def test_a_right_is_on_a_queue_that_there_is() -> None:
    (fault,) = faults_of(node_with("orders: [read], ordres: [publish]"))
    assert fault.startswith("c.yaml:4:55: node.tokens[0].rights.ordres: there is no queue 'ordres'")
    assert fault.endswith("did you mean orders?")


def test_patterns_and_queues_that_can_be_made_are_no_mistake() -> None:
    assert not faults_of(node_with("team-*: [read], 'order?': [publish]"))
    assert not faults_of(node_with("jobs: [publish]", "jo*: [admin]")), "made while it runs"
    assert faults_of(node_with("jobs: [publish]", "other*: [admin]"))


def test_rights_on_the_pipelines_own_queues_are_known() -> None:
    assert not faults_of(
        node_with("main: [publish], main.dead: [read], alerts: [read]")
        + "parse: {format: json, on_error: dead}\n"
        "actions: [{name: alerts, queue: disk, output: {type: file, path: x}}]\n"
    )
