"""torch's CUDA build, unchanged, on a machine without a GPU (README.md).

`python -m tests.kit.fake_cuda PROGRAM ...` runs a Python program on it.
"""
