"""Ports for programs that take a number: kept for them, so that nobody else gets one between the choice and the use."""

import socket

_KEPT: list[socket.socket] = []


def kept_port() -> int:
    """A port of this machine on which nothing listens, and which no other program is given while this process lives.

    A socket of ours stays bound to it and never listens: Linux gives the number to nobody who asks for any port, and
    lets whoever asks for this one listen there, as servers do ask, with SO_REUSEADDR.
    """
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", 0))
    _KEPT.append(one)
    return int(one.getsockname()[1])
