"""The road of a request, one step a module: identify, place, ask, prefill, decode, relay, hold."""
