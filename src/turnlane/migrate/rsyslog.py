"""From an rsyslog configuration: inputs, queues, filters and actions.

rsyslog has a main queue, filters, and actions with queues of their own; so has turnlane. Every
statement and every parameter is converted, or is a finding with its line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from turnlane.migrate.draft import Draft, Leaf, Origin, complete_backoff
from turnlane.migrate.rsyslog_filters import (
    EVERY,
    NEVER,
    Unconvertible,
    convert_condition,
    join_conditions,
    negate,
)
from turnlane.migrate.rsyslog_queues import (
    ACTION_RULES,
    Parameters,
    QueueDraft,
    apply_rule,
    convert_queue,
    get_origin,
    read_size,
    read_switch,
    set_value,
)
from turnlane.migrate.rsyslog_syntax import (
    Condition,
    Directive,
    LegacyAction,
    ObjectStatement,
    Parameter,
    RulesetCall,
    Statement,
    Stop,
    Unknown,
    parse_statements,
)

_FORWARD_FORMATS: Final = {
    "rsyslog_traditionalforwardformat": "rfc3164",
    "rsyslog_forwardformat": "rfc3164",
    "rsyslog_syslogprotocol23format": "rfc5424",
}
_LEGACY_FORWARD: Final = re.compile(
    r"(@@?)(?:\(([^)]*)\))?(\[[^\]]+\]|[^:;\s]+)(?::([0-9]+))?(?:;(\S+))?"
)
_LEGACY_FILE: Final = re.compile(r"(-?)(/[^;\s]*)(?:;(\S+))?")
_LEGACY_QUEUES: Final = ("actionqueue", "mainmsgqueue")
_LEGACY_NAMES: Final = {"workertimeoutthreadshutdown": "timeoutworkerthreadshutdown"}
_INPUT_TYPES: Final = {"imtcp": "tcp", "imptcp": "tcp", "imudp": "udp"}
_OTHER_INPUTS: Final = {
    "imjournal": "pipe the journal in: journalctl -f -o json | turnlane serve, with a stdin input",
    "imklog": "pipe the kernel's messages in: dmesg --follow | turnlane serve, with a stdin input",
    "immark": "turnlane has no mark messages",
    "impstats": "turnlane serves its metrics at /metrics of node.http",
    "imrelp": "use the syslog input over TCP or TLS, or an HTTP input with acks",
}
_OTHER_OUTPUTS: Final = {
    "omelasticsearch": "see the output elasticsearch",
    "omhttp": "see the output http",
    "ommysql": "see the output sql",
    "ompgsql": "see the output sql",
    "omlibdbi": "see the output sql",
    "omfile": "the path of a file may contain the time, as in /var/log/%Y-%m-%d.log",
    "omrelp": "see the outputs syslog and queue",
    "omkafka": "write with the output spark, format kafka",
}
_OTHER_OBJECTS: Final = {
    "template": "write events as JSON, or make columns with sql or transform",
    "include": "the file is not read: convert it too, or paste it here",
}
_INPUT_TLS: Final = "write a syslog input with tls: {listen, cert, key, client_ca}"
_MAX_CALLS: Final = 8
"""How deep rulesets may call each other."""
_LABELS: Final = {LegacyAction: "action", Condition: "filter"}
_TLS_MODES: Final = ("streamdrivermode", "streamdriver.mode")
_QUIET: Final = {"type", "name", "load", "ruleset"}
"""Parameters that are read wherever they may stand."""


@dataclass
class RsyslogConverter:
    """Walks over the statements and fills the draft."""

    draft: Draft
    rulesets: Mapping[str, ObjectStatement]
    chosen: str | None
    """The ruleset that becomes the pipeline; none for the default one."""
    called: frozenset[str]
    """The rulesets that messages reach by ``call``."""
    inputs: list[dict[str, Any]] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)
    names: set[str] = field(default_factory=lambda: {"main"})
    calls: list[str] = field(default_factory=list)
    pending: Parameters = field(default_factory=dict)
    """The directives for the next legacy action, as parameters of an action."""
    lasting: Parameters = field(default_factory=dict)
    """The directives for all legacy actions that follow."""
    main: Parameters = field(default_factory=dict)
    message_bytes: Parameter | None = None
    udp_address: str = ""
    has_input_tls: bool = False
    """Whether ``imtcp`` listens with TLS, unless an input says otherwise."""

    # ── statements ──

    def walk(self, statements: Iterable[Statement], condition: str) -> None:
        """Convert statements that messages reach if they pass the condition."""
        for statement in statements:
            match statement:
                case ObjectStatement():
                    self._convert_object(statement, condition)
                case Directive():
                    self._convert_directive(statement)
                case Condition():
                    self._convert_condition(statement, condition)
                case LegacyAction():
                    self._convert_legacy_action(statement, condition)
                case Stop():
                    self._add_action(statement, {}, {"type": Leaf("discard")}, condition)
                case RulesetCall():
                    self._convert_call(statement, condition)
                case Unknown():
                    self._miss(statement, statement.why)
                case _:
                    self._miss(statement, "turnlane has no such statement")

    def list_all(self, statements: Iterable[Statement], advice: str) -> None:
        """Add every statement, and the statements in its blocks, to the findings."""
        for statement in statements:
            self._miss(statement, advice)
            if isinstance(statement, Condition):
                self.list_all([*statement.then, *statement.otherwise], advice)

    def _miss(self, statement: Statement, advice: str) -> None:
        setting, value = _LABELS.get(type(statement), "statement"), statement.text
        if isinstance(statement, ObjectStatement):
            setting = statement.kind
            value = next((each.value for each in statement.parameters if each.name in _QUIET), "")
        self.draft.add_missing(Origin(statement.line, setting, value), advice)

    def _convert_condition(self, statement: Condition, condition: str) -> None:
        try:
            own = convert_condition(statement)
            other = negate(own)
        except Unconvertible as error:
            own = other = NEVER
            self._miss(
                statement,
                f"{error}: the actions under it have the filter false; write it in Spark SQL",
            )
        self.walk(statement.then, join_conditions("AND", condition, own))
        self.walk(statement.otherwise, join_conditions("AND", condition, other))

    def _convert_call(self, statement: RulesetCall, condition: str) -> None:
        ruleset = self.rulesets.get(statement.ruleset)
        if ruleset is None:
            self._miss(statement, "there is no such ruleset in this file")
        elif statement.ruleset in self.calls or len(self.calls) > _MAX_CALLS:
            self._miss(statement, "the ruleset calls itself")
        else:
            self.calls.append(statement.ruleset)
            self.walk(ruleset.body, condition)
            self.calls.pop()

    # ── objects ──

    def _convert_object(self, statement: ObjectStatement, condition: str) -> None:
        parameters = self._collect_all({}, statement.parameters)
        match statement.kind:
            case "action":
                self._convert_action(statement, parameters, condition)
            case "input":
                self._convert_input(statement, parameters)
            case "module":
                self._convert_module(statement, parameters)
            case "main_queue":
                self._collect_all(self.main, parameters.values())
            case "global":
                for each in statement.parameters:
                    self.convert_global(each)
            case "ruleset":
                self._convert_ruleset(statement, parameters)
            case kind:
                self._miss(statement, _OTHER_OBJECTS.get(kind, "turnlane has no such object"))

    def _collect(self, target: Parameters, name: str, parameter: Parameter) -> None:
        """Keep a parameter for later; one of the same name before it has no effect."""
        if name in target:
            self.draft.add_unused(get_origin(target[name]), f"line {parameter.line} sets it again")
        target[name] = parameter

    def _collect_all(self, target: Parameters, parameters: Iterable[Parameter]) -> Parameters:
        for each in parameters:
            self._collect(target, each.name, each)
        return target

    def _convert_ruleset(self, statement: ObjectStatement, parameters: Parameters) -> None:
        name = parameters["name"].value if "name" in parameters else ""
        for each in statement.parameters:
            if each.name.startswith("queue.") and name == self.chosen:
                self.main[each.name] = each
            elif each.name != "name":
                advice = "only the main queue and actions have queues"
                self.draft.add_missing(get_origin(each), advice)
        if statement is not self.rulesets.get(name):
            self._miss(statement, "another ruleset has the same name")
            self.list_all(statement.body, "another ruleset has the same name")
        elif name != self.chosen and name not in self.called:
            advice = "a pipeline has one list of actions: write another configuration for it"
            self._miss(statement, advice)
            self.list_all(statement.body, advice)

    # ── inputs ──

    def _convert_module(self, statement: ObjectStatement, parameters: Parameters) -> None:
        name = parameters["load"].value.lower() if "load" in parameters else ""
        used = {"load"}
        if name == "imuxsock":
            used |= {"syssock.use", "syssock.name"}
            use = parameters.get("syssock.use")
            if use is None or use.value.lower() not in {"off", "no"}:
                path = parameters.get("syssock.name", parameters["load"])
                self._add_socket("/dev/log" if path.name == "load" else path.value, path)
        elif name == "imtcp":
            self.has_input_tls = _has_tls(parameters, otherwise=self.has_input_tls)
        elif name in _OTHER_INPUTS:
            self._miss(statement, _OTHER_INPUTS[name])
        elif name.removeprefix("builtin:") not in {*_INPUT_TYPES, "imfile", "omfile", "omfwd"}:
            self._miss(statement, "turnlane has no such module")
        self._list_unused(statement.parameters, used, "see the settings of turnlane's inputs")

    def _list_unused(self, parameters: Iterable[Parameter], used: set[str], advice: str) -> None:
        for each in parameters:
            if each.name not in used | _QUIET:
                self.draft.add_missing(get_origin(each), advice)

    def _convert_input(self, statement: ObjectStatement, parameters: Parameters) -> None:
        kind = parameters["type"].value.lower() if "type" in parameters else ""
        ruleset = parameters.get("ruleset")
        if (ruleset.value if ruleset else None) != self.chosen:
            self._miss(statement, "its ruleset is not converted: write another configuration")
        elif kind == "imtcp" and _has_tls(parameters, otherwise=self.has_input_tls):
            self._miss(statement, _INPUT_TLS)
        elif kind in _INPUT_TYPES:
            address = parameters["address"].value if "address" in parameters else ""
            for port in parameters["port"].value.split(",") if "port" in parameters else ["514"]:
                origin = parameters.get("port", parameters["type"])
                self._add_listener(_INPUT_TYPES[kind], address, port, origin)
            self._list_unused(statement.parameters, {"port", "address"}, "see the input syslog")
        elif kind == "imfile" and "file" in parameters:
            self.add_files(parameters["file"])
            self._list_unused(statement.parameters, {"file"}, "see the input files")
        elif kind == "imuxsock" and "socket" in parameters:
            self._add_socket(parameters["socket"].value, parameters["socket"])
            self._list_unused(statement.parameters, {"socket"}, "see the input unix")
        else:
            self._miss(statement, _OTHER_INPUTS.get(kind, "turnlane has no such input"))

    def _add_listener(self, protocol: str, address: str, port: str, origin: Parameter) -> None:
        host = address or "*"
        if ":" in host:
            host = f"[{host}]"
        made: dict[str, Any] = {"type": Leaf("syslog")}
        made[protocol] = Leaf(f"{host}:{port.strip()}", get_origin(origin))
        made["queue"] = Leaf("main")
        if not host.startswith(("127.", "localhost", "[::1]")):
            made["insecure"] = Leaf(value=True, comment="every host that reaches it may send")
        self.inputs.append(made)

    def _add_socket(self, path: str, origin: Parameter) -> None:
        made: dict[str, Any] = {"type": Leaf("unix"), "path": Leaf(path, get_origin(origin))}
        self.inputs.append(made | {"queue": Leaf("main")})

    # ── directives ──

    def _convert_directive(self, statement: Directive) -> None:
        name, value = statement.name.lower(), statement.value.split(" #")[0].strip()
        parameter = Parameter(f"${statement.name}", value, statement.line)
        for prefix in _LEGACY_QUEUES:
            if name.startswith(prefix):
                knob = name.removeprefix(prefix)
                target = self.main if prefix == "mainmsgqueue" else self.pending
                self._collect(target, f"queue.{_LEGACY_NAMES.get(knob, knob)}", parameter)
                return
        if name in _DIRECTIVES:
            _DIRECTIVES[name](self, parameter)
        elif f"action.{name.removeprefix('action')}" in ACTION_RULES:
            self._collect(self.pending, f"action.{name.removeprefix('action')}", parameter)
        else:
            self.draft.add_missing(get_origin(parameter), "turnlane has no such setting")

    def set_lasting(self, parameter: Parameter) -> None:
        """Take ``$ActionResumeInterval``, which holds for all legacy actions after it."""
        self.lasting["action.resumeinterval"] = parameter

    def set_tls(self, parameter: Parameter) -> None:
        """Take ``$ActionSendStreamDriverMode``: no later action sends in clear text."""
        self.lasting["streamdrivermode"] = parameter

    def set_input_tls(self, parameter: Parameter) -> None:
        """Take ``$InputTCPServerStreamDriverMode``, for the listeners after it."""
        self.has_input_tls = parameter.value != "0"
        self.draft.add_missing(get_origin(parameter), _INPUT_TLS)

    def set_name(self, parameter: Parameter) -> None:
        """Take ``$ActionName``, for the next legacy action."""
        self._collect(self.pending, "name", parameter)

    def load_module(self, parameter: Parameter) -> None:
        """Convert ``$ModLoad``."""
        load = Parameter("load", parameter.value.removesuffix(".so"), parameter.line)
        statement = ObjectStatement(parameter.line, parameter.written, "module", [load])
        self._convert_module(statement, {"load": load})

    def listen_tcp(self, parameter: Parameter) -> None:
        """Convert ``$InputTCPServerRun``."""
        if self.has_input_tls:
            self.draft.add_missing(get_origin(parameter), _INPUT_TLS)
        else:
            self._add_listener("tcp", "", parameter.value, parameter)

    def set_udp_address(self, parameter: Parameter) -> None:
        """Take ``$UDPServerAddress``, for the listeners after it."""
        self.udp_address = "" if parameter.value == "*" else parameter.value

    def listen_udp(self, parameter: Parameter) -> None:
        """Convert ``$UDPServerRun``."""
        self._add_listener("udp", self.udp_address, parameter.value, parameter)

    def add_files(self, parameter: Parameter) -> None:
        """Add an input for the path of ``$InputFileName``, or of ``imfile``."""
        made: dict[str, Any] = {"type": Leaf("files"), "name": Leaf(self._make_name("files"))}
        made["paths"] = Leaf([parameter.value], get_origin(parameter))
        self.inputs.append(made | {"queue": Leaf("main")})

    def convert_global(self, parameter: Parameter) -> None:
        """Convert a global setting, or the directive of the same name."""
        name = parameter.name.removeprefix("$")
        if name == "workdirectory":
            data = f"{parameter.value.rstrip('/')}/turnlane"
            self.draft.set(self.draft.settings, "node.data", data, get_origin(parameter))
        elif name == "maxmessagesize":
            self.message_bytes = parameter
        else:
            self.draft.add_missing(get_origin(parameter), "turnlane has no such setting")

    def leave_files_out(self, parameter: Parameter) -> None:
        """List ``$IncludeConfig``."""
        advice = "the files are not read: convert each of them, or paste them here"
        self.draft.add_missing(get_origin(parameter), advice)

    # ── actions ──

    def _convert_legacy_action(self, statement: LegacyAction, condition: str) -> None:
        text = statement.text
        if text == "~":
            self._add_action(statement, {}, {"type": Leaf("discard")}, condition)
            return
        parameters, self.pending = self.lasting | self.pending, {}
        forward, file = _LEGACY_FORWARD.match(text), _LEGACY_FILE.match(text)
        if not forward:
            parameters.pop("streamdrivermode", None)
        made: Parameters = {}

        def give(name: str, value: str | None) -> None:
            if value:
                made[name] = Parameter(name, value, statement.line)

        if forward:
            options = forward[2] or ""
            give("type", "omfwd")
            give("target", forward[3].strip("[]"))
            give("port", forward[4])
            give("protocol", "tcp" if forward[1] == "@@" else "udp")
            give("tcp_framing", "octet-counted" if "o" in options else None)
            give("ziplevel", options.replace("o", "").strip(","))
            give("template", forward[5])
        elif file:
            give("type", "omfile")
            give("file", file[2])
            give("template", file[3])
        else:
            self._miss(statement, "turnlane has no such action")
            for each in parameters.values():
                self.draft.add_missing(get_origin(each), "its action was not converted")
            return
        self._convert_action(statement, made | parameters, condition)

    def _convert_action(self, statement: Statement, parameters: Parameters, condition: str) -> None:
        kind = parameters["type"].value.lower() if "type" in parameters else ""
        used = {"template"}
        output: dict[str, Any] = {}
        if kind == "omfwd" and "target" in parameters:
            used |= self._convert_forward(parameters, output)
        elif kind == "omfile" and "file" in parameters:
            used |= self._convert_file(parameters, output)
        elif kind == "omdiscard":
            output["type"] = Leaf("discard")
        else:
            self._miss(statement, _OTHER_OUTPUTS.get(kind, "turnlane has no such action"))
            return
        self._add_action(statement, parameters, output, condition)
        rest = [
            each
            for name, each in parameters.items()
            if name not in used | _QUIET | ACTION_RULES.keys() and not name.startswith("queue.")
        ]
        self._list_unused(rest, set(), f"see the settings of the output {output['type'].value}")

    def _add_action(
        self,
        statement: Statement,
        parameters: Parameters,
        output: dict[str, Any],
        condition: str,
    ) -> None:
        """Add an action with its queue and delivery."""
        given = parameters.get("name")
        kind = str(output["type"].value)
        name = self._make_name(given.value if given else kind)
        action: dict[str, Any] = {"name": Leaf(name, get_origin(given) if given else None)}
        if condition != EVERY:
            action["filter"] = Leaf(condition, comment=f"line {statement.line}")
        action |= {"queue": {}, "lane": {}, "delivery": {}, "output": output}
        knobs = {
            key.removeprefix("queue."): each
            for key, each in parameters.items()
            if key.startswith("queue.")
        }
        queue = QueueDraft(self.draft, knobs, action["queue"], action["lane"], action["delivery"])
        convert_queue(queue)
        for key, rule in ACTION_RULES.items():
            if key in parameters:
                apply_rule(rule, queue, parameters[key])
        complete_backoff(action["delivery"])
        self.actions.append(action)

    def _convert_forward(self, parameters: Parameters, output: dict[str, Any]) -> set[str]:
        """Fill the output for ``omfwd``; return the parameters that were read."""
        target, port = parameters["target"], parameters.get("port")
        host = f"[{target.value}]" if ":" in target.value else target.value
        protocol = parameters.get("protocol")
        framing = parameters.get("tcp_framing")
        template = parameters.get("template")
        is_stream = protocol is not None and protocol.value.lower() == "tcp"
        output["type"] = Leaf("syslog")
        output["address"] = Leaf(f"{host}:{port.value if port else 514}", get_origin(target))
        output["protocol"] = Leaf("tcp" if is_stream else "udp", protocol and get_origin(protocol))
        mode = next((parameters[name] for name in _TLS_MODES if name in parameters), None)
        if is_stream and mode is not None and mode.value != "0":
            output["protocol"] = Leaf("tls", get_origin(mode))
            advice = "set tls of the output: ca, and cert and key if the receiver asks for them"
            self.draft.add_different(get_origin(mode), advice)
        if is_stream:
            is_counted = framing is not None and framing.value.lower() == "octet-counted"
            value = "octet" if is_counted else "newline"
            comment = "" if framing else "rsyslog's default"
            output["framing"] = Leaf(value, framing and get_origin(framing), comment)
        known = _FORWARD_FORMATS.get(template.value.lower()) if template else "rfc3164"
        comment = "" if template else "rsyslog's default"
        output["format"] = Leaf(known or "rfc5424", template and get_origin(template), comment)
        if template is not None and known is None:
            advice = "turnlane has no templates: the output sends RFC 5424"
            self.draft.add_missing(get_origin(template), advice)
        elif template is not None and template.value.lower() == "rsyslog_forwardformat":
            advice = "RFC 3164 has no fractions of a second; use format: rfc5424 for them"
            self.draft.add_different(get_origin(template), advice)
        return {"target", "port", "protocol", "tcp_framing", *_TLS_MODES}

    def _convert_file(self, parameters: Parameters, output: dict[str, Any]) -> set[str]:
        """Fill the output for ``omfile``; return the parameters that were read."""
        file = parameters["file"]
        output["type"] = Leaf("file")
        output["path"] = Leaf(file.value, get_origin(file))
        output["format"] = Leaf("raw", comment="the message as it came; json has its columns")
        if "sync" in parameters:
            set_value(self.draft, output, "sync", read_switch, parameters["sync"])
        if "rotation.sizelimit" in parameters:
            limit = parameters["rotation.sizelimit"]
            set_value(self.draft, output, "rotate_size", read_size, limit)
        template = parameters.get("template")
        if template is not None:
            advice = "turnlane has no templates: the file gets the message as it came"
            self.draft.add_missing(get_origin(template), advice)
        return {"file", "sync", "rotation.sizelimit"}

    def _make_name(self, wanted: str) -> str:
        """Return a name that no other action has."""
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", wanted).strip("-")[:60] or "action"
        number, name = 1, stem
        while name in self.names:
            number += 1
            name = f"{stem}-{number}"
        self.names.add(name)
        return name


def _has_tls(parameters: Parameters, *, otherwise: bool) -> bool:
    modes = [parameters[name].value for name in _TLS_MODES if name in parameters]
    return modes[0] != "0" if modes else otherwise


_DIRECTIVES: Final[Mapping[str, Callable[[RsyslogConverter, Parameter], None]]] = {
    "actionname": RsyslogConverter.set_name,
    "actionresumeinterval": RsyslogConverter.set_lasting,
    "actionsendstreamdrivermode": RsyslogConverter.set_tls,
    "includeconfig": RsyslogConverter.leave_files_out,
    "inputfilename": RsyslogConverter.add_files,
    "inputptcpserverrun": RsyslogConverter.listen_tcp,
    "inputtcpserverrun": RsyslogConverter.listen_tcp,
    "inputtcpserverstreamdrivermode": RsyslogConverter.set_input_tls,
    "maxmessagesize": RsyslogConverter.convert_global,
    "modload": RsyslogConverter.load_module,
    "udpserveraddress": RsyslogConverter.set_udp_address,
    "udpserverrun": RsyslogConverter.listen_udp,
    "workdirectory": RsyslogConverter.convert_global,
}


def convert_text(text: str, file: str) -> Draft:
    """Return the draft of a configuration."""
    draft = Draft(f"From rsyslog: {file}")
    draft.settings["node"]["data"] = Leaf("./data")
    statements = parse_statements(text)
    objects = [each for each in statements if isinstance(each, ObjectStatement)]
    rulesets = {
        parameter.value: each
        for each in objects
        if each.kind == "ruleset"
        for parameter in each.parameters
        if parameter.name == "name"
    }
    chosen = _choose_ruleset(statements)
    start = statements if chosen is None else rulesets[chosen].body
    converter = RsyslogConverter(draft, rulesets, chosen, _find_called(start, rulesets))
    if chosen is None:
        converter.walk(statements, EVERY)
    else:
        converter.walk([each for each in statements if not _is_rule(each)], EVERY)
        unused = [each for each in statements if _is_rule(each)]
        converter.list_all(unused, "no input leads to the default ruleset")
        converter.walk(rulesets[chosen].body, EVERY)
    for parameter in converter.pending.values():
        draft.add_unused(get_origin(parameter), "no action follows")
    _finish(converter)
    return draft


def _is_rule(statement: Statement) -> bool:
    """Whether a statement is a part of a ruleset."""
    if isinstance(statement, ObjectStatement):
        return statement.kind == "action"
    return isinstance(statement, Condition | LegacyAction | Stop | RulesetCall)


def _find_called(
    start: Iterable[Statement], rulesets: Mapping[str, ObjectStatement]
) -> frozenset[str]:
    """Return the rulesets that messages reach by ``call`` from these statements."""
    found: set[str] = set()
    waiting = list(start)
    while waiting:
        each = waiting.pop()
        if isinstance(each, Condition):
            waiting += [*each.then, *each.otherwise]
        elif isinstance(each, RulesetCall) and each.ruleset in rulesets.keys() - found:
            found.add(each.ruleset)
            waiting += rulesets[each.ruleset].body
    return frozenset(found)


def _choose_ruleset(statements: list[Statement]) -> str | None:
    """Return the ruleset to which all inputs lead; ``None`` is the default one."""
    found: set[str | None] = set()
    names = set()
    for each in statements:
        if isinstance(each, Directive):
            name = each.name.lower()
            if name.endswith(("serverrun", "inputfilename")) or "imuxsock" in each.value:
                found.add(None)
        if not isinstance(each, ObjectStatement):
            continue
        values = {parameter.name: parameter.value for parameter in each.parameters}
        if each.kind == "input":
            found.add(values.get("ruleset"))
        if each.kind == "module" and values.get("load", "").lower() == "imuxsock":
            found.add(None)
        if each.kind == "ruleset":
            names.add(values.get("name"))
    return found.pop() if len(found) == 1 and found <= names else None


def _finish(converter: RsyslogConverter) -> None:
    """Put the parts into the sections of the draft."""
    draft, settings = converter.draft, converter.draft.settings
    knobs = {name.removeprefix("queue."): each for name, each in converter.main.items()}
    convert_queue(QueueDraft(draft, knobs, settings["main"], settings["lane"], None))
    if converter.message_bytes is not None:
        syslog = [each for each in converter.inputs if each["type"].value == "syslog"]
        for each in syslog:
            set_value(draft, each, "max_message_bytes", read_size, converter.message_bytes)
        if not syslog:
            draft.add_unused(get_origin(converter.message_bytes), "there is no syslog input")
    settings["inputs"] = converter.inputs
    settings["actions"] = converter.actions
    if converter.actions:
        settings["parse"] = {"format": Leaf("syslog")}
    elif converter.inputs or settings["main"]:
        settings["queues"] = {"main": settings.pop("main") or {"kind": Leaf("disk")}}
        for parameter in knobs.values():
            if parameter.name.startswith("queue.worker") or "batch" in parameter.name:
                draft.add_unused(get_origin(parameter), "there is no action")
        settings["lane"] = {}
