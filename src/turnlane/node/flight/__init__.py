"""The Arrow Flight plane of a node: clients send and receive blocks, acks are metadata."""
