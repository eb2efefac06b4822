"""A YAML text as plain values, with the position of every key and value.

ruamel parses the text into nodes, whose marks are the positions, and makes the scalars. Its
round-trip loader, which keeps positions in ``.lc``, would not do: it stops at the first duplicate
key, where we report all issues of a file at once; it has no position for values that are merged in
or missing; and it builds objects for tags. A configuration has only text, numbers, booleans, null,
lists, and mappings with text keys, so the lists and mappings are built here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from turnlane.errors import ConfigError

Path = tuple[str | int, ...]
"""The keys and indexes that lead to a setting."""

MAX_NODES: Final = 100_000
"""Aliases of aliases can make a small file huge. No real configuration has this many values."""
MAX_DEPTH: Final = 50

_TAG: Final = "tag:yaml.org,2002:"
_PART: Final = re.compile(r"([^.\[\]]+)|\[(\d+)\]")

# ── issues ───────────────────────────────────────────────────────────────────────────────────────


class FilePosition(NamedTuple):
    """A position in the file; line and column count from 1."""

    line: int
    column: int

    @classmethod
    def of(cls, node: Node) -> FilePosition:
        """Return where a node of ruamel starts."""
        return cls(node.start_mark.line + 1, node.start_mark.column + 1)


_START: Final = FilePosition(1, 1)


class SettingIssue(NamedTuple):
    """One issue with a setting, before its position is known."""

    path: Path
    message: str
    of_key: bool = False
    """Whether the key is wrong, and not the value."""


class LocatedIssue(NamedTuple):
    """One issue in a configuration file: where, with which setting (dotted path), and what."""

    position: FilePosition
    path: str
    message: str

    def __str__(self) -> str:
        where = f"{self.position.line}:{self.position.column}"
        return f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"


class ConfigFileError(ConfigError):
    """A configuration file that cannot be used; ``issues`` has all its issues.

    Its text is a line ``file:line:column: dotted.path: message`` for each of them.
    """

    def __init__(self, file: str, issues: Sequence[LocatedIssue]) -> None:
        self.file = file
        self.issues = tuple(sorted(set(issues)))
        super().__init__(self.issues[0].path, self.issues[0].message)

    def __str__(self) -> str:
        return "\n".join(f"{self.file}:{issue}" for issue in self.issues)


def format_path(path: Path) -> str:
    """Return a path as ``inputs[0].listen``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def parse_path(text: str) -> Path:
    """Return the path that :func:`format_path` made this text of; its keys have no dots."""
    return tuple(int(index) if index else key for key, index in _PART.findall(text))


# ── variables ──
# ``${VAR}`` is replaced after the text is parsed, so a value can never change the structure.

_REFERENCE: Final = re.compile(
    r"""\$(?:
        (?P<escaped>\$)
        | \{(?P<name>[A-Za-z_][A-Za-z0-9_]*)
            (?: :-(?P<default>[^{}]*) | :\?(?P<message>[^{}]*) )?
          \}
        | (?P<malformed>\{)
    )""",
    re.VERBOSE,
)
_HELP: Final = "write ${VAR}, ${VAR:-default} or ${VAR:?message}, and $$ for a dollar sign"


def substitute_variables(text: str, environment: Mapping[str, str]) -> str:
    """Replace the variables in a text. Raises ``ValueError`` that names a missing variable."""

    def get_value(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "$"
        if match["malformed"]:
            raise ValueError(f"this variable is malformed; {_HELP}")
        name, default, message = match["name"], match["default"], match["message"]
        value = environment.get(name)
        if default is not None:
            return value or default
        if message is not None and not value:
            raise ValueError(f"variable {name} is not set: {message or 'it is required'}")
        if value is None:
            raise ValueError(f"variable {name} is not set; set it, or write ${{{name}:-default}}")
        return value

    return _REFERENCE.sub(get_value, text)


# ── documents ────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Document:
    """The values of a file, their positions, and the issues that were found until now."""

    file: str
    data: Any = None
    keys: dict[Path, FilePosition] = field(default_factory=dict)
    values: dict[Path, FilePosition] = field(default_factory=dict)
    written: dict[Path, str] = field(default_factory=dict)
    """The original text of values in which variables were replaced."""
    issues: list[LocatedIssue] = field(default_factory=list)

    def find_position(self, path: Path, *, of_key: bool = False) -> FilePosition:
        """Return the position of a setting, or of the nearest section around it."""
        for length in range(len(path), -1, -1):
            first, second = (self.keys, self.values) if of_key else (self.values, self.keys)
            found = first.get(path[:length]) or second.get(path[:length])
            if found is not None:
                return found
        return _START

    def locate(self, issue: SettingIssue) -> LocatedIssue:
        """Return an issue with its position."""
        position = self.find_position(issue.path, of_key=issue.of_key)
        return LocatedIssue(position, format_path(issue.path), issue.message)

    def add_issue(self, path: Path, message: str) -> None:
        """Add an issue with a setting."""
        self.issues.append(self.locate(SettingIssue(path, message)))

    def raise_issues(self) -> None:
        """Raise ``ConfigFileError`` if there are issues."""
        if self.issues:
            raise ConfigFileError(self.file, self.issues)


def parse(text: str, file: str, environment: Mapping[str, str]) -> Document:
    """Parse a YAML text; the document has its issues. Raises ``ConfigFileError`` if it is not YAML.

    ``file`` is the name of the text in messages.
    """
    document = Document(file)
    yaml = YAML(typ="safe", pure=True)
    position = _START
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an anchor used twice: the later one counts
            root: Node | None = yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = _START if mark is None else FilePosition(mark.line + 1, mark.column + 1)
        # Without the excerpt that ruamel adds: the line may have a secret.
        context = f" {error.context}" if error.context else ""
        message = f"this is not YAML: {error.problem or 'it cannot be read'}{context}"
    except YAMLError as error:
        message = f"this is not YAML: {str(error).partition(chr(10))[0]}"
    except RecursionError:
        message = "this is nested too deeply"
    except (ValueError, LookupError, AssertionError, AttributeError, TypeError) as error:
        # ruamel's scanner fails on a few malformed texts without an error of its own.
        message = f"this is not YAML that can be read ({type(error).__name__})"
    else:
        builder = _DocumentBuilder(document, environment, yaml)
        document.data = {} if root is None else builder.build(root)
        return document
    raise ConfigFileError(file, [LocatedIssue(position, "", message)])


class _DocumentBuilder:
    """Builds the values of a document from ruamel's nodes, with positions and issues."""

    def __init__(self, document: Document, environment: Mapping[str, str], yaml: YAML) -> None:
        self._document = document
        self._environment = environment
        self._constructor = yaml.constructor
        self._nodes = 0

    def build(self, node: Node, path: Path = ()) -> Any:  # noqa: ANN401 - any value of YAML
        self._nodes += 1
        if self._nodes > MAX_NODES or len(path) > MAX_DEPTH:
            what = "nested too deeply" if len(path) > MAX_DEPTH else "too large with its aliases"
            self._add_issue(node, path[:3], f"this is {what}")
            self._document.raise_issues()
        # ruamel's position of an empty value is somewhere behind it.
        if not isinstance(node, ScalarNode) or node.value or node.start_mark != node.end_mark:
            self._document.values[path] = FilePosition.of(node)
        if isinstance(node, ScalarNode):
            return self._build_scalar(node, path)
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            self._document.add_issue(path, f"the tag {node.tag} is not supported; remove it")
        if isinstance(node, SequenceNode):
            return [self.build(item, (*path, at)) for at, item in enumerate(node.value)]
        assert isinstance(node, MappingNode)
        return self._build_mapping(node, path)

    def _build_scalar(self, node: ScalarNode, path: Path) -> Any:  # noqa: ANN401 - any scalar
        kind = str(node.tag).removeprefix(_TAG)
        if kind not in {"str", "null", "bool", "int", "float", "timestamp", "value"}:
            self._document.add_issue(path, f"the tag {node.tag} is not supported; remove it")
            return node.value
        if "$" not in node.value:
            if kind in {"str", "timestamp", "value"}:
                return node.value
            try:
                return getattr(self._constructor, f"construct_yaml_{kind}")(node)
            except (ValueError, LookupError):  # such as !!int x
                return node.value
        # The value stays text: it becomes a number only where the setting is a number.
        try:
            value = substitute_variables(node.value, self._environment)
        except ValueError as error:
            self._document.add_issue(path, str(error))
            return node.value
        if value != node.value:
            self._document.written[path] = node.value
        return value

    def _build_mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        made: dict[str, Any] = {}
        merged: list[tuple[Node, Node]] = []
        for key, value in node.value:
            if key.tag == f"{_TAG}merge":
                merged += self._get_merged_entries(value, path)
            elif not isinstance(key, ScalarNode):
                self._add_issue(key, path, "a key must be a plain word, not a list or a mapping")
            elif key.value in made:
                first = self._document.keys[*path, key.value].line
                message = f"duplicate key, first in line {first}; remove one"
                self._add_issue(key, (*path, key.value), message)
            else:
                self._document.keys[*path, key.value] = FilePosition.of(key)
                made[key.value] = self.build(value, (*path, key.value))
        for key, value in merged:  # own entries win, then entries of the first merged mapping
            if isinstance(key, ScalarNode) and key.value not in made:
                self._document.keys[*path, key.value] = FilePosition.of(key)
                made[key.value] = self.build(value, (*path, key.value))
        return made

    def _get_merged_entries(self, value: Node, path: Path) -> Iterator[tuple[Node, Node]]:
        """Return the entries that ``<<: *other`` or ``<<: [*one, *other]`` adds."""
        for source in value.value if isinstance(value, SequenceNode) else [value]:
            entries = source.value if isinstance(source, MappingNode) else None
            if entries is None or any(key.tag == f"{_TAG}merge" for key, _ in entries):
                message = "<< takes a mapping without << of its own, as in <<: *defaults"
                self._add_issue(value, path, message)
            else:
                yield from entries

    def _add_issue(self, node: Node, path: Path, message: str) -> None:
        issue = LocatedIssue(FilePosition.of(node), format_path(path), message)
        self._document.issues.append(issue)
