"""Tests run on CPU: the environment has to be set before anything imports verl, vLLM or Ray."""

from verl_vcpo.cpu import environment

environment.apply()
