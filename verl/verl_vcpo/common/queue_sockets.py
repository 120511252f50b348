"""TransferQueue's sockets, open to whoever has Ray's token (extends transfer_queue/utils/zmq_utils.py).

TransferQueue unpickles everything that arrives at its sockets, which can run any code, and authenticates nobody. So
ZeroMQ's CURVE encrypts each connection, with one pair of keys that every process of a run makes from Ray's token. CURVE
lets in whoever knows the server's public key. Neither key is written down or sent in the clear, so the public key is as
secret as the token. libsodium, in pyzmq's wheels, refuses client keys that would get around the secret.
"""

import hmac
import sys
from functools import cache, wraps
from types import ModuleType
from typing import Any

_MODULE = "transfer_queue.utils.zmq_utils"
_NAME = "create_zmq_socket"
_PURPOSE = b"keys of TransferQueue's sockets"


@cache
def encrypt() -> None:
    """Encrypt the sockets that TransferQueue makes in this process from now on."""
    import wrapt

    wrapt.register_post_import_hook(_replace, _MODULE)  # at once where the module has been imported


def _replace(zmq_utils: ModuleType) -> None:
    import zmq

    plain = getattr(zmq_utils, _NAME)
    if not zmq.has("curve"):  # TransferQueue tries again for ever where making a socket fails with an error of ZeroMQ's
        raise RuntimeError("this pyzmq has no CURVE, which encrypts TransferQueue's sockets: install pyzmq's own wheel")

    @wraps(plain)
    def create_zmq_socket(ctx: Any, socket_type: Any, *args: Any, **kwargs: Any) -> Any:
        public, secret = _keys()
        socket = plain(ctx, socket_type, *args, **kwargs)
        socket.curve_publickey, socket.curve_secretkey = public, secret
        if socket_type == zmq.ROUTER:
            socket.curve_server = True
        else:
            socket.curve_serverkey = public
        return socket

    for module in list(sys.modules.values()):  # modules of TransferQueue import the function by name
        if getattr(module, "__name__", "").startswith("transfer_queue.") and vars(module).get(_NAME) is plain:
            setattr(module, _NAME, create_zmq_socket)


def _keys() -> tuple[bytes, bytes]:
    """Return the public and the secret key, in ZeroMQ's text form.

    Raises:
        RuntimeError: this process has no token of Ray's.
    """
    import zmq
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # not in its stub
    from zmq.utils import z85

    loader = AuthenticationTokenLoader.instance()
    if not loader.has_token(ignore_auth_mode=True):
        raise RuntimeError(
            "TransferQueue's sockets need Ray's token, and this process has none: start Ray with RAY_AUTH_MODE=token "
            "and RAY_AUTH_TOKEN (docs/explanation/security.md)"
        )
    token = loader.get_raw_token(ignore_auth_mode=True)
    secret = z85.encode(hmac.digest(token.encode(), _PURPOSE, "sha256"))
    return zmq.curve_public(secret), secret
