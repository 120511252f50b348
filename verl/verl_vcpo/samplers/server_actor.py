"""A server's actor whose class imports nothing: the server is imported and made in the actor's own process.

Ray loads an actor's class in every process that gets a handle of the actor. The class of verl's server imports vLLM,
which costs seconds of processor time and hundreds of megabytes. The load balancer, the agent-loop workers and the
samplers' weight receivers would spend these for the names of the methods.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import ray


def _passed_on(name: str) -> Callable[..., Any]:
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = getattr(self.server, name)(*args, **kwargs)
        return await answer if inspect.isawaitable(answer) else answer

    return call


def server_actor(server: type) -> Any:
    """Make the Ray actor class of `server`, with the name and the public methods of `server`."""
    module, name = server.__module__, server.__name__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.server = getattr(importlib.import_module(module), name)(*args, **kwargs)

    methods = [name for name, _ in inspect.getmembers(server, inspect.isfunction) if not name.startswith("_")]
    fields = {"__module__": __name__, "__init__": __init__, **{name: _passed_on(name) for name in methods}}
    return ray.remote(type(name, (), fields))
