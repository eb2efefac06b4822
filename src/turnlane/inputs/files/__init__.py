"""The ``files`` input: follows log files through rotation, truncation and kill -9.

How nothing is read twice and nothing skipped. Every file *generation* (a device, an inode, a first
line, and a number that goes up when the file is truncated) publishes as a numbered producer, and
its sequence is the byte after the last line. The queue writes that number into the same frame as
the lines themselves, so the two can never disagree: whoever starts after a crash asks the queue how
far a file has come, and reads on from there. The positions file is only a hint: it tells which
files there were, and how far they had come when the queue does not know (a memory queue, or more
than ten thousand files).

- ``settings``: what can be configured
- ``watch``: which files there are
- ``identity``: when a file is the same file
- ``tail``: reading one file
- ``publishing``: from lines to events in the queue
- ``progress``: how far one file has come, as the acks say
- ``positions``: what is saved
- ``roster``: all files that are followed or were
- ``input``: the thread that does it all
"""

from turnlane.inputs.files.input import FilesInput
from turnlane.inputs.files.state import FilesSettings

__all__ = ["FilesInput", "FilesSettings"]
