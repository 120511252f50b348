"""Untrusted Python programs, isolated by the kernel, over HTTP. Begin with `server.py`."""
