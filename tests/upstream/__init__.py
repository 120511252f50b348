"""What our code takes from other packages, compared with what is installed: docs/reference/upstream.md."""
