"""Agents talk to routers while routers, engines and Redis are killed.

    PYTHONPATH=tests python -m chaos --seconds 300 --conversations 200 --turns 10 --seed 1

Two prefill and two decode engines (stubs), two router replicas and the Redis that they share, each a process of
its own. What may go wrong is told in `chaos.verdict`; everything else is a failure, and the exit status is 1.
"""

from chaos.run import Plan, run

__all__ = ["Plan", "run"]
