"""Delivery: retry, backoff, breaker, splitting, concurrency; all that outputs need not know."""
