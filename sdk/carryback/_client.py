"""Drop-in subclasses of the OpenAI clients that say which conversation each request belongs to.

Both override one public method, `request`, through which every call of a resource goes once, before
the retries: so raw, streamed and parsed calls are all marked, and a retry carries the same ids.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import openai
from openai._models import FinalRequestOptions

from carryback import wire
from carryback._body import history, named_by
from carryback._conversation import current
from carryback._headers import headers
from carryback._release import arelease, release
from carryback._reuse import reuse, set_last
from carryback._servers import atakes_ids, learn, takes_ids
from carryback.identity import Identifier

_MODELS = ("/chat/completions", "/completions", "/responses")


class OpenAI(openai.OpenAI):
    """`openai.OpenAI`, same arguments and methods; its requests carry conversation and turn."""

    _identifier: Identifier

    if not TYPE_CHECKING:  # for type checkers, the signatures are the original's

        @functools.wraps(openai.OpenAI.__init__)
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._identifier = Identifier()

        @functools.wraps(openai.OpenAI.copy)
        def copy(self, **kwargs):
            client = super().copy(**kwargs)
            client._identifier = self._identifier
            return client

        with_options = copy

    def request(self, cast_to: Any, options: FinalRequestOptions, **kwargs: Any) -> Any:
        if _is_models(options):
            options = _marked(self, options, takes_ids=takes_ids(self))
        return super().request(cast_to, options, **kwargs)

    def _process_response(self, **kwargs: Any) -> Any:
        _note_reuse(self, **kwargs)
        return super()._process_response(**kwargs)

    def _release(self, conversation: str) -> None:
        release(self, conversation)


class AsyncOpenAI(openai.AsyncOpenAI):
    """`openai.AsyncOpenAI`, same arguments and methods; its requests carry conversation and turn."""

    _identifier: Identifier

    if not TYPE_CHECKING:

        @functools.wraps(openai.AsyncOpenAI.__init__)
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._identifier = Identifier()

        @functools.wraps(openai.AsyncOpenAI.copy)
        def copy(self, **kwargs):
            client = super().copy(**kwargs)
            client._identifier = self._identifier
            return client

        with_options = copy

    async def request(self, cast_to: Any, options: FinalRequestOptions, **kwargs: Any) -> Any:
        if _is_models(options):
            options = _marked(self, options, takes_ids=await atakes_ids(self))
        return await super().request(cast_to, options, **kwargs)

    async def _process_response(self, **kwargs: Any) -> Any:
        _note_reuse(self, **kwargs)
        return await super()._process_response(**kwargs)

    async def _release(self, conversation: str) -> None:
        await arelease(self, conversation)


def _is_models(options: FinalRequestOptions) -> bool:
    """Whether it is a request that a model answers."""
    return options.method.lower() == "post" and options.url.partition("?")[0] in _MODELS


def _note_reuse(
    client: OpenAI | AsyncOpenAI, *, options: FinalRequestOptions, response: Any, **_: Any
) -> None:
    if _is_models(options):
        learn(client, response.headers)
        set_last(reuse(response))


def _marked(
    client: OpenAI | AsyncOpenAI, options: FinalRequestOptions, *, takes_ids: bool
) -> FinalRequestOptions:
    """A request that a model answers, with the wire's headers, except for those that the caller has set.

    Args:
        takes_ids: whether its server may get any.
    """
    set_last(None)  # until this request has been answered
    if not takes_ids:
        return options

    body: dict[str, Any] = {}
    for part in (options.json_data, options.extra_json):
        if isinstance(part, Mapping):
            body.update(part)
    own = dict(options.headers) if isinstance(options.headers, Mapping) else {}
    given = {name.lower() for name in (*client.default_headers, *own)}
    if (conversation := current()) is not None and wire.CONVERSATION_ID.lower() not in given:
        conversation.used_by(client, (client.base_url, client.api_key))
    ours = headers(
        history(body),
        body.get("tools"),
        scope=str(client.base_url),
        group=str(body.get("prompt_cache_key") or ""),
        given=[*given, *named_by(body)],
        identifier=client._identifier,
    )
    options = copy.copy(options)  # the caller's may be used again
    options.headers = own | ours
    return options
