"""Taps of the model: how the norm of each sequence's gradient comes out of a packed backward.
Begin with `tapping.py`."""
