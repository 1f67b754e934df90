"""LangGraph and LangChain: every model call says which conversation and turn it belongs to."""
