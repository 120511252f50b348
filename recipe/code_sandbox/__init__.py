"""Untrusted Python programs, isolated by the kernel, over HTTP: docs/explanation/sandbox.md."""
