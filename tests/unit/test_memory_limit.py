"""The memory limit is the least of all limits that the system has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from turnlane.memory import (
    address_space_limit,
    cgroup_v1_limit,
    cgroup_v2_limit,
    memory_limit,
    physical_memory,
)

MEBI = 2**20
NO_LIMIT_V1 = 9223372036854771712


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system root with 64 MiB of memory and no control groups."""
    write(tmp_path, "proc/meminfo", f"MemTotal:       {64 * 1024} kB\nMemFree:  12 kB\n")
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_physical_memory_is_the_limit_when_there_is_no_other(root: Path) -> None:
    assert memory_limit(root) == 64 * MEBI


def test_without_proc_the_c_library_is_asked(tmp_path: Path) -> None:
    asked = physical_memory(tmp_path)
    assert asked is not None
    assert asked > 16 * MEBI


def test_version_2_limit_of_the_own_group(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/system.slice/turnlane.service\n")
    write(root, "sys/fs/cgroup/system.slice/turnlane.service/memory.max", f"{32 * MEBI}\n")
    assert memory_limit(root) == 32 * MEBI


def test_version_2_limit_of_a_group_above(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/pods/one/container\n")
    write(root, "sys/fs/cgroup/pods/one/container/memory.max", "max\n")
    write(root, "sys/fs/cgroup/pods/one/memory.max", f"{20 * MEBI}\n")
    write(root, "sys/fs/cgroup/pods/memory.max", f"{40 * MEBI}\n")
    assert cgroup_v2_limit(root) == 20 * MEBI


def test_version_2_in_a_container_that_sees_only_its_own_root(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", f"{10 * MEBI}\n")
    assert memory_limit(root) == 10 * MEBI


def test_version_2_path_above_the_containers_root(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/../../other\n")
    write(root, "sys/fs/cgroup/memory.max", f"{10 * MEBI}\n")
    assert cgroup_v2_limit(root) == 10 * MEBI


def test_version_2_mounted_beside_version_1(root: Path) -> None:
    write(root, "proc/self/cgroup", "4:cpu:/\n0::/app\n")
    write(root, "sys/fs/cgroup/unified/app/memory.max", f"{10 * MEBI}\n")
    assert cgroup_v2_limit(root) == 10 * MEBI


def test_version_2_without_a_limit(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/app\n")
    write(root, "sys/fs/cgroup/app/memory.max", "max\n")
    assert cgroup_v2_limit(root) is None
    assert memory_limit(root) == 64 * MEBI


def test_version_1_limit(root: Path) -> None:
    write(
        root, "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:hugetlb,memory:/docker/abc\n1:name=a:b:/\n"
    )
    write(root, "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", f"{8 * MEBI}\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{NO_LIMIT_V1}\n")
    assert cgroup_v1_limit(root) == 8 * MEBI
    assert memory_limit(root) == 8 * MEBI


def test_version_1_with_the_hosts_path_in_a_container(root: Path) -> None:
    write(root, "proc/self/cgroup", "4:memory:/docker/abc\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{8 * MEBI}\n")
    assert memory_limit(root) == 8 * MEBI


def test_version_1_without_a_limit_gives_way_to_physical_memory(root: Path) -> None:
    write(root, "proc/self/cgroup", "4:memory:/\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{NO_LIMIT_V1}\n")
    assert memory_limit(root) == 64 * MEBI


def test_both_versions_give_the_lesser(root: Path) -> None:
    write(root, "proc/self/cgroup", "4:memory:/a\n0::/a\n")
    write(root, "sys/fs/cgroup/memory/a/memory.limit_in_bytes", f"{8 * MEBI}\n")
    write(root, "sys/fs/cgroup/unified/a/memory.max", f"{6 * MEBI}\n")
    assert memory_limit(root) == 6 * MEBI


@pytest.mark.parametrize("garbage", ["", "\n", "nonsense", "0:", ":::\n"])
def test_unreadable_groups_are_no_limit(root: Path, garbage: str) -> None:
    write(root, "proc/self/cgroup", garbage)
    assert memory_limit(root) == 64 * MEBI


def test_address_space_limit_of_a_real_process() -> None:
    pytest.importorskip("resource")
    program = (
        "import resource\n"
        "from turnlane.memory import address_space_limit, memory_limit\n"
        "hard = resource.getrlimit(resource.RLIMIT_AS)[1]\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, hard))\n"
        "print(address_space_limit(), memory_limit() <= 3 * 2**30)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == [str(3 * 2**30), "True"]


def test_this_machine_has_a_limit() -> None:
    address_space = address_space_limit()
    assert memory_limit() > 0
    assert address_space is None or memory_limit() <= address_space
