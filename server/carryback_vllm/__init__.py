"""The engine plug-in: verified bidirectional KV transfer for vLLM's NIXL connector."""
