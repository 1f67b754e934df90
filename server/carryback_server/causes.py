"""Why a prompt does not begin with what is held: what differs between two requests, and what to do about it.

Nothing here asks anybody: two requests and an answer go in, likely causes come out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from carryback_server.said import Answered, Asked, Call, Said, joined

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
# Messages that are looked at to find where a history goes on.
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


# By the words of docs/router.md.
REASONS = {
    "verified": Reason("The prompt starts with what was held."),
    "history_changed": Reason("The prompt left what was held: only what comes before was reused."),
    "local_cache": Reason("The prefill engine's own prefix cache had it all already: that is reuse, too."),
    "below_threshold": Reason(
        "There was less to read than kv_recompute_threshold tokens, and computing them is quicker.",
        "Nothing, for short histories. Else lower kv_recompute_threshold in the prefill engine.",
    ),
    "too_short": Reason("The prompt, or what was held, has no full block of KV."),
    "new": Reason("It is the conversation's first request: there was nothing to reuse yet."),
    "no_record": Reason(
        "Nothing was held: the last answer was cut off, or was not to be held (hold_s, "
        "X-Conversation-End, X-Carryback-Reuse: off).",
        "Read answers to their end. If none was cut off, see that hold_s is not 0 and that the engines' events "
        "reach the router (GET /admin/engines).",
    ),
    "in_use": Reason(
        "Another request of the same conversation had not ended, and has what was held.",
        "Requests that run at the same time need conversations of their own: name the branch, and its parent "
        "in X-Conversation-Parent.",
    ),
    "expired": Reason(
        "It was held for its time, and the conversation came back later.",
        "Raise hold_s, or hold_mid_turn_s if a tool takes long (hold_first_s for a first request without an id).",
    ),
    "evicted": Reason(
        "It was let go of early: more was held than pin_budget, or than the tenant's pin_share.",
        "Raise pin_budget or the share, give the decode engines more KV cache, or end conversations that are "
        "over (X-Conversation-End).",
    ),
    "released": Reason(
        "The decode engine let go of it: it was asked to, or was reset or paused, or its weights were changed.",
        "See the decode engine's log, which says why it let go.",
    ),
    "deleted": Reason("The conversation was deleted while the request ran."),
    "event_missing": Reason(
        "The decode engine had not said in time what it holds.",
        "See that its events reach the router (GET /admin/engines, carryback_held_events_missing_total); raise "
        "held_event_wait_s if they come late.",
    ),
    "engine_lost": Reason(
        "The decode engine that held it is gone or was started anew.", "See why the engine went: its log."
    ),
    "state_unavailable": Reason("Redis did not answer in time.", "See Redis, and state_timeout_s."),
    "state_lost": Reason("Redis was started anew, so its records are void.", "See why Redis restarted."),
    "off": Reason("The request asked for no reuse: X-Carryback-Reuse: off.", "Leave the header out."),
    "no_conversation": Reason(
        "The request has no conversation: no id, and none could be inferred.", "Send X-Conversation-ID."
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
        "The plug-in of the prefill engine failed, which is a fault of carryback; the engine computed instead.",
        "The prefill engine's log has the traceback: please report it.",
    ),
    "window_gone": Reason(
        "The prompt left what was held before its end, and the model's sliding windows there need KV that the "
        "decode engine had let go of.",
        "Start both engines with --disable-hybrid-kv-cache-manager: they keep all of it then, which takes more "
        "memory.",
    ),
    "layouts_differ": Reason(
        "The two engines' block sizes, KV cache groups or tensor parallel sizes do not go together.",
        "Start both with the same settings.",
    ),
    "unsupported_layout": Reason(
        "The model's KV cache cannot be cut at a block (Mamba, linear attention), so nothing is reused of it."
    ),
    "unverified": Reason(
        "The record has no valid seal: the engines have different keys, or releases of carryback that seal "
        "differently.",
        "Give all engines the same CARRYBACK_KEY and the same release; the prefill engine's log says which.",
    ),
    "spent": Reason("The prefill engine was given the record before.", "Report it: a router never does that."),
    "withdrawn": Reason("The record had been taken back.", "Report it: a router never does that."),
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


def differences(old: Asked, new: Asked) -> list[Cause]:
    """What of the older request is not the same in the newer one, in the order in which prompts are rendered.

    Of the messages, the first difference alone: what comes after it is not reused anyway.
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
    if (cause := _messages(old, new)) is not None:
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


def answer_causes(old: Asked, new: Asked, answer: Answered | None, rendered: str | None) -> list[Cause]:
    """Why a prompt that goes on after an answer does not begin with what was generated.

    Args:
        answer: what the client got; None if it is not known.
        rendered: the newer prompt's text from the answer on; None if it is not known.
    """
    at = len(old.messages)
    following = new.messages[at:]
    if new.messages and new.messages[0].role in _PROMPTS:
        # What follows in the prompt may be more than the answer.
        rest = new.messages[0].text[len(old.messages[0].text) :]
        if answer is None or new.messages[0].role == "tokens":
            return [_respelled(old, answer, 0)]
        following = [Said("assistant", answer.said.text if rest.startswith(answer.said.text) else rest)]
    if not following or following[0].role != "assistant":
        return [
            Cause(
                "answer_left_out",
                "The answer is not in the next request.",
                "Send it back as it came, before the next message.",
                at - new.first,
            )
        ]
    if answer is None:
        return [_respelled(old, None, at - new.first)]
    count = next((n for n, each in enumerate(following) if each.role != "assistant"), len(following))
    said, again = answer.said, joined(following[: max(count, 1)])
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
    for call in said.calls:
        if rendered is not None and call.arguments not in rendered:
            return [
                Cause(
                    "arguments_rewritten",
                    f"The arguments of {call.name} are rendered in other words than they came: the engine "
                    "parses them, and the chat template writes them anew.",
                    _RENDERED_ANEW,
                    where,
                )
            ]
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


def _messages(old: Asked, new: Asked) -> Cause | None:
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
    if removed is None:
        if is_front and not _is_alike(_question(before), _question(after)):
            return Cause(
                "other_conversation",
                "Nothing of the last request's messages is in this one: two conversations share one id.",
                "Give each prompt of a program, each agent and each branch an id of its own.",
                where,
            )
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


def _calls(old: tuple[Call, ...], new: tuple[Call, ...], where: int) -> Cause | None:
    if old == new:
        return None
    if [call.name for call in old] == [call.name for call in new]:
        for one, two in zip(old, new, strict=True):
            if one.arguments == two.arguments:
                continue
            if _value(one.arguments) == _value(two.arguments):
                return Cause(
                    "arguments_respelled",
                    f"The arguments of {one.name} were written anew: the same JSON, in another text "
                    "(spaces, escapes, or the order of keys).",
                    "Keep the string that the model gave (`tool_call.function.arguments`), and send that.",
                    where,
                )
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
    start = _same(old.text, new.text)
    end = _same(old.text[::-1], new.text[::-1])
    return start + end >= shorter / 4


def _changing(old: str, new: str) -> str:
    """What it is that differs between two texts, if it is of a kind that changes by itself."""
    start = _same(old, new)
    end = min(_same(old[::-1], new[::-1]), min(len(old), len(new)) - start)
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


def _same(one: str, two: str) -> int:
    """How many characters two texts have in common at the start."""
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
