"""What a row says, whatever its columns are called: layouts -> messages.

A message is {"role": "system" | "user" | "assistant" | "tool", "content": text}, and "lost" when it
holds something that is not text: "tool_call" or "image_or_other_part". Such a row is dropped: an
answer about an image it never sees, or behind a call it never makes, teaches a model to invent.
"weight": 0 marks an answer that is read and not trained on, as in OpenAI's format.
"""

import json
import re

from utils import UserError

LAYOUTS = {  # the first whose columns are all there wins
    "prompt/chosen/rejected": ("prompt", "chosen", "rejected"),
    "chosen/rejected dialogues": ("chosen", "rejected"),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "alpaca": ("instruction", "output"),
    "openorca": ("question", "response"),
    "prompt/response": ("prompt", "response"),
    "prompt/completion": ("prompt", "completion"),
}
COLUMNS = sorted({column for needed in LAYOUTS.values() for column in needed}
                 | {"input", "system", "bad", "kind"})
MEDIA = ("image", "images", "audio", "audios", "video", "videos")  # columns beside a conversation
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user",
         "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
         "bot": "assistant", "function_call": "assistant", "tool_call": "assistant",
         "tool": "tool", "function": "tool", "tool_response": "tool", "observation": "tool"}
VISIBLE = re.compile(r"[^\s\u00ad\u200b-\u200f\u2060\ufeff]")  # a text without one is empty
CALLS = ("tool_calls", "function_call", "tool_call", "tool_use")  # keys, roles and types of parts
KEYS = {"role", "from", "content", "value", "weight", *CALLS}  # of a message, that are read


def parse_columns(columns):
    """`"prompt=question,response=answer"` or a dict -> a dict from our name to the source's."""
    if not columns:
        return {}
    flags = "--lower-columns or --upper-columns"
    if isinstance(columns, dict):
        pairs = list(columns.items())
    else:
        pairs = [tuple(map(str.strip, pair.split("=", 1))) for pair in columns.split(",")]
        if not all(len(pair) == 2 and all(pair) for pair in pairs):
            raise UserError(f"{flags} {columns}: write name=column pairs separated by commas, such "
                            "as prompt=question,response=answer")
    for names in zip(*pairs, strict=True):
        if doubled := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{flags}: {doubled[0]!r} stands there twice on one side of the =; "
                            "every column has one meaning")
    columns = dict(pairs)
    unknown = [ours for ours in columns if ours not in COLUMNS]
    if unknown:
        raise UserError(f"{flags}: unknown name {unknown[0]!r}; known: " + ", ".join(COLUMNS))
    return columns


def find_layout(columns, place, given=None):
    """The name of the layout that these columns are; given: the source's own, for the message."""
    for layout, needed in LAYOUTS.items():
        if all(column in columns for column in needed):
            return layout
    known = "; ".join(f"{layout} ({', '.join(needed)})" for layout, needed in LAYOUTS.items())
    raise UserError(f"{place}: unknown layout with the columns "
                    f"{', '.join(map(repr, given or columns))}. Known: {known}. Name every column "
                    "that is needed with --lower-columns or --upper-columns, for example "
                    "--lower-columns prompt=question,response=answer")


def unread(given, layout, columns):
    """Those of these names that this layout does not read; columns: of `parse_columns`."""
    read = {"system", "bad", "kind", *["input"] * (layout == "alpaca")} - columns.keys()
    read |= {*LAYOUTS[layout], *MEDIA, *columns.values()}
    return sorted(f"{name!a:.40}" for name in given - read)


def unread_keys(row, layout):
    """Keys that hold something in a row's messages and are not read, such as reasoning."""
    return {f"{key} of messages" for column in LAYOUTS[layout] if isinstance(row.get(column), list)
            for message in row[column] if isinstance(message, dict)
            for key in message.keys() - KEYS if message[key] not in (None, "", [])}


def row_messages(row, layout, side, place):
    """A row of any layout -> messages `[{"role", "content"}, ...]`, a column "system" first.
    An empty system turn, as exports of chats have it, is none."""
    turns = [turn for turn in _turns(row, layout, side, place) if turn["role"] != "system"
             or VISIBLE.search(turn["content"]) or "lost" in turn]
    if not any(turn["role"] == "system" for turn in turns) and VISIBLE.search(
            system := text_of(row.get("system") or "", f'{place}: "system"')):
        turns.insert(0, {"role": "system", "content": system})
    return turns


def _turns(row, layout, side, place):
    def get(column):
        if column not in row:
            raise UserError(f'{place}: no column "{column}"; found {", ".join(map(str, row))}')
        return row[column]

    def text(column):
        return text_of(get(column), f'{place}: "{column}"')

    if layout == "alpaca":
        prompt, extra = text("instruction"), text("input") if "input" in row else ""
        return _exchange(prompt + "\n" + extra if extra.strip() else prompt, text("output"))
    extra = row.get("input")
    if isinstance(extra, str) and VISIBLE.search(extra):
        raise UserError(f'{place}: "input" has text that would not be read; name the columns '
                        "instruction=...,input=input,output=... with --lower-columns or "
                        "--upper-columns, or remove it")
    if layout in ("messages", "conversations"):
        return _messages(get(layout), f'{place}: "{layout}"')
    if layout == "openorca":
        return _exchange(text("question"), text("response"))
    if layout == "chosen/rejected dialogues":
        if isinstance(get(side), str):
            return _dialogue(text(side), f'{place}: "{side}"')
        return _messages(get(side), f'{place}: "{side}"')

    answer = {"prompt/response": "response", "prompt/completion": "completion"}.get(layout, side)
    prompt, reply = get("prompt"), get(answer)
    if isinstance(reply, list):
        reply = _messages(reply, f'{place}: "{answer}"')
        if reply and reply[0]["role"] != "assistant":  # the whole dialogue, its prompt included
            return reply
    else:
        reply = [{"role": "assistant", "content": text(answer)}]
    if isinstance(prompt, list):
        return _messages(prompt, f'{place}: "prompt"') + reply
    prompt = text("prompt")
    if reply and re.match(r"\s*Human:", prompt) and prompt.rstrip().endswith("\n\nAssistant:"):
        reply[0]["content"] = reply[0]["content"].strip()
        return _dialogue(prompt, f'{place}: "prompt"')[:-1] + reply
    return [{"role": "user", "content": prompt}, *reply]


def _exchange(prompt, response):
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def text_of(value, place):
    """A cell as text, "" for an empty one; half a surrogate pair becomes a question mark."""
    if value is None:  # an empty cell
        return ""
    if not isinstance(value, str):
        raise UserError(f"{place} must be text, not {type(value).__name__} ({str(value)[:40]})")
    # Half a surrogate pair is legal in JSON and fatal to tokenizers and Arrow.
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _messages(value, place):
    if not isinstance(value, list):
        raise UserError(f"{place} must be a list of messages, not {type(value).__name__}")
    messages = []
    for number, message in enumerate(value):
        here = f"{place} message {number}"
        if not isinstance(message, dict):
            raise UserError(f"{here} must be an object, not {type(message).__name__}")
        role = str(message.get("role") or message.get("from")).lower()
        if role not in ROLES:
            raise UserError(f"{here} has the role {role!r}; known: {', '.join(ROLES)}")
        content = message.get("value" if message.get("content") is None else "content")
        kinds = set()
        if isinstance(content, list):  # parts; only text can be trained on
            kinds = {str(part.get("type") or ("text" if "text" in part else "other"))
                     for part in content if isinstance(part, dict)}
            content = "".join(text_of(part.get("text") if isinstance(part, dict) else part, here)
                              for part in content)
        messages.append({"role": ROLES[role], "content": text_of(content, f"{here}: content")})
        if (weight := message.get("weight")) not in (None, 0, 1):
            raise UserError(f"{here} has the weight {weight!r}; it must be 0 or 1")
        if weight == 0:
            messages[-1]["weight"] = 0
        if role in CALLS or not kinds.isdisjoint(CALLS) or any(message.get(key) for key in CALLS):
            messages[-1]["lost"] = "tool_call"
        elif not kinds <= {"text", "input_text", "output_text"}:
            messages[-1]["lost"] = "image_or_other_part"
    return messages


def _dialogue(text, place):
    """An hh-rlhf transcript, `\\n\\nHuman: ...\\n\\nAssistant: ...`, -> messages."""
    before, *turns = re.split(r"(?:\A\s*|\n\n)(Human|Assistant):", text)
    if before.strip() or not turns:
        raise UserError(f'{place} is not a dialogue that starts with "\\n\\nHuman: "')
    return [{"role": ROLES[{"Human": "user"}.get(who, "assistant")], "content": words.strip()}
            for who, words in zip(turns[::2], turns[1::2], strict=True)]


def clean_messages(messages, end_markers):
    """Messages up to the last answer to train on, roles alternating, end markers cut; or [].

    Many chat sets start in the middle (an assistant turn first) or end on a question; neither is
    something to train on, and chat templates refuse them. Repeated roles are joined.
    """
    cleaned = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "assistant" and not any(m["role"] == "user" for m in cleaned):
            continue
        if role == "assistant":
            while (bare := content.rstrip()).endswith(end_markers):
                marker = next(m for m in end_markers if bare.endswith(m))
                content = bare.removesuffix(marker).rstrip()
        if cleaned and cleaned[-1]["role"] == role:
            joined = cleaned[-1] | message | {"content": cleaned[-1]["content"] + "\n" + content}
            if role == "assistant" and ("weight" in cleaned[-1]) != ("weight" in message):
                joined = {"role": role, "content": joined["content"], "lost": "mixed_weights"}
            cleaned[-1] = joined
        else:
            cleaned.append(message | {"content": content})
    while cleaned and (cleaned[-1]["role"] != "assistant" or "weight" in cleaned[-1]):
        cleaned.pop()
    return cleaned


def why_unusable(messages, row):
    """Why cleaned messages hold nothing to train on; None when they do. row: all its columns."""
    if not messages:
        return "no_assistant_turn"
    lost = [message["lost"] for message in messages if "lost" in message]
    if lost or any(row.get(column) for column in MEDIA):
        return max(["image_or_other_part", *lost])  # tool_call before mixed_weights before it
    if not VISIBLE.search(messages[-1]["content"]):
        return "empty_response"
    if not any(VISIBLE.search(message["content"]) for message in messages[:-1]):
        return "empty_prompt"
    return None


def transcript(messages):
    """Messages as a person reads them: the text alone when there is only one."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{m['role'].capitalize()}: {m['content']}" for m in messages)


def conversation(row, answer=None):
    """The messages of a tokenised row or a line of curated.jsonl, ending with `answer` if given."""
    messages = row.get("messages") or _exchange(row["prompt"], row["response"])
    if isinstance(messages, str):
        messages = json.loads(messages)
    return messages if answer is None else [*messages[:-1], messages[-1] | {"content": answer}]
