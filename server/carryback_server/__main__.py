"""The `carryback` command, and why it cannot run where it cannot: it is installed with the client, too."""

from __future__ import annotations

import sys
from importlib.metadata import version


def main() -> None:
    """Run the command, or end with the reason why not."""
    if sys.platform != "linux":
        sys.exit(
            f"error: the carryback command runs on Linux only, and this is {sys.platform}: router and engines use "
            "what other systems do not have. The client (import carryback) runs here; carryback is "
            f"{version('carryback')}"
        )
    try:
        from carryback_server.cli import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("carryback"):
            raise
        sys.exit(
            f"error: the carryback command needs packages that the client does not ({error.name} is missing): "
            "pip install 'carryback[server]'"
        )
    app()


if __name__ == "__main__":
    main()
