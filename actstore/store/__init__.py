"""The store of payloads: put, get, and the books of both."""
