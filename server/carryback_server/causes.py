"""Why a prompt does not begin with what the one before it left: what differs between two requests, and what to do about it.

Nothing here asks anybody: two requests and an answer go in, likely causes come out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from carryback_server.said import Answered, Asked, Call, Said, first_answer

T = TypeVar("T", str, bytes)

# How far a word is followed from where two texts differ.
_WORD = 64
_KINDS = (
    ("a random id", re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}")),
    ("a time", re.compile(r"(?<!\d)\d{1,2}:\d{2}(?!\d)")),
    (
        "a date",
        re.compile(
            r"(?<!\d)\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?!\d)|\b\d{1,2}[/.]\d{1,2}[/.]\d{2,4}\b|\b(?i:mon|tues|wednes|thurs|fri|satur|sun)day\b"
        ),
    ),
    ("a time", re.compile(r"\b1[6-9]\d{8}(?:\d{3}|\d{6})?\b")),
)
_MONTH = re.compile(r"\b(?i:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?\b")
_PROMPTS = ("prompt", "tokens")
_SYSTEM = ("system", "developer")
_THINKING = re.compile(r"(?i)</?(?:think|thinking|thought|reasoning)\b|\[/?THINK\]|<\|channel\|>")
_DECODER = json.JSONDecoder()
# Messages, or pieces of JSON in a prompt, that are looked at to find one.
_LOOK = 1000


@dataclass(frozen=True)
class Cause:
    """One reason.

    Attributes:
        code: one word for a program.
        what: what happened, a sentence.
        do: what to do about it.
        message: the index of the message that it is about, in the newer request; None if it is about another
            part of it.
    """

    code: str
    what: str
    do: str
    message: int | None = None


@dataclass(frozen=True)
class Reason:
    """What a word of `X-Carryback-Reuse` means, and what to do; empty if nothing needs to be done."""

    means: str
    do: str = ""


def renamed(hint: str, before: str) -> Cause:
    """A conversation got a new name: its messages continue another one.

    Args:
        hint: the header or field that named both.
        before: the other one's id.
    """
    return Cause(
        "hint_changed",
        f"{hint} named another conversation than before: the messages continue {before!r}. Something on the way makes a new "
        "one for each request.",
        f"Take {hint} out of conversation_headers, or have the client send X-Conversation-ID.",
    )


# What each of `wire.ENGINE_REASONS` and `wire.ROUTER_REASONS` means.
REASONS = {
    "verified": Reason("All that was left of the prompt's beginning was reused."),
    "history_changed": Reason("The prompt does not begin with all that the conversation's last request left."),
    "overwritten": Reason(
        "The prompt begins with all that the conversation's last request left, and some of it is gone: other requests "
        "have overwritten it, or the engine was reset.",
        "Protect more of it for longer (hold_s, hold_mid_turn_s, pin_budget, a tenant's pin_share), or give the decode "
        "engines more KV cache.",
    ),
    "new": Reason("It is the conversation's first request, and no decode engine had the prompt's beginning."),
    "local_cache": Reason("The prefill engine's own prefix cache had it all already: that is reuse, too."),
    "below_threshold": Reason(
        "There was less to read than kv_recompute_threshold tokens, and computing them is quicker.",
        "Nothing, for short histories. Else lower kv_recompute_threshold.",
    ),
    "too_short": Reason("The prompt fills no block of KV."),
    "off": Reason("The request asked for no reuse: X-Carryback-Reuse: off.", "Leave the header out."),
    "no_answer": Reason(
        "No decode engine said in time what it had; or it was paused.",
        "See that the prefill engine reaches the decode engines' events addresses (GET /admin/engines); raise "
        "carryback_ask_timeout_s if they answer late.",
    ),
    "too_many_leases": Reason(
        "So much of the decode engine's KV was being read that it would lend no more.",
        "Nothing, if it is rare. Else give the decode engines more KV cache.",
    ),
    "engine_lost": Reason(
        "The decode engine that had the conversation is gone or was started anew, and no other had as much.",
        "See why the engine went: its log.",
    ),
    "several_answers": Reason(
        "It asked for several answers, which the decode engine does alone.", "Ask for one (n, best_of, beams)."
    ),
    "several_prompts": Reason("It had several prompts.", "Send them one by one."),
    "prompt_logprobs": Reason(
        "It asked for the prompt back (echo, prompt_logprobs), which needs all of it computed.",
        "Leave that out.",
    ),
    "prompt_embeds": Reason("Its prompt was embeddings, which have no tokens to compare."),
    "load_failed": Reason(
        "The prefill engine could not read it from the decode engine, and computed it instead.",
        "See the prefill engine's log: for NIXL's error, and then the network between the engines; or it says that "
        "what was read is void, since an engine was reset meanwhile.",
    ),
    "plugin_failed": Reason(
        "The engines' plug-in failed, which is a fault of carryback; the prefill engine computed instead.",
        "The engine's log has the traceback: please report it.",
    ),
    "layouts_differ": Reason(
        "The two engines' block sizes, KV cache groups or tensor parallel sizes do not go together.",
        "Start both with the same settings.",
    ),
    "unsupported_layout": Reason("The connector cannot read such a model's KV cache back, so none of it is reused."),
    "unverified": Reason(
        "What the decode engine offered has no valid seal: the engines have different keys, or releases of carryback "
        "that seal differently.",
        "Give all engines the same CARRYBACK_KEY and the same release; the prefill engine's log says which.",
    ),
    "prefill_failed": Reason(
        "No prefill engine answered, so the decode engine did it all.", "See the prefill engines' logs."
    ),
    "prefill_unavailable": Reason(
        "No prefill engine was up, so the decode engine did it all.", "Start one; see GET /admin/engines."
    ),
    "prefill_refused": Reason(
        "The prefill engine refused the request's tools, so the decode engine did it all.",
        "Start both engines with the same --enable-auto-tool-choice and --tool-call-parser.",
    ),
    "no_plugin": Reason(
        "The prefill engine runs without carryback's connector.",
        "Start it as `carryback serve --dry-run` shows.",
    ),
}  # fmt: skip

_RENDERED_ANEW = (
    "Nothing is lost but the answer's own tokens. Else use a template that renders answers as they were "
    "generated (--chat-template)."
)


def differences(old: Asked, new: Asked, answer: Answered | None = None) -> list[Cause]:
    """What of the older request is not the same in the newer one, in the order in which prompts are rendered.

    Of the messages, the first difference alone: what comes after it is not reused anyway.

    Args:
        answer: to the older request, if it is known.
    """
    found = []
    for name, before, after in (("model", old.model, new.model), ("cache_salt", old.salt, new.salt)):
        if before != after:
            found.append(
                Cause(
                    f"{name}_changed",
                    f"{name} was {before!r} and is {after!r}: KV is never shared between them.",
                    f"Keep one {name} for a conversation.",
                )
            )
    found += _settings(old.settings, new.settings)
    if (cause := _tools(old.tools, new.tools)) is not None:
        found.append(cause)
    if (cause := _messages(old, new, answer)) is not None:
        if cause.code == "other_conversation":
            return [cause]  # what else differs is no change
        found.append(cause)
    return found


def template_causes(held: str, new: str) -> list[Cause]:
    """Why prompts part though the newer request has all that the older one has.

    Args:
        held, new: the rendered texts from shortly before where they part.
    """
    if _THINKING.search(held) or _THINKING.search(new):
        return [
            Cause(
                "template_drops_reasoning",
                "The chat template renders an answer's reasoning, or the empty block that stands for it, only "
                "while the answer is the newest.",
                "Use a template that keeps it (some have a switch in chat_template_kwargs), or accept it: all "
                "before the last turn is reused.",
            )
        ]
    return [
        Cause(
            "template_rewrites",
            "The chat template renders an earlier message differently once more messages follow.",
            "Look at the template for conditions on the last message or on the number of messages.",
        )
    ]


def left_out(old: Asked, new: Asked) -> Cause | None:
    """Why what was generated is no part of a prompt that begins with the older one, if it is none.

    Of text completions nobody can tell.
    """
    at = len(old.messages)
    if new.messages[:1] and new.messages[0].role in _PROMPTS:
        return None
    if len(new.messages) == at:
        return Cause(
            "prompt_repeated",
            "It is the last prompt once more, a retry for example: the answer to it is no part of it.",
            "Nothing, if that was meant: all of the prompt itself can be reused.",
            at - new.first,
        )
    if new.messages[at].role == "assistant":
        return None
    return Cause(
        "answer_left_out",
        "The answer is not in the next request.",
        "Send it back as it came, before the next message.",
        at - new.first,
    )


def answer_causes(old: Asked, new: Asked, answer: Answered | None, rendered: str | None) -> list[Cause]:
    """Why a prompt that goes on after an answer does not begin with what was generated.

    Args:
        answer: what the client got; None if it is not known.
        rendered: the newer prompt's text from the answer on; None if it is not known.
    """
    if (gone := left_out(old, new)) is not None:
        return [gone]
    at = len(old.messages)
    following = new.messages[at:]
    if new.messages and new.messages[0].role in _PROMPTS:
        # What follows in the prompt may be more than the answer.
        rest = new.messages[0].text[len(old.messages[0].text) :]
        if answer is None or new.messages[0].role == "tokens":
            return [_respelled(old, answer, 0)]
        following = [Said("assistant", answer.said.text if rest.startswith(answer.said.text) else rest)]
    if answer is None:
        return [_respelled(old, None, at - new.first)]
    said, again = answer.said, first_answer(following)
    where = at - new.first
    if said.reasoning and not again.reasoning and said.reasoning not in again.text:
        return [
            Cause(
                "reasoning_dropped",
                "The answer's reasoning is not in the next request.",
                "Send it back in the message (`reasoning`) if the chat template renders it. Else only the "
                "answer itself has to be computed again.",
                where,
            )
        ]
    if (cause := _calls(said.calls, again.calls, where)) is not None:
        return [cause]
    if said.text != again.text:
        spaces = " (only in spaces at its ends)" if said.text.strip() == again.text.strip() else ""
        return [
            Cause(
                "answer_changed",
                f"The answer's text was changed before it came back{spaces}.",
                "Send answers back as they came.",
                where,
            )
        ]
    if said.reasoning and rendered is not None and said.reasoning.strip() not in rendered:
        return [Cause(**{**vars(template_causes("<think>", "")[0]), "message": where})]
    if rendered is not None:
        for call, sent in zip(said.calls, again.calls, strict=True):
            if (cause := _spelled_anew(call, sent, rendered, where)) is not None:
                return [cause]
    return [_respelled(old, answer, where)]


def _respelled(old: Asked, answer: Answered | None, where: int) -> Cause:
    if answer is not None and answer.stop:
        return Cause(
            "stop_string",
            f"The stop string {answer.stop!r} ended the answer. The model had generated it; the answer, as it "
            "comes back, is without it.",
            "Ask for include_stop_str_in_output, or leave `stop` out.",
            where,
        )
    if old.is_constrained:
        return Cause(
            "grammar_spelling",
            "The answer was generated under a grammar (a schema, or a tool that had to be called), which makes "
            "the model spell it in other tokens, or with other spaces, than the template and the tokenizer do.",
            _RENDERED_ANEW,
            where,
        )
    return Cause(
        "respelled",
        "The answer is spelled differently by the template than the model generated it: the text is the same "
        "as far as can be seen, its tokens or what surrounds it are not.",
        _RENDERED_ANEW,
        where,
    )


# -- settings and tools


def _settings(old: dict[str, Any], new: dict[str, Any]) -> list[Cause]:
    found = []
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        words = name
        if isinstance(before, dict | None) and isinstance(after, dict | None):
            inner = {
                each
                for each in {*(before or {}), *(after or {})}
                if (before or {}).get(each) != (after or {}).get(each)
            }
            words = f"{name} ({', '.join(sorted(inner))})" if inner else name
        found.append(
            Cause(
                f"{name}_changed",
                f"{words} is not what it was: the template may render the prompt differently.",
                "Keep it the same for a whole conversation.",
            )
        )
    return found


def _tools(old: list[Any], new: list[Any]) -> Cause | None:
    if [_spelled(tool) for tool in old] == [_spelled(tool) for tool in new]:
        return None
    why = "They are at the front of the prompt, so nothing behind them is reused"
    keep = f"{why}: give every request of a conversation the same tools."
    before, after = {_name(tool): tool for tool in old}, {_name(tool): tool for tool in new}
    if gone := [name for name in before if name not in after]:
        more = [name for name in after if name not in before]
        added = f", and added: {_listed(more)}" if more else ""
        return Cause("tools_changed", f"Tools were taken away: {_listed(gone)}{added}.", keep)
    if more := [name for name in after if name not in before]:
        return Cause("tools_changed", f"Tools were added: {_listed(more)}.", keep)
    changed = [name for name in before if _sorted(before[name]) != _sorted(after[name])]
    if changed:
        name = changed[0]
        one, two = _function(before[name]), _function(after[name])
        part = next(
            (each for each in dict.fromkeys((*one, *two)) if one.get(each) != two.get(each)), "definition"
        )
        detail = ""
        if (
            isinstance(a := one.get(part), str)
            and isinstance(b := two.get(part), str)
            and (kind := _changing(a, b))
        ):
            detail = _detail(kind)
        code = "tool_description_changed" if part == "description" else "tool_changed"
        return Cause(code, f"The {part} of tool {name} is not the same{detail}.", keep)
    if list(before) != list(after):
        return Cause(
            "tools_reordered", "The tools are the same, in another order.", f"{why}: sort them by name."
        )
    return Cause(
        "tools_respelled",
        "The tools are the same; the keys in their definitions are in another order.",
        f"{why}: build each definition once, and send it as it is.",
    )


def _name(tool: Any) -> str:
    return str(_function(tool).get("name") or _sorted(tool))


def _function(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else tool if isinstance(tool, dict) else {}


def _spelled(value: Any) -> str:
    return json.dumps(value)


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


# -- messages


def _messages(old: Asked, new: Asked, answer: Answered | None) -> Cause | None:
    before, after = old.messages, new.messages
    if any(each.role in _PROMPTS for each in (*before[:1], *after[:1])):
        return _prompt(before, after)
    same = next(
        (at for at, (one, two) in enumerate(zip(before, after, strict=False)) if one != two),
        min(len(before), len(after)),
    )
    if same == len(before):
        return None
    where = same - new.first
    rest, rest_new = before[same : same + _LOOK], after[same : same + _LOOK]
    if not rest_new:
        gone = len(before) - same
        return Cause(
            "messages_removed",
            f"The newest {_count(gone)} are gone: the history was cut back to an earlier state.",
            "Nothing, if that was meant (a retry, an edit): what is left is reused.",
            where,
        )
    if sorted(map(repr, rest)) == sorted(map(repr, rest_new[: len(rest)])):
        return Cause(
            "messages_reordered",
            "The same messages come in another order.",
            "Send a history in the order in which it was said.",
            where,
        )
    is_front = all(each.role in _SYSTEM for each in before[:same])
    removed, added = _goes_on(rest, rest_new)
    if _is_other(old, new, answer, same, removed, added):
        return Cause(
            "other_conversation",
            "The messages are not the last request's: another prompt under the same id (another agent's, a title's, a "
            "judge's), or a summary that replaces all of the history.",
            "Give each prompt of a program, each agent and each branch an id of its own.",
            where,
        )
    if removed is None:
        return _edited(rest[0], rest_new[0], where)
    if added == 0 and removed:
        return Cause(
            "history_trimmed" if is_front else "messages_removed",
            f"{_count(removed).capitalize()} {'at the front' if is_front else 'within the history'} "
            f"{'was' if removed == 1 else 'were'} dropped.",
            "Trim rarely and by much rather than a little with each turn: each trim costs the whole prompt "
            "once. Tool results can be shortened when they come, before they are first sent.",
            where,
        )
    if removed == 0:
        return Cause(
            "messages_inserted",
            f"{_count(added).capitalize()} {'was' if added == 1 else 'were'} inserted before messages that were "
            "there (memory, retrieved documents, reminders).",
            "Put what changes with each turn at the end, after the history.",
            where,
        )
    if added < removed:
        return Cause(
            "history_summarised",
            f"{_count(removed).capitalize()} became {added}: a summary stands for them.",
            "Summarise rarely and much at once; each time costs the whole prompt.",
            where,
        )
    return _edited(rest[0], rest_new[0], where)


def _is_other(
    old: Asked, new: Asked, answer: Answered | None, same: int, removed: int | None, added: int
) -> bool:
    """Whether a request is no later one of the same conversation.

    Args:
        same: messages that both begin with.
        removed, added: after those, as `_goes_on` has it.
    """
    before, after = old.messages, new.messages
    if any(each.role not in _SYSTEM for each in before[:same]):
        return False
    if removed is None:
        return not _is_alike(_question(before), _question(after))
    tail = before[same + removed :]
    # A conversation that was changed at its front still has its newest messages, and the answer to them.
    end = same + added + len(tail)
    goes_on = after[same + added : end] == tail and len(after) > end
    if goes_on and answer is not None:
        again = first_answer(after[end:])
        goes_on = (again.text.strip(), again.calls) == (answer.said.text.strip(), answer.said.calls)
    is_headed = same == 0 and after[0].role in _SYSTEM
    is_replaced = added > 0 and (removed > 0 or is_headed)
    return is_replaced and not goes_on and not _is_alike(before[same], after[same])


def _prompt(old: list[Said], new: list[Said]) -> Cause | None:
    """Of text completions."""
    before, after = old[0] if old else Said(""), new[0] if new else Said("")
    if before.role == after.role and after.text.startswith(before.text):
        return None
    kind = _changing(before.text, after.text) if before.role == after.role == "prompt" else ""
    return Cause(
        "prompt_changed",
        f"The prompt does not begin with the last one{_detail(kind)}.",
        "Append to a prompt; put what changes at its end. A prompt of another kind needs an id of its own.",
        0,
    )


def _goes_on(old: list[Said], new: list[Said]) -> tuple[int | None, int]:
    """How many messages of each history come before both go on with the same; None if they never do."""
    index = dict[Said, int]()
    for at, each in enumerate(old):
        index.setdefault(each, at)
    found = [(index[each] + at, index[each], at) for at, each in enumerate(new) if each in index]
    if not found:
        # An edit of the newest message that was known has none after it.
        return None, 0
    _, removed, added = min(found)
    return removed, added


def _edited(old: Said, new: Said, where: int) -> Cause:
    if old.role != new.role:
        return Cause(
            "message_changed",
            f"Where a message of the {old.role} was, there is one of the {new.role}.",
            "Append to a history; do not change what was sent.",
            where,
        )
    if old.text == new.text and old.reasoning != new.reasoning:
        what = "is gone" if not new.reasoning else "is not what it was"
        return Cause(
            "reasoning_dropped",
            f"The reasoning of an earlier answer {what}.",
            "Send it always, or never: what is rendered once and then is not breaks the prompt there.",
            where,
        )
    if old.text == new.text and (cause := _calls(old.calls, new.calls, where)) is not None:
        return cause
    if old.text == new.text and old.media != new.media:
        return Cause(
            "media_changed",
            "An image or another attachment is not what it was: even if it looks the same, its bytes or its "
            "URL differ.",
            "Encode an attachment once, and send the same bytes with each turn.",
            where,
        )
    kind = _changing(old.text, new.text)
    if old.role in _SYSTEM:
        return Cause(
            "system_prompt_changed",
            f"The system prompt is not the same{_detail(kind)}.",
            "Put what changes at the end, in the newest message, or give it as the result of a tool; keep the "
            "system prompt as it is.",
            where,
        )
    return Cause(
        "message_changed",
        f"An earlier message ({new.role}) is not the same{_detail(kind)}.",
        "Append to a history; do not change what was sent. A prompt of another kind needs an id of its own.",
        where,
    )


def respelled_calls(old: Asked, new: Asked) -> Cause | None:
    """The first call of both requests whose JSON has other spaces or escapes.

    Engines parse arguments, so most templates render both the same: this is a cause only where prompts do part there.
    """
    for at, (one, two) in enumerate(zip(old.messages, new.messages, strict=False)):
        for before, after in zip(one.calls, two.calls, strict=False):
            if before.arguments != after.arguments:
                return _respelled_by_client(after.name, at - new.first)
    return None


def _spelled_anew(call: Call, sent: Call, rendered: str, where: int) -> Cause | None:
    """Who spelled a call's arguments otherwise than the model, if the prompt shows that somebody did.

    Args:
        sent: the call as the client sent it back: the same JSON.
        rendered: the prompt's text from the answer on.
    """
    if call.arguments in rendered:
        return None
    if sent.arguments != call.arguments and sent.arguments in rendered:
        return _respelled_by_client(call.name, where)
    if not _has_json(rendered, call.arguments):
        return None  # the template writes no JSON, and so the model did not
    return Cause(
        "arguments_rewritten",
        f"The arguments of {call.name} are rendered in other words than they came: the engine parses them, and the "
        "chat template writes them anew.",
        _RENDERED_ANEW,
        where,
    )


def _respelled_by_client(name: str, where: int) -> Cause:
    return Cause(
        "arguments_respelled",
        f"The arguments of {name} were written anew: the same JSON, in another text (the order of keys, spaces, or "
        "escapes).",
        "Keep the string that the model gave (`tool_call.function.arguments`), and send that.",
        where,
    )


def _has_json(text: str, wanted: str) -> bool:
    """Whether a text has a JSON object that is equal to this one."""
    value = _value(wanted)
    for each in islice(re.finditer(r"\{", text), _LOOK):
        with suppress(ValueError, RecursionError):
            if _DECODER.raw_decode(text, each.start())[0] == value:
                return True
    return False


def _calls(old: tuple[Call, ...], new: tuple[Call, ...], where: int) -> Cause | None:
    if old == new:
        return None
    if [call.name for call in old] == [call.name for call in new]:
        one, two = next((one, two) for one, two in zip(old, new, strict=True) if one != two)
        if _value(one.arguments) == _value(two.arguments):
            return _respelled_by_client(one.name, where)
        return Cause(
            "arguments_changed",
            f"The arguments of {one.name} are not what the model gave.",
            "Send tool calls back as they came.",
            where,
        )
    return Cause("calls_changed", "The tool calls of an answer are not what the model gave.",
                 "Send tool calls back as they came.", where)  # fmt: skip


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _question(messages: list[Said]) -> Said:
    """The first message that is no system prompt."""
    return next((each for each in messages if each.role not in _SYSTEM), Said(""))


def _is_alike(old: Said, new: Said) -> bool:
    """Whether one may be an edit of the other."""
    if old.role != new.role:
        return False
    shorter = min(len(old.text), len(new.text))
    start = common_start(old.text, new.text)
    end = common_start(old.text[::-1], new.text[::-1])
    return start + end >= shorter / 4


def _changing(old: str, new: str) -> str:
    """What it is that differs between two texts, if it is of a kind that changes by itself."""
    start = common_start(old, new)
    end = min(common_start(old[::-1], new[::-1]), min(len(old), len(new)) - start)
    first = re.split(r"\s", old[max(start - _WORD, 0) : start])[-1]
    last = re.split(r"\s", old[len(old) - end :][:_WORD])[0]
    words = [first + text[start : len(text) - end] + last for text in (old, new)]
    for kind, pattern in _KINDS:
        if all(pattern.search(word) for word in words):
            return kind
    if not all(re.search(r"\d", word) for word in words):
        return "a date" if all(map(_MONTH.fullmatch, words)) else ""
    line = old[:start].rpartition("\n")[2][-20:] + words[0] + old[len(old) - end :].partition("\n")[0][:20]
    if _MONTH.search(line):
        return "a date"
    is_number = all(re.fullmatch(r"\D*\d+(?:\.\d+)?\D*", word) for word in words)
    return "a number" if is_number else ""


def _detail(kind: str) -> str:
    return f": {kind} in it changes" if kind else ""


def common_start(one: T, two: T) -> int:
    """How much two texts have in common at the start."""
    length = min(len(one), len(two))
    low = 0
    while low < length:  # in steps, since texts are long and slices compare quickly
        step = max((length - low) // 2, 1)
        if one[low : low + step] != two[low : low + step]:
            if step == 1:
                return low
            length = low + step
        else:
            low += step
    return low


def _count(number: int) -> str:
    return "one message" if number == 1 else f"{number} messages"
