"""Drop-in OpenAI clients that let carryback reuse an agent's KV cache from turn to turn."""
