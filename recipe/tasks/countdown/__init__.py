"""Countdown: combine the given numbers into an expression that equals the target."""
