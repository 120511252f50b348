"""Which packages an installation has; all else is in pyproject.toml, and for verl_vcpo in verl/pyproject.toml.

A wheel has `vcpo` alone: verl owns a package `scripts`, and TransferQueue a package `recipe`, so a wheel with ours
would overwrite their files, and delete them when it is uninstalled. An editable installation copies nothing, and finds
what a checkout runs as well.
"""

import sys

from setuptools import find_namespace_packages, setup

RUN_IN_A_CHECKOUT = ["recipe", "scripts", "tests", "lab"]

names = ["vcpo", *(RUN_IN_A_CHECKOUT if "editable_wheel" in sys.argv else [])]
setup(
    packages=find_namespace_packages(
        include=[pattern for name in names for pattern in (name, f"{name}.*")],
        exclude=["*.__pycache__", "*.__pycache__.*"],
    )
)
