"""The node: the process that owns a data directory and lets events in and out."""
