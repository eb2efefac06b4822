"""The ``files`` input: follows log files through rotation, truncation and kill -9.

Why no line is read twice and none is skipped: every file *generation* (a device, an inode, a first
line, and a number that goes up when the file is truncated) publishes as a numbered producer, and
its sequence is the byte after the last line. The queue writes that number into the same frame as
the lines themselves, so the two always agree. After a crash the input asks the queue for the
position of a file and continues there. The positions file is only a hint: it lists the files, with
their positions for the case that the queue does not know them (a memory queue, or more than ten
thousand files).

- ``reader``: one file: its identity, its lines, its acked position
- ``tracker``: the settings; all followed files; the positions file
- ``input``: from lines to events; the thread that scans, reads, publishes and saves
"""

from turnlane.inputs.files.input import FilesInput
from turnlane.inputs.files.tracker import FilesSettings

__all__ = ["FilesInput", "FilesSettings"]
