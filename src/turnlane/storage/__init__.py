"""The files of a queue on disk: an append-only log of events and a journal of settlements.

The package stands alone. It knows offsets, blocks and outcomes, but no queue: a queue opens a
``Store`` and decides when to write. ``docs/disk-format.md`` specifies the bytes; this text says how
the parts work together.

Constraints
    - An event that was acked ``persisted`` survives a kill at any moment and a power cut.
    - An event whose settlement was recorded never comes back after a kill.
    - A queue always opens, even if its files are damaged. It never deletes bytes that it cannot
      read: they go to ``quarantine/``, and the offsets that were lost are counted.
    - Opening takes the same time for 10 MB as for 100 GB.
    - A full disk makes the queue full and nothing else. Reading and acks need no space, so the
      space comes back.

Format
    A directory holds ``queue.json`` (the queue's identity), ``lock``, segments, two journal files
    and ``quarantine/``. A segment (a ``.chunk`` file, named by its first offset) is a sequence of
    frames. The first frame holds the schema; every other frame holds a block of events with
    consecutive offsets as an Arrow message, perhaps compressed, and perhaps the sequence numbers
    that producers gave to these events. Header and payload of a frame have a checksum each. The log
    is the truth. The journal holds what the log cannot say (which events are settled, which
    sequence numbers are taken) and a hint where the log ended.

Write (``log``, ``encoder``)
    One thread, the queue's writer, appends. It joins blocks into frames of about 2 MB, encodes
    them, and writes them in groups; a second thread writes one group while the next is encoded. A
    group is in the file completely, or the file is cut back to its former end. A segment's size and
    the log's end grow only after the bytes are written, so readers need no lock. A new column, or a
    full segment, starts a new segment.

Sync (``log``, ``recovery``)
    ``Log.sync`` makes everything appended durable; all callers that wait share one sync.
    A sync that fails is never repeated on the same file: the kernel may have dropped the pages that
    it could not write, and a second sync would succeed without them. Instead the unsynced frames
    are read back, checked, and written to a new segment, which is synced. Frames that are damaged
    are built again from the blocks that the store keeps in memory until their sync.

Settle (``journal``)
    A settled range is one record of 48 bytes, written without a sync into a preallocated file.
    Records survive the death of the process at once, and a power cut after the next sync. When a
    journal file is full, the whole state goes as a snapshot into the other one.

Recovery (``recovery``, ``journal``)
    The journal is read first: the newer valid snapshot and the records after it. Its hint says
    where the log ended at the last sync; recovery scans only the frames after it, cuts off a torn
    tail (after copying it to quarantine), and collects the sequence numbers in these frames. All
    other damage is found when a reader comes to it.

Deletion (``store``)
    A segment is deleted when all its events are settled. The journal is synced first: otherwise a
    power cut could forget the settlement but not the deletion, and the events would seem lost.

From outside (``inspection``, ``walk``, ``verify``, ``export``, ``fastqueue``)
    Tools look into a directory without a lock while its queue runs. They list the segments first
    and read the journal after that: a queue records first and deletes second, so a segment that
    disappeared in between is settled in the journal.
"""
