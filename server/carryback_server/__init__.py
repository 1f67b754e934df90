"""The router, the supervisor of a local pair of engines, and the command line."""
