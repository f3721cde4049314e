"""A TCP proxy on loopback whose connections can be cut."""

import contextlib
import os
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

import yaml


class Proxy:
    """Stands before the apiserver of a kubeconfig.

    Attributes:
        kubeconfig: path of a kubeconfig that goes through the proxy.
        up: whether new connections are taken.
        cuts: how many were cut.
    """

    def __init__(self, original, folder):
        config = yaml.safe_load(Path(str(original).split(os.pathsep, maxsplit=1)[0]).read_text())
        cluster = config["clusters"][0]["cluster"]
        server = urlsplit(cluster["server"])
        self._to = server.hostname, server.port or 443
        self.up, self.cuts = True, 0
        self._pairs, self._lock = set(), threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        cluster["server"] = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        if server.hostname != "127.0.0.1":
            cluster["tls-server-name"] = server.hostname
        self.kubeconfig = folder / "through-the-proxy"
        self.kubeconfig.write_text(yaml.safe_dump(config))
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        """End all connections in the middle of whatever they carry."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        self.cuts += len(pairs)
        for pair in pairs:
            self._end(pair)

    def close(self):
        self._listener.close()
        self.cut()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self.up:
                near.close()
                continue
            far = socket.create_connection(self._to)
            pair = near, far
            with self._lock:
                self._pairs.add(pair)
            for source, sink in (pair, pair[::-1]):
                threading.Thread(target=self._pass, args=(source, sink, pair), daemon=True).start()

    def _pass(self, source, sink, pair):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with self._lock:
            self._pairs.discard(pair)
        self._end(pair)

    @staticmethod
    def _end(pair):
        for one in pair:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
