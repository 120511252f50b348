"""Do truncated responses carry a collapse, and does `async.truncated` cure it? `__main__` is the command."""
