"""Writing much at a time without leaving it in the page cache.

Lines that stream into a file by the hundred megabytes push out of memory what others read, and the
kernel has to find a new page for each of theirs, which takes longer than to write them. Since Linux
6.14 a write can say that its pages are free again as soon as they are on the disk.
"""

from __future__ import annotations

import errno
import os
from typing import Final

LARGE: Final = 1 << 20
"""Bytes. Less than that is left to the kernel, which gathers small writes before it writes them."""
_DONT_CACHE: Final = 0x80
"""``RWF_DONTCACHE``, which Python has no name for."""
_UNABLE: Final = (errno.EOPNOTSUPP, errno.EINVAL, errno.ESPIPE)
"""What an older kernel, a file system that cannot do it, and a pipe say to that."""


def append(fd: int, data: memoryview) -> int:
    """Write some of it to a file that was opened for appending; returns how many bytes."""
    if len(data) >= LARGE:
        try:
            return os.pwritev(fd, [data], 0, _DONT_CACHE)  # appending, so the place says nothing
        except NotImplementedError:  # an older C library
            pass
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
    return os.write(fd, data)
