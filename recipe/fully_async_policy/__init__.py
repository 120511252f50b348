"""Asynchronous training at a bounded lag. Begin with `main.py`; `config/` has the settings, `shell/` the scripts."""
