"""What our code takes from other packages, compared with what is installed: tests/upstream/README.md."""
