"""The configuration: accepted settings, and the messages and positions of issues."""

from __future__ import annotations

import contextlib
import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field, SecretStr, ValidationError

from scripts import config_schema
from tests.acceptance.test_docs import blocks_of
from turnlane.config import Config, ConfigFileError, json_schema, load, loads
from turnlane.config.document import parse, substitute_variables
from turnlane.errors import ConfigError
from turnlane.inputs import api
from turnlane.inputs.api import Input, InputSettings
from turnlane.plugins import PluginRegistry
from turnlane.queues.settings import Kind

ROOT = Path(__file__).parents[2]


class ProbeSettings(InputSettings):
    port: int = 0
    password: SecretStr | None = None
    labels: dict[str, str] = Field(default_factory=dict)


class ProbeInput(Input):
    settings_type = ProbeSettings

    def start(self) -> None:
        raise AssertionError

    def stop(self, timeout: float) -> None:
        raise AssertionError


@pytest.fixture(autouse=True)
def probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input of this module's, as another distribution would bring it."""
    plugins = PluginRegistry("turnlane.inputs", Input, "input")  # type: ignore[type-abstract]
    point = EntryPoint("probe", f"{__name__}:ProbeInput", "turnlane.inputs")
    vars(plugins)["_known"] = {"probe": point}
    load = EntryPoint.load
    monkeypatch.setattr(
        EntryPoint, "load", lambda each: ProbeInput if each.name == "probe" else load(each)
    )
    monkeypatch.setattr(api, "types", plugins.types)
    monkeypatch.setattr(api, "load", plugins.load)


def load_with_issues(text: str, **environment: str) -> list[str]:
    with pytest.raises(ConfigFileError) as caught:
        loads(text, "c.yaml", environment)
    return str(caught.value).splitlines()


def load_with_one_issue(text: str, **environment: str) -> str:
    (fault,) = load_with_issues(text, **environment)
    return fault


# ── what it gives ────────────────────────────────────────────────────────────────────────────────


def test_data_directory_alone_is_a_valid_configuration() -> None:
    config = loads("node: {data: /data}")
    assert config.node.data == Path("/data")
    assert str(config.node.flight.listen) == "127.0.0.1:8815"
    assert str(config.node.http.listen) == "127.0.0.1:8088"
    assert config.queues == {}
    assert config.inputs == ()


def test_queue_without_kind_is_on_disk() -> None:
    config = loads(
        "node: {data: /data}\nqueues:\n  plain:\n  small: {kind: memory, max_bytes: 1Mi}\n"
    )
    assert config.queues["plain"].kind is Kind.DISK
    assert config.knobs() == {
        "plain": {"kind": Kind.DISK},
        "small": {"kind": Kind.MEMORY, "max_bytes": 2**20},
    }


def test_input_has_the_settings_of_its_type() -> None:
    config = loads(
        "node: {data: d}\nqueues: {q: }\ninputs: [{type: probe, queue: q, port: 5, ack: accepted}]"
    )
    (settings,) = config.inputs
    assert isinstance(settings, ProbeSettings)
    assert (settings.port, settings.ack) == (5, "accepted")


def test_inputs_without_a_name_get_different_labels() -> None:
    config = loads(
        "node: {data: d}\nqueues: {q: }\n"
        "inputs: [{type: probe, queue: q}, {type: probe, queue: q}, "
        "{type: probe, queue: q, name: probe-2}]"
    )
    assert [each.label for each in config.inputs] == ["probe", "probe-3", "probe-2"]


def test_plane_without_a_certificate_uses_that_of_the_node() -> None:
    config = loads("node:\n  data: d\n  tls: {cert: a, key: b}\n  http: {tls: {cert: c, key: d}}\n")
    assert config.node.flight.tls is not None
    assert config.node.http.tls is not None
    assert config.node.flight.tls.cert == Path("a")
    assert config.node.http.tls.cert == Path("c")


def test_settings_are_frozen() -> None:
    config = loads("node: {data: d}")
    with pytest.raises(ValidationError):
        config.node.insecure = True


def test_anchors_and_merge_keys_share_settings() -> None:
    config = loads(
        "node: {data: d}\n"
        "queues:\n"
        "  a: &shared {kind: memory, size: 10}\n"
        "  b: {<<: *shared, size: 20}\n"
        "  c: *shared\n"
    )
    assert [queue.size for queue in config.queues.values()] == [10, 20, 10]


# ── where things are wrong ───────────────────────────────────────────────────────────────────────


def test_all_issues_are_reported_with_their_positions() -> None:
    text = """\
node:
  data: /data
  http:
    listen: nowhere
    max_conections: 5
queues:
  orders:
    size: lots
    durability: allways
  orders: {}
inputs:
  - type: prob
    queue: orders
  - type: probe
    queue: order
    port: x
paths: {}
"""
    assert load_with_issues(text) == [
        (
            "c.yaml:4:13: node.http.listen: 'nowhere' is not an address; write host:port, such as "
            "127.0.0.1:8088, [::1]:8088, or :8088 for this machine only"
        ),
        (
            "c.yaml:5:5: node.http.max_conections: there is no such setting; "
            "did you mean max_connections?"
        ),
        "c.yaml:8:11: queues.orders.size: must be a whole number, not 'lots'",
        (
            "c.yaml:9:17: queues.orders.durability: must be one of always, interval, never, "
            "not 'allways'; did you mean always?"
        ),
        "c.yaml:10:3: queues.orders: duplicate key, first in line 7; remove one",
        "c.yaml:12:11: inputs[0].type: there is no input 'prob'; did you mean probe?",
        "c.yaml:15:12: inputs[1].queue: there is no queue 'order'; did you mean orders?",
        "c.yaml:16:11: inputs[1].port: must be a whole number, not 'x'",
        "c.yaml:17:1: paths: there is no such setting; did you mean parse?",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "c.yaml:1:1: node: is required"),
        ("node:", "c.yaml:1:1: node: must be a mapping, not None"),
        ("node: {}", "c.yaml:1:1: node.data: is required"),
        ("- node", "c.yaml:1:1: this is not a mapping with settings, such as node: {data: …}"),
        ("node: {data: d}\nqueues: []", "c.yaml:2:9: queues: must be a mapping, not a list"),
        ("node: {data: d}\nqueues: {q: 5}", "c.yaml:2:13: queues.q: must be a mapping, not 5"),
        ("node: {data: d}\ninputs: {}", "c.yaml:2:9: inputs: must be a list, not a mapping"),
        ("node: {data: d}\ninputs: [x]", "c.yaml:2:10: inputs[0]: must be a mapping, not 'x'"),
        (
            "node: {data: d}\ninputs: [{queue: q}]\nqueues: {q: }",
            "c.yaml:2:10: inputs[0].type: is required; there are: probe",
        ),
        (
            "node: {data: d}\nqueues:\n  q: {path: /x}",
            (
                "c.yaml:3:7: queues.q.path: a node keeps its queues below its data directory; "
                "set node.data"
            ),
        ),
        (
            "node: {data: d}\nqueues:\n  q: {kind: proxy}",
            (
                "c.yaml:3:13: queues.q.kind: a node has no proxy queues, only memory, disk, "
                "disk_assisted"
            ),
        ),
        (
            "node: {data: d}\nqueues:\n  a b: {}",
            (
                "c.yaml:3:3: queues.a b: 'a b' is not a name; use letters, digits, _, . and -, "
                "as in web-1"
            ),
        ),
        (
            "node: {data: d}\nqueues:\n  v.1: {kind: memory, sync_interval: 1s}",
            (
                "c.yaml:3:38: queues.v.1.sync_interval: means nothing in a memory queue, only in "
                "disk, disk_assisted"
            ),
        ),
        (
            "node: {data: d, shutdown_timeout: soon}",
            (
                "c.yaml:1:35: node.shutdown_timeout: 'soon' is not a duration; write a number "
                "and a unit (d, h, m, s, ms, us), such as 30s, 500ms or 1h30m; a plain number is "
                "seconds"
            ),
        ),
        ("node: !python/object:os.system {data: d}", None),
        ("node: {data: !vault d}", None),
        ("? [a]\n: b", None),
        ("node: {data: d}\n<<: 5", None),
    ],
)
def test_issue_names_position_setting_and_remedy(text: str, fault: str | None) -> None:
    told = load_with_issues(text)
    assert fault is None or fault in told


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("node: {data: d", "1:15"),
        ("node:\n\tdata: d", "2:1"),
        ("node: {data: *nothing}", "1:14"),
        ("a: b: c", "1:5"),
        ("node: {data: 'd}", "1:17"),
        ("node: {data: d}\n---\nnode: {data: d}", "2:1"),
        ("[" * 700, "1:1"),
        ("node: \x00", "1:1"),
    ],
)
def test_invalid_yaml_is_reported_with_its_position(text: str, place: str) -> None:
    assert load_with_one_issue(text).startswith(f"c.yaml:{place}: this is n")


def test_aliases_cannot_make_a_small_file_huge() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "too large with its aliases" in load_with_issues("\n".join(lines))[-1]
    assert "nested too deeply" in load_with_issues("node: &a [*a]")[-1]


def test_public_address_without_tls_and_tokens_is_refused() -> None:
    node = "node:\n  data: d\n  http: {listen: '0.0.0.0:8088'}\n"
    fault = load_with_one_issue(node)
    assert fault.startswith("c.yaml:3:18: node.http.listen: 0.0.0.0:8088 can be reached from")
    assert loads(f"{node}  insecure: true").node.insecure
    protected = "  tls: {cert: c, key: k}\n  tokens: [{name: t, secret: sesame, rights: {}}]"
    assert loads(node + protected).node.http.tls is not None


def test_two_tokens_or_inputs_with_one_name_are_refused() -> None:
    token = "{name: t, secret_env: S, rights: {}}"
    assert "2 tokens are called 't'" in load_with_one_issue(
        f"node: {{data: d, tokens: [{token}, {token}]}}"
    )
    entry = "{type: probe, queue: q, name: n}"
    assert "the name 'n' is already used by another input" in load_with_one_issue(
        f"node: {{data: d}}\nqueues: {{q: }}\ninputs: [{entry}, {entry}]"
    )


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load(tmp_path / "none.yaml")
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"node:\n  data: \xff\n")
    with pytest.raises(ConfigFileError, match=r"latin\.yaml:2:9: this is not UTF-8"):
        load(latin)


# ── variables ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${A}", "1"),
        ("x${A}y${B:-2}z", "x1y2z"),
        ("${EMPTY:-d}", "d"),
        ("${A:-d}", "1"),
        ("${A:?needed}", "1"),
        ("$$", "$"),
        ("$${A}", "${A}"),
        ("$A 5$", "$A 5$"),
        ("${EMPTY}", ""),
    ],
)
def test_variables_are_replaced(text: str, value: str) -> None:
    assert substitute_variables(text, {"A": "1", "EMPTY": ""}) == value


def test_value_of_a_variable_is_converted_to_the_type_of_the_setting() -> None:
    text = """\
node: {data: "${D}", insecure: "${YES}", shutdown_timeout: "${T}"}
queues:
  q:
    kind: ${K}
    size: ${N}
    max_bytes: ${B:-1Mi}
inputs:
  - {type: probe, queue: q, labels: {port: "${N}"}}
"""
    environment = {"D": "123", "YES": "true", "T": "5s", "K": "memory", "N": "0100"}
    config = loads(text, "c", environment)
    assert config.node.data == Path("123")
    assert config.node.insecure
    assert config.node.shutdown_timeout == 5
    assert (config.queues["q"].size, config.queues["q"].max_bytes) == (100, 2**20)
    assert config.inputs[0].model_dump()["labels"] == {"port": "0100"}


def test_value_of_a_variable_never_changes_the_structure() -> None:
    value = "x}\nqueues: {evil: }\n# "
    config = loads("node: {data: '${D}'}", "c", {"D": value})
    assert config.node.data == Path(value)
    assert config.queues == {}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("${NONE}", "variable NONE is not set; set it, or write ${NONE:-default}"),
        ("${NONE:?where to?}", "variable NONE is not set: where to?"),
        ("${NONE", "this variable is malformed; "),
        ("${A:-${B}}", "this variable is malformed; "),
        ("${1}", "this variable is malformed; "),
    ],
)
def test_missing_variable_is_reported_with_its_position(written: str, message: str) -> None:
    fault = load_with_one_issue(f"node:\n  data: d\n  shutdown_timeout: '{written}'")
    assert fault.startswith(f"c.yaml:3:21: node.shutdown_timeout: {message}")


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────

SECRET = "hunter2-very-secret"


@pytest.mark.parametrize(
    "text",
    [
        f"node: {{data: d, tokens: {SECRET}}}",
        f"node: {{data: d, tokens: [{SECRET}]}}",
        f"node: {{data: d, tokens: {{secret: {SECRET}}}}}",
        f"node: {{data: d, tokens: [{{name: a, secret: [{SECRET}], rights: {{}}}}]}}",
        f"node: {{data: d, tokens: [{{name: a, secret: {SECRET}, secret_env: B, rights: {{}}}}]}}",
        f"node: {{data: d, tokens: [{{name: a, secret: {SECRET}, rights: 5}}]}}",
        f"node: {{data: d, token: {SECRET}}}",
        (
            f"node: {{data: d}}\nqueues: {{q: }}\ninputs: [{{type: probe, queue: q, password: {{a: "
            f"{SECRET}}}}}]"
        ),
        f"node: {{data: d, password: '{SECRET}}}",
        "node: {data: d, shutdown_timeout: '${S}'}",
        "node: {data: d, insecure: 'a ${S} b'}",
        "node: {data: d, http: {listen: '${S}'}}",
        "node: {data: d}\nqueues: {q: {kind: '${S}'}}",
        "node: {data: d}\nqueues: {q: {size: '${S}'}}",
        "node: {data: d}\ninputs: [{type: '${S}', queue: q}]\nqueues: {q: }",
        "node: {data: d}\ninputs: [{type: probe, queue: '${S}'}]",
    ],
)
def test_issue_never_shows_a_secret(text: str) -> None:
    with pytest.raises(ConfigFileError) as caught:
        loads(text, "c.yaml", {"S": SECRET})
    assert caught.value.issues
    assert SECRET not in f"{caught.value!s}{caught.value!r}{caught.value.issues}"
    assert SECRET not in str(caught.value.__cause__)


def test_settings_do_not_show_their_secrets() -> None:
    config = loads(
        f"node: {{data: d, tokens: [{{name: a, secret: {SECRET}, rights: {{}}}}]}}\n"
        f"queues: {{q: }}\ninputs: [{{type: probe, queue: q, password: {SECRET}}}]"
    )
    shown = f"{config!r}{config}{config.model_dump_json()}{config.model_dump(mode='json')}"
    assert SECRET not in shown
    assert "**********" in shown
    assert config.node.tokens[0].read_secret() == SECRET.encode()


# ── anything at all ──────────────────────────────────────────────────────────────────────────────

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.sampled_from(["${A}", "probe", "q", "30s", "memory", "127.0.0.1:0"]),
)
NAMES = st.sampled_from(
    ["node", "data", "queues", "inputs", "type", "queue", "tokens", "http", "listen", "tls", "q"]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def check_loads_or_issues(text: str) -> None:
    with contextlib.suppress(ConfigFileError):
        assert isinstance(loads(text, "c.yaml", {"A": "1"}), Config)


@given(st.text())
@example("{}: 5")
@example("!!binary x")
@example("a: !!int x")
@example("%TAG ! tag:example.com,2000:\n--- !x a")
@example("? ? x")
@example("- &a\n- *a")
@example("'${'")
def test_any_text_gives_settings_or_issues(text: str) -> None:
    check_loads_or_issues(text)


@given(st.text(alphabet="{}[]:,-?&*!|>'\"%@`#\n \tax1$~<=.\\_"))
def test_any_yaml_like_text_gives_settings_or_issues(text: str) -> None:
    check_loads_or_issues(text)


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_any_structure_gives_settings_or_issues(values: dict[str, Any]) -> None:
    check_loads_or_issues(json.dumps(values))


# ── the schema and the example ───────────────────────────────────────────────────────────────────


def test_schema_has_the_settings_of_inputs_and_allows_variables() -> None:
    schema = json_schema()
    probe = schema["$defs"]["probe_input"]["properties"]
    assert probe["type"]["const"] == "probe"
    assert {"$ref": "#/$defs/Variable"} in probe["port"]["anyOf"]
    assert "path" not in schema["$defs"]["QueueSettings"]["properties"]
    [own] = json_schema([])["properties"]["inputs"]["items"]["oneOf"]
    assert own["title"] == "an input of your own"


def example_text() -> str:
    blocks = blocks_of(ROOT / "docs/configuration.md")
    return next(block.text for block in blocks if block.language == "yaml")


class TestAsInstalled:
    """With the inputs that turnlane itself has."""

    @pytest.fixture(autouse=True)
    def probe(self) -> None:
        """Not the input of this module."""

    def test_published_schema_is_current(self) -> None:
        assert config_schema.FILE.read_text() == config_schema.text(), (
            "run: python -m scripts.config_schema"
        )

    def test_second_files_input_without_a_name_is_refused(self) -> None:
        """Positions are kept by name: after a swap, each would read the other's files again."""
        one = "{type: files, queue: q, paths: [/a]}"
        named = "{type: files, queue: q, paths: [/b], name: b}"
        start = "node: {data: d}\nqueues: {q: }\ninputs: "
        assert "inputs[2]: needs a name" in load_with_one_issue(f"{start}[{one}, {named}, {one}]")
        config = loads(f"{start}[{named}, {one}]")
        assert [each.label for each in config.inputs] == ["b", "files"]

    def test_example_in_the_docs_is_valid(self) -> None:
        config = loads(example_text(), "example.yaml", {"TURNLANE_TOKEN": "t"})
        assert config.queues
        assert config.inputs

    def test_schema_and_loader_accept_the_same(self) -> None:
        """As far as a schema can; ``${…}`` stands for anything."""
        check = jsonschema_rs.validator_for(json.loads(config_schema.text()))
        values = parse(example_text(), "example.yaml", {}).data
        assert list(check.iter_errors(values)) == []
        values["node"]["flight"]["listen"] = "${WHERE}"
        values["queues"]["metrics"]["size"] = "${SIZE}"
        assert check.is_valid(values)
        for broken in (
            {**values, "quues": {}},
            {**values, "queues": {"main": {"size": "many"}}},
            {**values, "queues": {"main": {"path": "/x"}}},
            {**values, "inputs": [{"type": "nothing", "queue": "main"}]},
            {**values, "inputs": [{"type": "syslog"}]},
            {**values, "node": {}},
        ):
            assert not check.is_valid(broken)
