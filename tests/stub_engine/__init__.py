"""A stand-in for a vLLM engine with carryback's plug-in: its HTTP answers, events, latency and faults."""
