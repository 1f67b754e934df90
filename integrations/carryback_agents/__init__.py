"""OpenAI Agents SDK: every model call says which conversation and turn it belongs to."""
