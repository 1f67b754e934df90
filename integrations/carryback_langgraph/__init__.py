"""LangGraph and LangChain: every model call says which conversation and turn it belongs to.

from carryback_langgraph import ChatCarryback

model = ChatCarryback(model="default", base_url="http://127.0.0.1:8000/v1", api_key="none")
"""

from carryback_langgraph._chat_model import ChatCarryback
from carryback_langgraph._middleware import CarrybackMiddleware
from carryback_langgraph._names import conversation_id
from carryback_langgraph._node import chat_node
from carryback_langgraph._release import arelease, release
from carryback_langgraph._reuse import reuse

__all__ = [
    "CarrybackMiddleware", "ChatCarryback", "arelease", "chat_node", "conversation_id", "release", "reuse",
]  # fmt: skip
