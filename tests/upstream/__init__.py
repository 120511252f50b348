"""Every place where our code reaches into another package: the tables that docs/reference/upstream.md is written from.

python -m tests.upstream            compares them with what is installed; prints what differs
python -m tests.upstream --write    writes docs/reference/upstream.md
"""
