"""The disk log: chunk files, the journal, recovery. ``docs/disk-format.md`` is its contract."""
