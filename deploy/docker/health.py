"""Whether a carryback server in this container answers: exit status 0 if GET /health does on one of the ports."""

import socket
import sys
import urllib.error
import urllib.request

# Engines listen on the address that they tell others, and not on loopback.
HOSTS = ("127.0.0.1", socket.gethostname())


def answers(host: str, port: str) -> bool:
    """Whether the server there says that it is well."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


if __name__ == "__main__":
    sys.exit(not any(answers(host, port) for port in sys.argv[1:] for host in HOSTS))
