"""The stored versions: a folder for each, with archives of directories and JSON beside them."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any, Final

from tests.compatibility.running import write_json

STORED: Final = Path(__file__).parent / "stored"


class StoredVersion:
    """The stored files of one version."""

    def __init__(self, name: str) -> None:
        self.path = STORED / name

    def read(self, name: str) -> Any:
        """Return a stored description."""
        return json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))

    def write(self, name: str, value: Any) -> None:
        """Store a description."""
        write_json(self.path / f"{name}.json", value)

    @property
    def configurations(self) -> list[Path]:
        """The stored configurations."""
        return sorted((self.path / "configurations").glob("*.yaml"))

    def unpack(self, name: str, directory: Path) -> Path:
        """Unpack an archive into a new directory."""
        directory.mkdir()
        with tarfile.open(self.path / f"{name}.tar.gz") as archive:
            archive.extractall(directory, filter="data")
        return directory

    def pack(self, name: str, directory: Path) -> None:
        """Pack a directory, the same directory always into the same bytes."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path in sorted(directory.rglob("*")):
                about = archive.gettarinfo(path, str(path.relative_to(directory)))
                about.mtime = about.uid = about.gid = 0
                about.uname = about.gname = ""
                if path.is_file():
                    with path.open("rb") as file:
                        archive.addfile(about, file)
                else:
                    archive.addfile(about)
        file_name = self.path / f"{name}.tar.gz"
        file_name.write_bytes(gzip.compress(packed.getvalue(), mtime=0))


def list_versions() -> list[str]:
    """Return the names of all stored versions."""
    return sorted(path.name for path in STORED.iterdir() if path.is_dir())
