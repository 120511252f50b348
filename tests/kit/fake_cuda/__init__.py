"""Fake GPUs for torch's unchanged CUDA build on a machine without a GPU (README.md).

`python -m tests.kit.fake_cuda PROGRAM ...` runs a Python program on fake GPUs.
"""
