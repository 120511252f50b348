"""Runs, shown: a table (Markdown, CSV), a figure (PNG), and both in one HTML page."""
