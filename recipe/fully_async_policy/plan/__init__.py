"""What a launch would do, without starting it: GPUs, memory, time. Begin with `gpu_plan.py`."""
