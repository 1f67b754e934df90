"""What the road of a request needs of an engine, whatever it is: one behind HTTP, a simulated one, a test's script."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Literal, Protocol

from carryback_server.answer import Answer
from carryback_server.body import Body
from carryback_server.endpoints import Endpoint
from carryback_server.upstream import UpstreamError

Role = Literal["prefill", "decode"]
Why = Literal["timeout", "failure"]


class EngineDown(Exception):
    """An engine could not be reached, failed, broke off, or took longer than it may.

    Attributes:
        is_timeout: it took longer than it may.
        is_over: the engine does nothing for the request, for certain: it never got it, or has ended it.
        reason: the message without the engine's name, for a client.
        said: the engine's own words, which may repeat the client's; not for a log.
    """

    def __init__(
        self,
        engine: EngineClient,
        message: str,
        *,
        is_timeout: bool = False,
        is_over: bool = False,
        said: str = "",
    ) -> None:
        super().__init__(f"{engine.role} engine {engine.name}: {message}")
        self.reason = f"the {engine.role} engine failed: {message}" + (f": {said}" if said else "")
        self.is_timeout = is_timeout
        self.is_over = is_over

    @property
    def why(self) -> Literal["timeout", "down"]:
        """In one word."""
        return "timeout" if self.is_timeout else "down"


class Refused(Exception):
    """A prefill engine answered with an error that is the client's, a 4xx."""

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.content_type = content_type
        self.body = body


class Prompt:
    """What a client asks, as engines get it.

    Attributes:
        size: of its body, in bytes.
        is_streamed: its answer is to come piece by piece.
        body: until the answer has begun.
    """

    def __init__(self, path: str, endpoint: Endpoint, body: Body, free: Callable[[], None]) -> None:
        self.path = path
        self.endpoint = endpoint
        self.body = body
        self.size = body.size
        self.is_streamed = body.flag("stream")
        self._free = free

    @property
    def changes_tools(self) -> bool:
        """See `Endpoint.changes_tools`."""
        return self.endpoint.changes_tools(self.body)

    def for_prefill(self, params: Mapping[str, Any]) -> bytes:
        """The prefill hop's body, with these `kv_transfer_params`."""
        return self.endpoint.for_prefill(self.body, params)

    def for_decode(self, params: Mapping[str, Any]) -> bytes:
        """The decode hop's body, likewise."""
        return self.endpoint.for_decode(self.body, params)

    def drop(self) -> None:
        """It is not sent again: a long answer does not keep it in memory."""
        del self.body
        self._free()


class EngineClient(Protocol):
    """One engine.

    Attributes:
        run: its id for other engines, new with every start; empty until it said one.
        load: tokens of the prompts at the engine now, the measure of how busy it is.
        in_flight: requests at the engine now.
        pinned: KV blocks that it holds for absent conversations, for all routers, as it says.
        capacity: KV blocks that it has; 0 until it said so.
        takes_go: requests can be sent to it to wait for `go`.
        is_up: it answers.
        is_heard: its events arrive, and it hears what it is told.
        block_size: in tokens; 0 until it said so.
        url, events_address: where it is, for traces and for other engines.
    """

    role: Role
    name: str
    run: str
    load: int
    in_flight: int
    pinned: int
    capacity: int
    takes_go: bool
    is_up: bool

    @property
    def is_heard(self) -> bool: ...

    @property
    def block_size(self) -> int: ...

    @property
    def url(self) -> str: ...

    @property
    def events_address(self) -> str: ...

    async def prefill(
        self,
        prompt: Prompt,
        params: dict[str, Any],
        *,
        key: str,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> dict[str, Any]:
        """Have a prompt computed; the `kv_transfer_params` of the answer.

        Args:
            params: the request's `kv_transfer_params`.
            key: the request's name.
            headers: besides those that every request has.
            timeout_s: for all of it, in seconds.

        Raises:
            EngineDown: no usable answer.
            Refused: the engine refused the request, with a 4xx.
        """

    async def decode(
        self, prompt: Prompt, params: dict[str, Any], *, key: str, headers: Mapping[str, str]
    ) -> Answer:
        """Have a request answered; the answer, begun. To be called `within`. Arguments as of `prefill`.

        Raises:
            EngineDown, UpstreamError: there is none.
        """

    def go(self, key: str, params: Mapping[str, Any]) -> None:
        """Tell a request that waits here how it goes on: its `kv_transfer_params`."""

    def release(self, *keys: str) -> None:
        """Have the engine let go of what it holds for the requests of these keys; it may have done so already."""

    async def forget(self) -> bool:
        """Have the engine void all that it has made until now; whether it was told, as far as can be seen."""

    def busy(self, tokens: int, blame: Blame | None = None) -> Visit:
        """Count a request as being at the engine while in the context that this returns.

        Args:
            tokens: that the engine has to compute or keep for it.
            blame: of the request, which may go to other engines.
        """

    def within(self, timeout_s: float) -> AbstractAsyncContextManager[None]:
        """A context for an exchange with the engine: what goes wrong in it is raised as `EngineDown`.

        Args:
            timeout_s: for all of it, in seconds.
        """

    def failed(self, why: Why) -> None:
        """A request failed by this engine's fault."""

    def doubt(self, why: Why) -> None:
        """A request failed here, which may have been its own fault."""

    def succeeded(self) -> None:
        """The engine did a request."""


class Engines(Protocol):
    """All engines."""

    def of(self, role: Role, beside: EngineClient | None = None) -> Sequence[EngineClient]:
        """The engines of a role that a request can go to.

        Args:
            beside: the engine of the other role that it goes to.
        """

    def askable(self, prefill: EngineClient) -> Sequence[EngineClient]:
        """The decode engines that a prefill engine can ask what they have of a prompt."""

    def find(self, name: str) -> EngineClient | None:
        """The decode engine of this name."""

    def of_run(self, run: str) -> EngineClient | None:
        """The decode engine that has this id now."""


class Visit:
    """One request at an engine, from `EngineClient.busy`, as a context. How it ends says how well the engine is.

    An `EngineDown` or an `UpstreamError` is a failure, an end without an exception a success. Any other
    exception, a client's leaving too, says nothing.

    Args:
        blame: is told of a failure, to find out whose fault it is; without one it is the engine's.
    """

    def __init__(self, engine: EngineClient, tokens: int, blame: Blame | None) -> None:
        self._engine = engine
        self._tokens = tokens
        self._blame = blame
        self._has_failed = False
        self._says_nothing = False

    def update(self, tokens: int) -> None:
        """Correct how many tokens it is."""
        self._engine.load += tokens - self._tokens
        self._tokens = tokens

    def fail(self) -> None:
        """The engine failed, though it raises nothing: an answer that broke off after its first byte."""
        self._has_failed = True

    def pass_over(self) -> None:
        """Its end says nothing of the engine: it refused a request that is wrong."""
        self._says_nothing = True

    def __enter__(self) -> Visit:
        self._engine.load += self._tokens
        self._engine.in_flight += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.update(0)
        self._engine.in_flight -= 1
        if isinstance(error, EngineDown | UpstreamError) or self._has_failed:
            why: Why = "timeout" if getattr(error, "is_timeout", False) else "failure"
            if self._blame is not None:
                self._blame.failed(self._engine, why)
            else:
                self._engine.failed(why)
        elif error is None and not self._says_nothing:
            self._engine.succeeded()


class Blame:
    """Whose fault it is that a request failed: an engine's, if another one of its role then did the same request.

    What no other did may be the request's own fault. The engine is then in doubt, which a request of the router's
    own decides.
    """

    def __init__(self) -> None:
        self._failed: list[tuple[EngineClient, Why]] = []

    def failed(self, engine: EngineClient, why: Why) -> None:
        """The request failed at an engine."""
        self._failed.append((engine, why))

    def worked(self, engine: EngineClient) -> None:
        """An engine does it."""
        failed, self._failed = self._failed, []
        for other, why in failed:
            if other.role != engine.role:
                self._failed.append((other, why))
            elif other is not engine:
                other.failed(why)

    def settle(self) -> None:
        """Nobody else is asked."""
        for engine, why in self._failed:
            engine.doubt(why)
        self._failed.clear()
