"""The node's Arrow Flight plane: blocks in, blocks out, acks as metadata."""
