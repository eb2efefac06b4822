"""What becomes of an rsyslog configuration: inputs, queues, filters, actions, and the findings."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from tests.contract.harness import wait_until
from tests.inputs.syslog_harness import run_configured_rsyslogd, send_to_socket
from turnlane.config import loads
from turnlane.migrate.draft import Draft, Verdict
from turnlane.migrate.rsyslog import convert_text
from turnlane.migrate.rsyslog_filters import Unconvertible, convert_condition, convert_selector
from turnlane.migrate.rsyslog_syntax import Condition, Directive, Unknown, parse_statements


def convert(text: str) -> tuple[dict[str, Any], Draft]:
    """Return the settings as turnlane reads them, and the draft with its findings."""
    draft = convert_text(text, "rsyslog.conf")
    made = draft.render()
    loads(made)
    return YAML(typ="safe").load(made), draft


def findings_of(draft: Draft, verdict: Verdict = Verdict.MISSING) -> list[tuple[int | None, str]]:
    return [
        (each.origin.line, each.origin.setting)
        for each in draft.findings
        if each.verdict is verdict
    ]


def only_action(text: str) -> dict[str, Any]:
    made, _ = convert(text)
    (action,) = made["actions"]
    return dict(action)


# ── queues ───────────────────────────────────────────────────────────────────────────────────────


def test_queue_parameters_of_an_action_become_knobs() -> None:
    made, draft = convert("""
    action(type="omfwd" target="logs.example.org" port="6514" protocol="tcp" name="central"
           queue.type="LinkedList" queue.filename="fwd" queue.size="200000"
           queue.highWatermark="160000" queue.lowWatermark="40000" queue.fullDelayMark="190000"
           queue.lightDelayMark="0" queue.discardMark="195000" queue.discardSeverity="info"
           queue.maxFileSize="100m" queue.saveOnShutdown="off" queue.syncQueueFiles="on"
           queue.dequeueBatchSize="500" queue.minDequeueBatchSize="100"
           queue.minDequeueBatchSize.timeout="2500" queue.workerThreads="4"
           queue.workerThreadMinimumMessages="5000" queue.timeoutShutdown="10000"
           queue.timeoutWorkerThreadShutdown="60000" queue.samplingInterval="10"
           queue.dequeueTimeBegin="22" queue.dequeueTimeEnd="6" queue.timeoutEnqueue="0"
           action.resumeRetryCount="-1" action.resumeInterval="10" action.resumeIntervalMax="600")
    """)
    (action,) = made["actions"]
    assert action["queue"] == {
        "kind": "disk_assisted",
        "size": 200_000,
        "high_watermark": 160_000,
        "low_watermark": 40_000,
        "full_delay_mark": 190_000,
        "light_delay_mark": None,
        "discard_mark": 195_000,
        "discard_severity": 6,
        "full_behavior": "drop_newest",
        "shutdown_timeout": "10s",
        "idle_timeout": "1m",
        "save_on_shutdown": False,
        "durability": "always",
        "chunk_size": "100Mi",
        "dequeue_window": "22:00-06:00",
        "sampling_interval": 10,
    }
    assert action["lane"] == {
        "min_events": 100,
        "max_age": "2.5s",
        "workers": 4,
        "worker_minimum_events": 5000,
    }
    assert action["delivery"] == {"batch_events": 500, "backoff": "10s", "max_backoff": "10m"}
    assert action["name"] == "central"
    assert draft.findings == []


@pytest.mark.parametrize(
    ("parameters", "kind"),
    [
        ('queue.type="FixedArray"', "memory"),
        ('queue.type="LinkedList"', "memory"),
        ('queue.type="fixedarray" queue.filename="x"', "disk_assisted"),
        ('queue.type="Disk" queue.filename="x"', "disk"),
        ('queue.type="segmentedDisk" queue.filename="x"', "disk"),
    ],
)
def test_type_and_file_name_decide_the_kind(parameters: str, kind: str) -> None:
    action = only_action(f'action(type="omfile" file="/x" {parameters})')
    assert action["queue"]["kind"] == kind


def test_queue_without_a_type_is_direct_and_its_parameters_are_listed() -> None:
    made, draft = convert('action(type="omfile" file="/x" queue.size="5")')
    assert "queue" not in made["actions"][0]
    assert findings_of(draft, Verdict.UNUSED) == [(1, "queue.size")]


def test_main_queue_becomes_main() -> None:
    made, draft = convert("""
main_queue(queue.type="Disk" queue.filename="m" queue.maxDiskSpace="2G" queue.workerThreads="3"
           queue.dequeueBatchSize="99")
*.* /var/log/all
""")
    assert made["main"] == {"kind": "disk", "max_bytes": "2G"}
    assert made["lane"] == {"workers": 3}
    assert findings_of(draft) == [(3, "queue.dequeueBatchSize")]


def test_marks_without_a_size_get_rsyslogs_size() -> None:
    action = only_action(
        'action(type="omfile" file="/x" queue.type="LinkedList" queue.filename="a" '
        'queue.highWatermark="800" queue.lowWatermark="100")'
    )
    assert action["queue"]["size"] == 1000


def test_letters_of_sizes_keep_their_meaning() -> None:
    text = 'action(type="omfile" file="/x" queue.type="Disk" queue.maxFileSize="{}")'
    assert only_action(text.format("64k"))["queue"]["chunk_size"] == "64Ki"
    assert only_action(text.format("64K"))["queue"]["chunk_size"] == "64k"
    assert only_action(text.format("3g"))["queue"]["chunk_size"] == "3Gi"


def test_legacy_directives_hold_for_the_next_action_only() -> None:
    made, draft = convert("""
$MainMsgQueueSize 70000
$MainMsgQueueType LinkedList
$ActionQueueType LinkedList
$ActionQueueFileName fwd
$ActionQueueMaxDiskSpace 1g
$ActionQueueWorkerTimeoutThreadShutdown 5000
$ActionResumeRetryCount -1
$ActionName central
*.* @@[2001:db8::1]:1514
*.* @127.0.0.1
$ActionQueueSize 7
""")
    first, second = made["actions"]
    assert made["main"] == {"kind": "memory", "size": 70_000}
    assert first["queue"] == {"kind": "disk_assisted", "idle_timeout": "5s"}
    assert first["name"] == "central"
    assert first["output"]["address"] == "[2001:db8::1]:1514"
    assert (first["output"]["protocol"], first["output"]["framing"]) == ("tcp", "newline")
    assert "queue" not in second
    assert second["output"]["address"] == "127.0.0.1:514"
    assert second["output"]["protocol"] == "udp"
    assert findings_of(draft) == [(6, "$ActionQueueMaxDiskSpace")]
    assert findings_of(draft, Verdict.UNUSED) == [(12, "$ActionQueueSize")]


def test_value_that_turnlane_refuses_is_listed_and_the_rest_stays() -> None:
    made, draft = convert(
        'action(type="omfile" file="/x" queue.type="LinkedList" queue.size="10" '
        'queue.filename="x" queue.highWatermark="5000")'
    )
    assert made["actions"][0]["queue"] == {"kind": "disk_assisted", "size": 10}
    (finding,) = draft.findings
    assert finding.origin.setting == "queue.highWatermark"
    assert "must be at most size" in finding.advice


# ── inputs and rules ─────────────────────────────────────────────────────────────────────────────


def test_inputs_listen_where_rsyslog_listens() -> None:
    made, draft = convert("""
module(load="imuxsock")
module(load="imtcp")
input(type="imtcp" port="514")
input(type="imudp" port="514" address="127.0.0.1")
input(type="imfile" file="/var/log/app/*.log" tag="app:")
$ModLoad imudp.so
$UDPServerAddress ::1
$UDPServerRun 1514
global(workDirectory="/var/spool/rsyslog" maxMessageSize="32k")
""")
    assert made["node"]["data"] == "/var/spool/rsyslog/turnlane"
    assert made["queues"] == {"main": {"kind": "disk"}}
    limit = {"queue": "main", "max_message_bytes": "32Ki"}
    assert made["inputs"] == [
        {"type": "unix", "path": "/dev/log", "queue": "main"},
        {"type": "syslog", "tcp": "*:514", "insecure": True, **limit},
        {"type": "syslog", "udp": "127.0.0.1:514", **limit},
        {"type": "files", "name": "files", "paths": ["/var/log/app/*.log"], "queue": "main"},
        {"type": "syslog", "udp": "[::1]:1514", **limit},
    ]
    assert findings_of(draft) == [(6, "tag")]


@pytest.mark.parametrize(
    "text",
    [
        'input(type="imtcp" port="6514" StreamDriver.Mode="1")',
        'module(load="imtcp" StreamDriver.Mode="1")\ninput(type="imtcp" port="6514")',
        "$InputTCPServerStreamDriverMode 1\n$InputTCPServerRun 6514",
    ],
)
def test_encrypted_input_is_listed_and_not_opened_in_clear(text: str) -> None:
    made, draft = convert(text)
    assert "inputs" not in made
    assert len(text.splitlines()) in {line for line, _ in findings_of(draft)}


@pytest.mark.parametrize(
    "text",
    [
        'action(type="omfwd" target="h" protocol="tcp" StreamDriver="gtls" StreamDriverMode="1")',
        "$ActionSendStreamDriverMode 1\n*.* /var/log/x\n*.* @@h",
    ],
)
def test_encrypted_forwarding_stays_encrypted(text: str) -> None:
    made, draft = convert(text)
    assert made["actions"][-1]["output"]["protocol"] == "tls"
    assert findings_of(draft, Verdict.DIFFERENT)


def test_parameter_that_is_set_twice_is_listed() -> None:
    made, draft = convert(
        "$ActionQueueType Disk\n$ActionQueueSize 5\n$ActionQueueSize 6\n*.* /x\n"
        'main_queue(queue.size="1" queue.size="2")\nmain_queue(queue.size="3")\n'
    )
    assert (made["main"]["size"], made["actions"][0]["queue"]["size"]) == (3, 6)
    expected = [(2, "$ActionQueueSize"), (5, "queue.size"), (5, "queue.size")]
    assert findings_of(draft, Verdict.UNUSED) == expected


def test_ruleset_that_only_an_unused_ruleset_calls_is_listed() -> None:
    _, draft = convert("""
*.* /var/log/all
ruleset(name="a") { call b }
ruleset(name="b") { action(type="omfile" file="/var/log/b") }
""")
    assert findings_of(draft) == [(3, "ruleset"), (3, "statement"), (4, "ruleset"), (4, "action")]


def test_rules_become_actions_in_their_order() -> None:
    made, _ = convert("""
auth,authpriv.*        /var/log/auth.log
*.err                  @@logs.example.org:6514;RSYSLOG_SyslogProtocol23Format
& stop
:msg, contains, "it's $HOME" ~
if $programname == 'probe' then { stop } else {
  /var/log/rest
}
""")
    assert [(a["name"], a.get("filter"), a["output"]["type"]) for a in made["actions"]] == [
        ("file", "facility IN (4, 10)", "file"),
        ("syslog", "severity <= 3", "syslog"),
        ("discard", "severity <= 3", "discard"),
        ("discard-2", "contains(message, 'it\\'s $$HOME')", "discard"),
        ("discard-3", "app_name = 'probe'", "discard"),
        ("file-2", "NOT coalesce(app_name = 'probe', false)", "file"),
    ]
    assert made["actions"][1]["output"]["format"] == "rfc5424"
    assert made["parse"] == {"format": "syslog"}


def test_filter_that_is_not_certain_becomes_false_and_is_listed() -> None:
    made, draft = convert("*.* /var/log/a\nif re_match($msg, '^x') then /var/log/x\n")
    assert [action.get("filter") for action in made["actions"]] == [None, "false"]
    assert findings_of(draft) == [(2, "filter")]


def test_called_ruleset_is_part_of_the_rules() -> None:
    made, draft = convert("""
ruleset(name="mail") { action(type="omfile" file="/var/log/mail") }
if prifilt("mail.*") then call mail
""")
    (action,) = made["actions"]
    assert action["filter"] == "facility = 2"
    assert draft.findings == []


def test_ruleset_of_all_inputs_becomes_the_pipeline() -> None:
    made, draft = convert("""
input(type="imtcp" port="514" ruleset="remote")
*.* /var/log/local
ruleset(name="remote" queue.type="LinkedList" queue.size="5000") {
  action(type="omfile" file="/var/log/remote")
}
""")
    assert [action["output"]["path"] for action in made["actions"]] == ["/var/log/remote"]
    assert made["main"] == {"kind": "memory", "size": 5000}
    assert findings_of(draft) == [(3, "filter"), (3, "action")]


def test_ruleset_of_some_inputs_is_listed_with_its_statements() -> None:
    made, draft = convert("""
input(type="imudp" port="514")
input(type="imtcp" port="514" ruleset="remote")
ruleset(name="remote") {
  action(type="omfile" file="/var/log/remote")
}
""")
    assert [list(each) for each in made["inputs"]] == [["type", "udp", "queue", "insecure"]]
    assert "actions" not in made
    assert findings_of(draft) == [(3, "input"), (4, "ruleset"), (5, "action")]


def test_ruleset_that_calls_itself_is_listed() -> None:
    _, draft = convert('ruleset(name="a") { call a }\ncall a\n*.* /x\n')
    assert findings_of(draft) == [(1, "statement")]


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ('module(load="omkafka")', "module"),
        ('template(name="t" type="list") { property(name="msg") }', "template"),
        ("$FileOwner root", "$FileOwner"),
        ("$IncludeConfig /etc/rsyslog.d/*.conf", "$IncludeConfig"),
        ('include(file="/etc/rsyslog.d/*.conf")', "include"),
        ('set $!tag = "x;y";', "statement"),
        ("foreach ($.x in $!list) do { stop }", "statement"),
        ("*.emerg :omusrmsg:*", "action"),
        ('action(type="omkafka" topic="x")', "action"),
        ('lookup_table(name="x" file="y")', "lookup_table"),
        ('global(net.enableDNS="off")', "net.enableDNS"),
        ('action(type="omfile" file="/x" fileCreateMode="0600")', "fileCreateMode"),
        ('action(type="omfile" file="/x" action.copyMsg2="on")', "action.copyMsg2"),
        ("+host", "statement"),
        ('action(type="omfile"', "statement"),
        ("if $msg then", "statement"),
        ("}", "statement"),
    ],
)  # fmt: skip
def test_statement_without_a_counterpart_is_listed_with_its_line(text: str, setting: str) -> None:
    _, draft = convert(f"# a comment\n\n{text}\n")
    assert (3, setting) in findings_of(draft)


def test_every_directive_is_converted_or_listed() -> None:
    names = re.findall(r"[A-Z]\w+", "ActionQueueXyz MainMsgQueueXyz ActionXyz Xyz InputXyz")
    text = "".join(f"${name} 1\n" for name in names) + "*.* /var/log/x\n"
    _, draft = convert(text)
    found = findings_of(draft) + findings_of(draft, Verdict.UNUSED)
    assert sorted(found) == [(at, f"${name}") for at, name in enumerate(names, start=1)]


# ── syntax ───────────────────────────────────────────────────────────────────────────────────────


def test_reader_keeps_lines_through_comments_and_continued_lines() -> None:
    first, second, third = parse_statements(
        '/* a\n comment */ $One 1 \\\n  2\n\n:msg, contains, "x"  # why\n  /y\n] ;\n'
    )
    assert isinstance(first, Directive)
    assert (first.line, first.value) == (2, "1 2")
    assert isinstance(second, Condition)
    assert (second.line, second.then[0].line) == (5, 6)
    assert isinstance(third, Unknown)
    assert third.line == 7


FRAGMENTS = [
    "action(", ")", 'type="omfile"', 'file="/x"', "ruleset(", 'name="a"', "{", "}", "if ", " then ",
    "else ", "$msg", " contains ", "'x'", "not ", "(", "and ", 'prifilt("*.err")', "*.*", " /x\n",
    "& ~\n", "stop ", "call a ", "\n", "#", "/*", "*/", "$ActionQueueSize 5\n", 'queue.size="9k" ',
    'queue.type="Disk" ', 'queue.highWatermark="3" ', "main_queue(", "input(", 'type="imtcp" ',
    'port="x"', "@@h:1", ":msg,", "\\", "$$", "${", "[", "]", ",", "set ", ";", "foreach ", "do ",
    'queue.discardMark="1" ', 'queue.discardSeverity="2" ', 'action.resumeInterval="9999999" ',
    "$ModLoad imuxsock\n", 'global(workDirectory="', '\\x00"', "local0.=info;mail.!*",
    "é\x85\u2028",
]  # fmt: skip


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join))
def test_any_mix_of_fragments_gives_yaml_that_turnlane_accepts(text: str) -> None:
    loads(convert_text(text, "fuzz").render())


@given(st.text(max_size=200))
def test_any_text_gives_yaml_that_turnlane_accepts(text: str) -> None:
    loads(convert_text(text, "fuzz").render())


def test_deeply_nested_blocks_are_listed() -> None:
    for text in ("if $a == 1 then " * 3000, "(" * 5000, "*.* {" * 3000):
        _, draft = convert(f"{text}\n")
        assert findings_of(draft)
    (statement,) = parse_statements(f"if {'(' * 500}$a == 1{')' * 500} then stop")
    assert isinstance(statement, Condition)
    with pytest.raises(Unconvertible):
        convert_condition(statement)


# ── filters, against a real rsyslogd ─────────────────────────────────────────────────────────────

SELECTORS = [
    "*.*", "*.err", "*.=info", "*.*;*.!=info", "*.*;*.!err", "*.none", "mail.info", "daemon.!*",
    "*.*;auth,authpriv.none", "*.debug;local6.err", "*.info;mail.none;authpriv.none;cron.none",
    "kern.*;*.crit", "*.=debug;auth,authpriv.none;news.none;mail.none", "*.debug;local6.!=info",
    "local0.*;local0.!=warn;local0.!=err", "mail.info,news.err", "user.*;user.!info;user.err",
    "mail,news.warning",
    "*.*;kern.!crit", "uucp.=alert;uucp.=emerg", "security.panic;ftp.error", "*.!none;lpr.none",
]  # fmt: skip
EXPRESSIONS = [
    "$syslogseverity <= 3",
    "$syslogseverity < '3' or $syslogfacility == 2 and $syslogseverity > 5",
    "not ($syslogfacility-text == 'local0' or prifilt('mail.err'))",
    "not prifilt('*.info')",
    "$programname == 'shop' and $msg contains 'two'",
    "$programname == ['shop', 'bar'] or $syslogseverity-text == 'crit'",
    "$programname != 'shop'",
    "$programname startswith 'sh' and not ($msg contains ['one', 'two'])",
    "$msg contains_i 'TWO'",
    "$hostname == 'web-1' and ($syslogseverity >= 4)",
    "$msg contains 'it\\'s'",
    "$procid == '42'",
    "$syslogseverity <= 003 and $syslogfacility == 012",
    "$syslogfacility == 0x0a or $syslogseverity == 0",
]
PROPERTY_FILTERS = [
    ':msg, contains, "two"',
    ':msg, !contains, "two"',
    ':programname, isequal, "shop"',
    ':programname, !startswith, "s"',
    ':hostname, isequal, "web-1"',
]
MESSAGES = [
    (facility, severity, app, text)
    for facility in range(24)
    for severity in range(8)
    for app, text in [
        [("shop", "one"), ("bar", "it's two"), ("shopper", "Two three")][severity % 3]
    ]
]


def test_converted_filters_take_the_messages_that_rsyslogd_takes(tmp_path: Path) -> None:
    """SQLite evaluates the conditions: it has the same operators, and gets the functions here."""
    rules = [
        *SELECTORS,
        *PROPERTY_FILTERS,
        *(f"if {text} then" for text in EXPRESSIONS),
    ]
    door = tmp_path / "log"
    config = [
        f'global(workDirectory="{tmp_path}")',
        'module(load="imuxsock" SysSock.Use="off")',
        f'input(type="imuxsock" Socket="{door}" RateLimit.Interval="0" ParseTrusted="off"',
        '      UseSpecialParser="off" ParseHostname="on")',
        'template(name="number" type="string" string="%msgid%\\n")',
    ]
    for at, rule in enumerate(rules):
        config.append(f"{rule} {tmp_path / str(at)};number")
    config.append(f"*.* {tmp_path / 'end'};number")
    with run_configured_rsyslogd(tmp_path, "\n".join(config) + "\n"):
        wait_until(door.exists, "rsyslogd's socket")
        for number, (facility, severity, app, text) in enumerate(MESSAGES):
            priority = facility * 8 + severity
            header = f"<{priority}>1 2026-01-01T00:00:00Z web-{severity % 2} {app} 4{severity}"
            send_to_socket(door, f"{header} {number} - {text}".encode())

        def read_numbers(name: str) -> set[int]:
            file = tmp_path / name
            return set(map(int, file.read_text().split())) if file.exists() else set()

        wait_until(lambda: len(read_numbers("end")) == len(MESSAGES), "all messages", 60)
        taken = [read_numbers(str(at)) for at in range(len(rules))]
    assert (tmp_path / "said").read_text() == ""
    database = sqlite3.connect(":memory:")
    database.create_function("contains", 2, lambda text, part: part in text)
    database.create_function("startswith", 2, str.startswith)
    database.execute("CREATE TABLE events (number, facility, severity, hostname, app_name, "
                     "proc_id, message)")  # fmt: skip
    for number, (facility, severity, app, text) in enumerate(MESSAGES):
        row = (number, facility, severity, f"web-{severity % 2}", app, f"4{severity}", text)
        database.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    for rule, expected in zip(rules, taken, strict=True):
        (statement,) = parse_statements(f"{rule} /x\n")
        assert isinstance(statement, Condition)
        # SQLite doubles a quote where Spark has a backslash.
        condition = convert_condition(statement).replace("\\'", "''")
        found = database.execute(f"SELECT number FROM events WHERE {condition}")
        assert {number for (number,) in found} == expected, (rule, condition)
    assert any(taken), "rsyslogd wrote something"


@pytest.mark.parametrize(
    ("number", "value"), [("0", 0), ("007", 7), ("010", 8), ("0x0A", 10), ("9", 9)]
)
def test_number_with_a_leading_zero_is_octal(number: str, value: int) -> None:
    (statement,) = parse_statements(f"if $syslogfacility == {number} then stop\n")
    assert isinstance(statement, Condition)
    assert convert_condition(statement) == f"facility = {value}"


@pytest.mark.parametrize("text", ["x.err", "*.foo", "mail", "12.err", "*.=*", "a;b.err", "*.!err"])
def test_selector_that_is_unknown_is_not_converted(text: str) -> None:
    with pytest.raises(Unconvertible):
        convert_selector(text)


@pytest.mark.parametrize(
    "text",
    [
        "not $msg contains 'x'",
        "$msg startswith 'x'",
        "$msg == 'x'",
        "$msg contains ' x'",
        "$!json == 'x'",
        "$syslogtag == 'x'",
        "re_match($msg, 'x')",
        "$syslogseverity-text == 'error'",
        "$msg contains 'x' + 'y'",
        "$msg",
        "$syslogseverity <= 08",
        f"$syslogseverity <= 0x{'f' * 4000}",
        "1",
        "",
    ],
)
def test_expression_that_is_not_certain_is_not_converted(text: str) -> None:
    (statement,) = parse_statements(f"if {text} then stop\n")
    assert isinstance(statement, Condition)
    with pytest.raises(Unconvertible):
        convert_condition(statement)
