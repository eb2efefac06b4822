"""A YAML text as plain values, with the place of each, so that every fault can be pointed at.

Values are made here and not by ruamel's constructor: only text, numbers, booleans, null, lists and
mappings with text keys exist in a configuration, and nothing in a file can make anything else.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from turnlane.errors import ConfigError

# ── faults ──
# The mistakes in a configuration file, each with its place.


class Place(NamedTuple):
    """Where something stands in the file; both count from 1."""

    line: int
    column: int


class Fault(NamedTuple):
    """One thing that is wrong: where, with which setting (dotted path), and what to do."""

    place: Place
    path: str
    message: str

    def __str__(self) -> str:
        where = f"{self.place.line}:{self.place.column}"
        return f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"


class ConfigFaults(ConfigError):
    """A configuration file that cannot be used; ``faults`` has everything that is wrong with it.

    As text it is a line ``file:line:column: dotted.path: message`` for each.
    """

    def __init__(self, file: str, faults: Sequence[Fault]) -> None:
        self.file = file
        self.faults = tuple(sorted(set(faults)))
        super().__init__(self.faults[0].path, self.faults[0].message)

    def __str__(self) -> str:
        return "\n".join(f"{self.file}:{fault}" for fault in self.faults)


# ── substitution ──
# ``${VAR}`` in a scalar: substituted after parsing, so a value can never change the structure.

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


def substituted(text: str, environment: Mapping[str, str]) -> str:
    """Replace the variables in a text. Raises ``ValueError`` that names a missing variable."""
    return _REFERENCE.sub(lambda match: _value(match, environment), text)


def _value(match: re.Match[str], environment: Mapping[str, str]) -> str:
    if match["escaped"]:
        return "$"
    if match["malformed"]:
        raise ValueError(f"a variable is not written so; {_HELP}")
    name, default, message = match["name"], match["default"], match["message"]
    value = environment.get(name)
    if default is not None:
        return value or default
    if message is not None and not value:
        raise ValueError(f"variable {name} is not set: {message or 'it is required'}")
    if value is None:
        raise ValueError(f"variable {name} is not set; set it, or write ${{{name}:-default}}")
    return value


Path = tuple[str | int, ...]

MOST_NODES: Final = 100_000
"""Aliases of aliases can make a small file huge; no real configuration has this many values."""
DEEPEST: Final = 50

_TAG: Final = "tag:yaml.org,2002:"
_START: Final = Place(1, 1)
_PART: Final = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


@dataclass
class Document:
    """What a file says."""

    file: str
    data: Any = None
    keys: dict[Path, Place] = field(default_factory=dict)
    """Where the key of a mapping's entry stands."""
    values: dict[Path, Place] = field(default_factory=dict)
    """Where a value stands."""
    written: dict[Path, str] = field(default_factory=dict)
    """The text of the values that variables went into, as it stands in the file."""
    faults: list[Fault] = field(default_factory=list)

    def place(self, path: Path, *, of_key: bool = False) -> Place:
        """Where a setting stands, or the nearest thing around it."""
        for length in range(len(path), -1, -1):
            first, second = (self.keys, self.values) if of_key else (self.values, self.keys)
            found = first.get(path[:length]) or second.get(path[:length])
            if found is not None:
                return found
        return _START

    def fault(self, path: Path, message: str, *, of_key: bool = False) -> None:
        """Note that something is wrong with a setting."""
        self.faults.append(Fault(self.place(path, of_key=of_key), dotted(path), message))


def dotted(path: Path) -> str:
    """``inputs[0].listen`` for a path of keys and indexes."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def undotted(text: str) -> Path:
    """The path of keys and indexes that :func:`dotted` made a text of; keys have no dots."""
    parts = _PART.findall(text)
    return tuple(int(index) if index else key for key, index in parts)


def parse(text: str, file: str, environment: Mapping[str, str]) -> Document:
    """Parse a document. Its ``faults`` are the mistakes in it; a text that is not YAML raises.

    Raises ``ConfigFaults`` if it is none.
    """
    document = Document(file)
    root = _composed(text, file)
    if root is None:
        document.data = {}
    else:
        document.data = _Builder(document, environment).build(root)
    return document


def _composed(text: str, file: str) -> Node | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an anchor used twice: the later one counts
            root: Node | None = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        raise ConfigFaults(file, [Fault(_mark_of(error), "", _words(error))]) from None
    except YAMLError as error:
        message = f"this is not YAML: {str(error).partition(chr(10))[0]}"
        raise ConfigFaults(file, [Fault(_START, "", message)]) from None
    except RecursionError:
        raise ConfigFaults(file, [Fault(_START, "", "this is nested too deeply")]) from None
    except (ValueError, LookupError, AssertionError, AttributeError, TypeError) as error:
        # ruamel's scanner trips over a few malformed texts without an error of its own.
        message = f"this is not YAML that can be read ({type(error).__name__})"
        raise ConfigFaults(file, [Fault(_START, "", message)]) from None
    return root


def _mark_of(error: MarkedYAMLError) -> Place:
    mark = error.problem_mark or error.context_mark
    return _START if mark is None else Place(mark.line + 1, mark.column + 1)


def _words(error: MarkedYAMLError) -> str:
    """The parser's own words, without the excerpt: it might be a line with a secret."""
    context = f" {error.context}" if error.context else ""
    return f"this is not YAML: {error.problem or 'it cannot be read'}{context}"


class _Builder:
    def __init__(self, document: Document, environment: Mapping[str, str]) -> None:
        self._document = document
        self._environment = environment
        self._nodes = 0

    def build(self, node: Node, path: Path = ()) -> Any:  # noqa: ANN401 - whatever YAML has
        self._nodes += 1
        if self._nodes > MOST_NODES or len(path) > DEEPEST:
            what = "nested too deeply" if len(path) > DEEPEST else "too large with its aliases"
            fault = Fault(_place_of(node), dotted(path[:3]), f"this is {what}")
            raise ConfigFaults(self._document.file, [*self._document.faults, fault])
        if not _is_empty(node):
            self._document.values[path] = _place_of(node)
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            self._document.fault(path, f"a tag such as {node.tag} means nothing here; remove it")
        if isinstance(node, SequenceNode):
            return [self.build(item, (*path, at)) for at, item in enumerate(node.value)]
        assert isinstance(node, MappingNode)
        return self._mapping(node, path)

    def _scalar(self, node: ScalarNode, path: Path) -> Any:  # noqa: ANN401 - whatever YAML has
        make = _SCALARS.get(node.tag or "")
        if make is None:
            self._document.fault(path, f"a tag such as {node.tag} means nothing here; remove it")
            return node.value
        if "$" not in node.value:
            return make(node.value)
        # Always text: a value from outside becomes a number only where the setting is a number.
        try:
            value = substituted(node.value, self._environment)
        except ValueError as error:
            self._document.fault(path, str(error))
            return node.value
        if value != node.value:
            self._document.written[path] = node.value
        return value

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        made: dict[str, Any] = {}
        merged: list[tuple[Node, Node]] = []
        for key, value in node.value:
            if key.tag == f"{_TAG}merge":
                merged += self._merged(value, path)
            elif self._takes(key, path, made):
                made[key.value] = self.build(value, (*path, key.value))
        for key, value in merged:  # what stands here itself wins, then the first of the merged
            if isinstance(key, ScalarNode) and key.value not in made:
                self._document.keys[*path, key.value] = _place_of(key)
                made[key.value] = self.build(value, (*path, key.value))
        return made

    def _takes(self, key: Node, path: Path, made: dict[str, Any]) -> bool:
        """Whether the key is one, and the first of its name."""
        where = _place_of(key)
        if not isinstance(key, ScalarNode):
            fault = Fault(where, dotted(path), "a key is a plain word, not a list or a mapping")
            self._document.faults.append(fault)
            return False
        inner = (*path, key.value)
        if key.value in made:
            before = self._document.keys[inner].line
            message = f"stands here twice, first in line {before}; remove one"
            self._document.faults.append(Fault(where, dotted(inner), message))
            return False
        self._document.keys[inner] = where
        return True

    def _merged(self, value: Node, path: Path) -> Iterator[tuple[Node, Node]]:
        """The entries that ``<<: *other`` or ``<<: [*one, *other]`` brings."""
        for source in value.value if isinstance(value, SequenceNode) else [value]:
            entries = source.value if isinstance(source, MappingNode) else None
            if entries is None or any(key.tag == f"{_TAG}merge" for key, _ in entries):
                message = "<< takes a mapping without << of its own, as in <<: *defaults"
                self._document.faults.append(Fault(_place_of(value), dotted(path), message))
            else:
                yield from entries


def _place_of(node: Node) -> Place:
    return Place(node.start_mark.line + 1, node.start_mark.column + 1)


def _is_empty(node: Node) -> bool:
    """Whether nothing is written at all; the parser then points somewhere behind."""
    return isinstance(node, ScalarNode) and not node.value and node.start_mark == node.end_mark


def _number(kind: Callable[[str], int | float]) -> Callable[[str], int | float | str]:
    def make(text: str) -> int | float | str:
        try:
            return kind(text.replace("_", ""))
        except ValueError:
            return text

    return make


def _whole(text: str) -> int:
    return int(text, 0) if text.lstrip("+-")[:2] in {"0x", "0o", "0b"} else int(text)


def _real(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_SCALARS: Final[dict[str, Callable[[str], Any]]] = {
    f"{_TAG}str": str,
    f"{_TAG}null": lambda _text: None,
    f"{_TAG}bool": lambda text: text.lower() in {"true", "yes", "on", "y"},
    f"{_TAG}int": _number(_whole),
    f"{_TAG}float": _number(_real),
    f"{_TAG}timestamp": str,
    f"{_TAG}value": str,
}
