"""What everything that listens has in common: addresses, TLS, rights, a web server with limits."""
