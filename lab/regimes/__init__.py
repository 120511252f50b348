"""Which method keeps up at which lag and length of responses, where sampler and trainer differ in arithmetic."""
