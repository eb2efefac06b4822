"""Formats: how events look on the wire, one codec each, for inputs and outputs alike."""
