"""VCPO on veRL: the lag-k trainer, its samplers and the patched Megatron actor. Begin with `loop/trainer.py`.

    loop/       the lag-k trainer: buffer, deadlines, checkpoints, resume
    samplers/   agent loops, client, router, vLLM's servers, and their replacement when they die
    report/     the words and numbers of a run: metrics, console, samples
    actor/      the patched Megatron actor, its losses and gradient norms
    weights/    the weights' way to the samplers
    user_code/  rewards and tools of users, in processes that can be killed
    common/     files, folders, ids and lines that all rooms use
    cpu/        stand-ins for a laptop

A room imports from rooms below it in this list, never from one above; `cpu/` takes the place of a GPU's classes, and
only `plugin.py`, which verl loads, knows it.
"""
