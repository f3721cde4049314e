"""Requests to a bed's apiserver and registry without a client in between, for what is polled."""

import http.client
import json
import ssl


class Access:
    """The two ports of a bed that are open on this machine's loopback."""

    def __init__(self, apiserver, registry, keys):
        self.apiserver = apiserver
        self.registry = registry
        self.keys = keys

    def request(self, method, path, body=None, kind="application/json"):
        """One request as the administrator: status (0: no answer) and body."""
        tls = ssl.create_default_context(cafile=self.keys / "ca.crt")
        tls.load_cert_chain(self.keys / "admin.crt", self.keys / "admin.key")
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.apiserver, timeout=10, context=tls
        )
        return _ask(connection, method, path, body and json.dumps(body), {"Content-Type": kind})

    def registry_answers(self):
        """Whether the registry serves."""
        connection = http.client.HTTPConnection("127.0.0.1", self.registry, timeout=10)
        return _ask(connection, "GET", "/v2/")[0] == 200


def _ask(connection, method, path, body=None, headers=None):
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b"{}"
    finally:
        connection.close()
