"""Shared parts of everything that listens: addresses, TLS, tokens, an HTTP server with limits."""
