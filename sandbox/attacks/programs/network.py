"""Attacks: to reach the network, or anything that listens on this machine."""

from sandbox.attacks.programs.attack import Attacks

NETWORK = attack = Attacks()

attack("tcp to the loopback", 'socket.create_connection(("127.0.0.1", BAIT["port"]), 2); escaped()')
attack("tcp to the loopback, version 6", 'socket.create_connection(("::1", BAIT["port_6"]), 2); escaped()')
attack("the server's own port", 'socket.create_connection(("127.0.0.1", BAIT["server_port"]), 2); escaped()')
attack(
    "udp",
    """
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)
    s.sendto(b"?", ("127.0.0.1", BAIT["port"])); s.recv(9); escaped()
    """,
)
attack("names: the host's", 'socket.gethostbyname(BAIT["host"]); escaped()')
attack("unix socket", 's = socket.socket(socket.AF_UNIX); s.connect(BAIT["unix"]); escaped()')
attack("abstract unix socket", 's = socket.socket(socket.AF_UNIX); s.connect("\\0" + BAIT["mark"]); escaped()')
attack(
    "abstract unix sockets of other programs",
    """
    end = time.time() + 4
    while time.time() < end:
        with contextlib.suppress(OSError):
            s = socket.socket(socket.AF_UNIX); s.connect("\\0neighbour" + BAIT["mark"]); escaped(); break
        time.sleep(0.05)
    """,
    neighbour="""
    s = socket.socket(socket.AF_UNIX); s.bind("\\0neighbour" + BAIT["mark"]); s.listen(); time.sleep(4)
    """,
)
attack("see the host's interfaces", 'assert [n for _, n in socket.if_nameindex() if n != "lo"]; escaped()')
attack("packet socket", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); escaped()")
attack("virtual machine socket", "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); escaped()")
attack("kernel crypto socket", "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET); escaped()")
attack("netlink socket", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); degraded()")
attack(
    "netlink socket, a family of 33 bits",  # the kernel reads 32 of them
    'assert syscall("socket", 1 << 32 | socket.AF_NETLINK, socket.SOCK_RAW, 0) >= 0; degraded()',
)
attack(
    "sockets of rare protocols",
    """
    for kind in ((2, 1, 262), (2, 2, 136), (2, 1, 132), (31, 5, 0), (30, 1, 0), (44, 3, 0)):
        # mptcp, udplite, sctp, bluetooth, tipc, xdp
        with contextlib.suppress(OSError): socket.socket(*kind); degraded()
    """,
)
attack(
    "buffers of tcp, which no control group of version 1 counts",
    """
    listener = socket.socket(); listener.bind(("127.0.0.1", 0)); listener.listen()
    left = socket.create_connection(listener.getsockname()); left.setblocking(False)
    assert left.send(b"1" * (1 << 20)) > 100_000; degraded()
    """,
)
attack(
    "listen for others",
    's = socket.socket(); s.bind(("0.0.0.0", 0)); s.listen(); degraded()',
)
