"""The trainer's update in Megatron. Begin with `megatron_actor.py`: one VCPO update per mini-batch."""
