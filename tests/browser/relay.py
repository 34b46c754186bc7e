"""A way to an arena that can be cut and opened again, as a network does."""

import contextlib
import socket
import socketserver
import threading

PIECE = 65536


class Relay:
    """Passes what comes in at 127.0.0.1 on to the same port of 127.0.0.2."""

    def __init__(self) -> None:
        self.asked = bytearray()
        """What clients have sent."""
        self._sockets: list[socket.socket] = []
        self._server = self._open(0)
        self.port: int = self._server.server_address[1]

    def cut(self) -> None:
        """End every connection and refuse new ones."""
        self._server.shutdown()
        self._server.socket.close()
        for end in self._sockets:
            with contextlib.suppress(OSError):  # it has ended by itself
                end.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()
        self._server.server_close()  # waits for every connection's threads

    def mend(self) -> None:
        self._server = self._open(self.port)

    def _open(self, port: int) -> "_Server":
        server = _Server(("127.0.0.1", port), self._handler())
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        return server

    def _handler(self) -> type[socketserver.BaseRequestHandler]:
        relay = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                client: socket.socket = self.request
                with socket.create_connection(("127.0.0.2", relay.port)) as arena:
                    relay._sockets += [client, arena]
                    back = threading.Thread(target=_pass_on, args=(arena, client))
                    back.start()
                    _pass_on(client, arena, relay.asked)
                    back.join()

        return Handler


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True


def _pass_on(source: socket.socket, target: socket.socket, noted: bytearray | None = None) -> None:
    """Until either end is gone; then neither is told anything more."""
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE):
            if noted is not None:
                noted += piece
            target.sendall(piece)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
