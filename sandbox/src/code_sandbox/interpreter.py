"""The interpreter inside the sandbox, which waits for one program and then runs it as its own.

Only `code_sandbox.sandboxed` starts it, with the names of the modules to import beforehand. This file stands alone: no
other file of the project is in the sandbox. A ready interpreter writes one byte to standard output. Standard input
brings the length of the request in 4 bytes, the request in marshal's format (the server has the same interpreter), and
then the program's own input.
"""

import atexit
import marshal
import os
import resource
import sys
import time
import types

READY = b"\n"
LENGTH_BYTES = 4
PROGRAM = "/tmp/main.py"
_NICE = 5
_GRACE_S = 2  # more than the server's limit, so that the server ends the program first, and reports why


def main() -> None:
    os.nice(_NICE)
    for name in sys.argv[1:]:
        __import__(name)
    os.write(1, READY)
    length = int.from_bytes(_read(LENGTH_BYTES), "big")
    request = marshal.loads(_read(length))
    with open(PROGRAM, "wb") as file:  # tracebacks quote its lines, and spawned processes import it
        file.write(request["code"])
    for name, value in request["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    cpu = int(time.process_time() + request["time_s"]) + _GRACE_S
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    _run(request["code"])


def _read(count: int) -> bytes:
    """Read exactly so many bytes, and none of the program's own input. End if the server is gone."""
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            os._exit(1)
        data += part
    return data


def _run(code: bytes) -> None:
    """Run the program as `__main__`, as if the interpreter had been started with the program's file."""
    module = types.ModuleType("__main__")
    module.__file__ = PROGRAM
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]  # as the interpreter does
    sys.modules["__main__"] = module
    sys.argv, sys.path[0] = [PROGRAM], os.path.dirname(PROGRAM)
    exit_code = 0
    try:
        exec(compile(code, PROGRAM, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        # The traceback starts at the program's own frame; a syntax error has none.
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        exit_code = 1
    _leave(module, exit_code)


def _leave(module: types.ModuleType, exit_code: int) -> None:
    """End as an interpreter does, but do not remove imported packages, which takes a third of an import's time."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    code = (types.ModuleType, types.FunctionType, type)  # finalizers of other objects still need these
    for name in [name for name, value in vars(module).items() if not isinstance(value, code)]:
        vars(module).pop(name, None)  # a file that the program has left open is written
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            stream.flush()  # type: ignore[union-attr]  # None too is an AttributeError
        except (AttributeError, ValueError):
            continue  # replaced by something else, or closed
        except OSError:
            exit_code = 120
    os._exit(exit_code & 0xFF)


if __name__ == "__main__":
    main()
