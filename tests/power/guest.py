"""A QEMU guest with a node in it, on a disk that can lose its power.

The guest has the kernel of Debian, which ``scripts/peers power`` unpacks, and a read-only root with
the Python, the packages and the turnlane of this process. It boots once, up to a point where the
node's modules are imported and the disk under test is not mounted. Its memory is saved there, and
each life of the guest begins with it. So a start takes seconds, also without KVM. All that a life
changes in memory, the page cache of its kernel too, is lost when it is killed; the cache of the
disk is lost by :mod:`tests.power.disk`.
"""

from __future__ import annotations

import compileall
import gzip
import importlib.metadata
import json
import lzma
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tests.power.disk import SECTOR
from turnlane.runtime import Closeable

ROOT = Path(__file__).parents[2]
KERNEL = ROOT / ".cache" / "power"
"""The unpacked Debian package with the kernel."""
DATA = "/run/data"
"""The directory in which the guest mounts the disk under test."""
ADDRESS = "10.0.2.15"
"""The address of the guest in QEMU's network."""
FLIGHT, HTTP = 8815, 8088
"""The ports of the node in the guest."""
MEMORY_MIB = 768
MODULES = ("virtio_pci", "virtio_blk", "virtio_net", "ext4")
FILE_SYSTEMS = {
    "ext4": ["mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-E", "lazy_itable_init=0"],
    "xfs": ["mkfs.xfs", "-q", "-f", "-s", "size=4096"],
}
PATIENCE = 600.0
"""Seconds after which a guest counts as stuck: emulation on a busy machine is slow."""

INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
for module in {modules}; do insmod /modules/$module.ko; done
mount -t devtmpfs dev /dev
mount -o ro /dev/vda /root
mount -t proc proc /root/proc
mount -t sysfs sysfs /root/sys
mount -t devtmpfs dev /root/dev
mount -t tmpfs run /root/run
mkdir /root/run/data /root/run/tmp
ifconfig lo 127.0.0.1
ifconfig eth0 {address}
export PYTHONPATH=/packages HOME=/run/tmp TMPDIR=/run/tmp LC_ALL=C.UTF-8 PATH=/bin
chroot /root {python} /agent.py
echo "the node has ended: $?"
poweroff -f
"""

AGENT = """
import os, subprocess, sys, time, urllib.request
from pathlib import Path
from turnlane.cli import app, main
from turnlane.config import loads
from turnlane.service import Service

config = Path("/node.yaml").read_text()
with Service(loads(config.replace("{data}", "/run/tmp/warm"))).start() as service:
    for name in service.node.queues():
        url = f"http://127.0.0.1:{http}/queues/{{name}}"
        urllib.request.urlopen(url + "/events?ack=accepted", b"warm").read()
        urllib.request.urlopen(url + "/events").read()
        urllib.request.urlopen(url + "/peek").read()
with open("/dev/ttyS1", "r+b", buffering=0) as control:
    control.write(b"waiting\\n")
    while not (line := control.readline().split()):
        pass
    control.write(b"started\\n")
now, delay = line
Path("/proc/sys/vm/dirty_expire_centisecs").write_text(delay.decode())
Path("/proc/sys/vm/dirty_writeback_centisecs").write_text(delay.decode())
time.clock_settime(time.CLOCK_REALTIME, float(now))
subprocess.run(["busybox", "mount", "-t", "{file_system}", "/dev/vdb", "{data}"], check=True)
sys.argv = ["turnlane", "serve", "/node.yaml"]
main()
"""


def make_file_system(kind: str, image: Path, size: int) -> bytearray:
    """Return the content of a disk with an empty file system; ``image`` is a path for it."""
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run([*FILE_SYSTEMS[kind], str(image)], check=True)
    content = bytearray(image.read_bytes())
    image.unlink()
    return content


def has_kvm() -> bool:
    """Whether the processor runs guests and this process may use it."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return os.access("/dev/kvm", os.R_OK | os.W_OK) and bool(re.search(r"\b(vmx|svm)\b", flags))


class Machine:
    """Makes guests: all files that they need are in ``directory``."""

    def __init__(
        self,
        directory: Path,
        disk: Path,
        file_system: str,
        queues: Mapping[str, Mapping[str, Any]],
        ports: Mapping[int, int],
    ) -> None:
        self.directory = directory
        self.accelerator = "kvm" if has_kvm() else "tcg"
        self.console = directory / "console"
        agent = AGENT.format(data=DATA, file_system=file_system, http=HTTP)
        planes = {"flight": {"listen": f"*:{FLIGHT}"}, "http": {"listen": f"*:{HTTP}"}}
        config = {"node": {"data": DATA + "/node", "insecure": True, **planes}, "queues": queues}
        _build_root(directory / "root.img", {"agent.py": agent, "node.yaml": json.dumps(config)})
        _build_initramfs(directory / "initramfs", file_system)
        forwards = "".join(
            f",hostfwd=tcp:127.0.0.1:{outer}-{ADDRESS}:{inner}" for outer, inner in ports.items()
        )
        # Nehalem has what numpy and pyarrow need; what newer ones add is slow to emulate.
        cpu = "host" if self.accelerator == "kvm" else "Nehalem"
        sectors = f"logical_block_size={SECTOR},physical_block_size={SECTOR}"
        self._command = [
            *("qemu-system-x86_64", "-machine", f"q35,accel={self.accelerator}", "-cpu", cpu),
            *("-smp", "2", "-m", str(MEMORY_MIB), "-nodefaults", "-display", "none", "-no-reboot"),
            *("-kernel", str(_find_kernel()), "-initrd", str(directory / "initramfs")),
            *("-append", "console=ttyS0 quiet panic=-1"),
            *("-chardev", f"file,id=console,path={self.console},append=on"),
            *("-serial", "chardev:console"),
            *("-serial", f"unix:{directory / 'control'},server=on,wait=off"),
            *("-qmp", f"unix:{directory / 'qmp'},server=on,wait=off"),
            *("-drive", f"file={directory / 'root.img'},if=none,id=root,format=raw,readonly=on"),
            *("-device", "virtio-blk-pci,drive=root"),
            "-blockdev",
            f"driver=nbd,node-name=data,cache.direct=on,server.type=unix,server.path={disk}",
            *("-device", f"virtio-blk-pci,drive=data,write-cache=on,{sectors}"),
            *("-netdev", f"user,id=net,restrict=on{forwards}"),
            *("-device", "virtio-net-pci,netdev=net,romfile="),
        ]
        self._save_template()

    def _save_template(self) -> None:
        """Boot, and save the memory of the guest that waits for its disk."""
        with Guest(self.directory, self._command) as guest:
            with guest.connect("control") as control, control.makefile("rb") as answers:
                assert any(b"waiting" in line for line in answers), self.read_console()
            state = self.directory / "memory"
            guest.run("migrate", uri=f"exec:cat > {state}")
            while (status := guest.run("query-migrate")["status"]) != "completed":
                assert status in {"setup", "active", "device"}, status
                time.sleep(0.05)

    def start(self, write_back_delay: int = 3000) -> Guest:
        """Start a guest; it mounts the disk and starts the node.

        Its kernel writes unsynced data to the disk after this delay, in hundredths of a second.
        """
        incoming = ["-incoming", f"exec:cat {self.directory / 'memory'}"]
        guest = Guest(self.directory, [*self._command, *incoming])
        while guest.run("query-status")["status"] != "running":
            time.sleep(0.02)
        with guest.connect("control") as control, control.makefile("rb") as answers:
            control.sendall(b"%f %d\n" % (time.time(), write_back_delay))
            assert any(b"started" in line for line in answers), self.read_console()
        return guest

    def read_console(self) -> str:
        """Return everything that the guests have printed."""
        return self.console.read_text(errors="replace")


class Guest(Closeable):
    """A running guest."""

    def __init__(self, directory: Path, command: Sequence[str]) -> None:
        for name in ("control", "qmp"):
            (directory / name).unlink(missing_ok=True)
        self._directory = directory
        self._process = subprocess.Popen(command)
        self._monitor = self.connect("qmp")
        self._answers = self._monitor.makefile("rb")
        self.run("qmp_capabilities")

    @property
    def is_running(self) -> bool:
        """Whether the guest has not ended by itself."""
        return self._process.poll() is None

    def connect(self, name: str) -> socket.socket:
        """Connect to a socket of QEMU."""
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while client.connect_ex(str(self._directory / name)):
            assert self.is_running, "QEMU has ended"
            assert time.monotonic() < deadline, "QEMU does not start"
            time.sleep(0.01)
        return client

    def run(self, command: str, **arguments: str) -> dict[str, Any]:
        """Run a command of QEMU's monitor."""
        request = {"execute": command, "arguments": arguments}
        self._monitor.sendall(json.dumps(request).encode() + b"\n")
        for line in self._answers:
            answer = json.loads(line)
            assert "error" not in answer, answer
            if "return" in answer:
                return dict(answer["return"])
        raise AssertionError("QEMU has ended")

    def kill(self) -> None:
        """Kill the guest, as a power cut does: it writes nothing more."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill the guest, if it runs."""
        self.kill()
        self._answers.close()
        self._monitor.close()


# ── the root of the guest ───────────────────────────────────────────────────────────────────────


def _build_root(image: Path, files: Mapping[str, str]) -> None:
    """Write a file system with Python, its libraries, turnlane, its packages, and these files."""
    tree = image.with_suffix(".tree")
    for name in ("proc", "sys", "dev", "run", "bin", "tmp"):
        (tree / name).mkdir(parents=True)
    for name, text in files.items():
        (tree / name).write_text(text)
    shutil.copy2(_find_busybox(), tree / "bin/busybox")
    useless = shutil.ignore_patterns("site-packages", "test", "tests", "idlelib", "lib2to3", "*.a")
    shutil.copytree(ROOT / "src", tree / "packages", ignore=useless)
    for source, inner in _find_package_files():
        _copy(source, tree / "packages" / inner)
    library = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(library, tree / library.relative_to("/"), ignore=useless)
    compileall.compile_dir(tree, quiet=2)  # the guest is slow, and cannot write
    for file in {_find_python(), *_find_shared_libraries(tree)}:
        _copy(file, tree / file.relative_to("/"))
    size = sum(path.stat().st_size + 4096 for path in tree.rglob("*") if path.is_file())
    with image.open("wb") as target:
        target.truncate(size * 5 // 4 + (64 << 20))
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", "-d", str(tree), str(image)], check=True)
    shutil.rmtree(tree)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _find_python() -> Path:
    return Path(sys.base_prefix, "bin", f"python{sysconfig.get_python_version()}")


def _find_package_files() -> Iterator[tuple[Path, Path]]:
    """Return the files of the packages that a node needs: where they are, and their names."""
    needed, found = ["turnlane"], set[str]()
    while needed:
        name = needed.pop()
        if name in found:
            continue
        found.add(name)
        package = importlib.metadata.distribution(name)
        needed += [
            requirement.name
            for requirement in map(Requirement, package.requires or ())
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ]
        for file in package.files or ():
            if ".." not in file.parts and file.suffix != ".pth":
                yield Path(str(file.locate())), Path(file)


def _find_shared_libraries(tree: Path) -> set[Path]:
    """Return the libraries of this machine that Python and the programs below ``tree`` need."""
    programs = [_find_python(), *tree.rglob("*.so"), *tree.rglob("*.so.*")]
    listing = subprocess.run(
        ["ldd", *map(str, programs)], capture_output=True, text=True, check=False
    ).stdout
    found = {Path(name) for name in re.findall(r"(?:=>|^)\s+(/\S+) \(0x", listing, re.MULTILINE)}
    return {path for path in found if not path.is_relative_to(tree)}


def _build_initramfs(path: Path, file_system: str) -> None:
    """Write the archive that the kernel unpacks and starts: busybox, modules and a script."""
    modules = _order_modules([*MODULES, file_system])
    names = " ".join(name for name, _ in modules)
    init = INIT.format(modules=names, address=ADDRESS, python=_find_python())
    archive = bytearray()
    for name in ("bin", "dev", "proc", "root", "modules"):
        _archive(archive, name, stat.S_IFDIR | 0o755)
    _archive(archive, "bin/busybox", stat.S_IFREG | 0o755, _find_busybox().read_bytes())
    _archive(archive, "init", stat.S_IFREG | 0o755, init.encode())
    for name, content in modules:
        _archive(archive, f"modules/{name}.ko", stat.S_IFREG | 0o644, content)
    _archive(archive, "TRAILER!!!", 0)
    path.write_bytes(gzip.compress(archive, 1))


def _archive(archive: bytearray, name: str, mode: int, data: bytes = b"") -> None:
    """Append a file or directory to an archive in the newc format of cpio."""
    inode = len(archive) + 1
    fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
    archive += b"070701" + "".join(f"{field:08x}" for field in fields).encode()
    for part in (name.encode() + b"\0", data):
        archive += part
        archive += bytes(-len(archive) % 4)


def _find_busybox() -> Path:
    busybox = shutil.which("busybox")
    assert busybox, "busybox is missing: run scripts/peers power"
    return Path(busybox)


def _find_kernel() -> Path:
    kernels = sorted(KERNEL.glob("boot/vmlinuz-*"))
    assert kernels, f"there is no kernel in {KERNEL}: run scripts/peers power"
    return kernels[-1]


def _order_modules(names: Iterable[str]) -> list[tuple[str, bytes]]:
    """Return modules of the kernel with the modules that they need, in the order to load them."""
    release = _find_kernel().name.removeprefix("vmlinuz-")
    files = {
        file.name.split(".ko")[0].replace("-", "_"): file
        for file in KERNEL.glob(f"**/lib/modules/{release}/**/*.ko*")
    }
    ordered: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in ordered or name not in files:  # a part of the kernel itself is in no file
            return
        content = files[name].read_bytes()
        if files[name].suffix == ".xz":
            content = lzma.decompress(content)
        needed = re.search(rb"\0depends=([\w,-]*)\0", content)
        assert needed, f"{files[name]} does not say what it depends on"
        for other in needed[1].decode().split(","):
            add(other.replace("-", "_"))
        ordered[name] = content

    for name in names:
        add(name)
    return list(ordered.items())
