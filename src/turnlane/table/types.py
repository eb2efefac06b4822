"""The types that a queue's own columns may have, and what each database calls them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Type:
    """A type by its name in each database; ``arguments`` says how many numbers may follow."""

    sqlite: str
    postgres: str
    mysql: str
    arguments: tuple[int, ...] = (0,)
    passes: bool = True
    """Whether the numbers mean anything; the width of MySQL's integers does not."""
    keyed: bool = False
    """Whether its text is the same in every database, so that a key can be hashed by it."""

    def check(self, arguments: tuple[int, ...]) -> None:
        """Raise ``ValueError`` unless so many numbers may follow."""
        if len(arguments) not in self.arguments:
            allowed = " or ".join(map(str, self.arguments))
            raise ValueError(f"takes {allowed} numbers in parentheses, not {len(arguments)}")

    def written(self, database: str, arguments: tuple[int, ...]) -> str:
        """The type as the database has it."""
        name: str = getattr(self, database)
        if not arguments or not self.passes:
            return name
        return f"{name}({', '.join(map(str, arguments))})"


def _integer(postgres: str, mysql: str) -> Type:
    return Type("INTEGER", postgres, mysql, (0, 1), passes=False, keyed=True)


_DECIMAL: Final = Type("NUMERIC", "NUMERIC", "DECIMAL", (0, 1, 2))
_BYTES: Final = Type("BLOB", "BYTEA", "LONGBLOB")
_INT: Final = _integer("INTEGER", "INT")
_DOUBLE: Final = Type("REAL", "DOUBLE PRECISION", "DOUBLE")

TYPES: Final[Mapping[str, Type]] = {
    "BIGINT": _integer("BIGINT", "BIGINT"),
    "INT": _INT,
    "INTEGER": _INT,
    "SMALLINT": _integer("SMALLINT", "SMALLINT"),
    "BOOLEAN": Type("BOOLEAN", "BOOLEAN", "BOOLEAN"),
    "REAL": Type("REAL", "REAL", "FLOAT"),
    "DOUBLE": _DOUBLE,
    "NUMERIC": _DECIMAL,
    "DECIMAL": _DECIMAL,
    "CHAR": Type("CHAR", "CHAR", "CHAR", (1,)),
    "VARCHAR": Type("VARCHAR", "VARCHAR", "VARCHAR", (1,), keyed=True),
    "TEXT": Type("TEXT", "TEXT", "LONGTEXT", keyed=True),
    "BLOB": _BYTES,
    "BYTEA": _BYTES,
    "DATE": Type("DATE", "DATE", "DATE"),
    "TIMESTAMP": Type("TIMESTAMP", "TIMESTAMPTZ", "DATETIME(6)"),
    "JSON": Type("TEXT", "JSONB", "JSON"),
    "UUID": Type("TEXT", "UUID", "CHAR(36)"),
}
