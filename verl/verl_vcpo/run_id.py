"""What the processes of a run have in common."""

RUN_ID_VARIABLE = "VCPO_RUN_ID"
"""The environment variable with the run's id: every process of the run inherits it."""
