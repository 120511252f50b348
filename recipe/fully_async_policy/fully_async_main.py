"""The launcher under its name in the published repository: a command line of there gets main.py's answers."""

from recipe.command_line import run_command
from recipe.fully_async_policy.main import main

if __name__ == "__main__":
    run_command(main)
