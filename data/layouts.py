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
NAMES = (
    "bad",
    "chosen",
    "completion",
    "conversations",
    "input",
    "instruction",
    "kind",
    "messages",
    "output",
    "prompt",
    "question",
    "rejected",
    "response",
    "system",
)
MEDIA = (
    "image",
    "images",
    "audio",
    "audios",
    "video",
    "videos",
)  # columns beside a conversation
CALLS = (
    "tool_calls",
    "function_call",
    "tool_call",
    "tool_use",
)  # keys, roles and types of parts
TEXTS = ("text", "input_text", "output_text")  # types of parts that are text
KEYS = {
    "role",
    "from",
    "content",
    "value",
    "weight",
    *CALLS,
}  # the keys of a message that are read
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "tool_response": "tool",
    "observation": "tool",
}
VISIBLE = re.compile(r"[^\s\u00ad\u200b-\u200f\u2060\ufeff]")  # a text without one is empty


class Unusable(Exception):
    """A row that cannot be trained on; the message is the reason."""


# --- columns --------------------------------------------------------------------------------------


def parse_columns(columns):
    """`"prompt=question,response=answer"` or a dict -> a dict from our name to the source's."""
    if not columns or isinstance(columns, dict):
        return columns or {}
    names = {}
    for pair in columns.split(","):
        ours, _, theirs = pair.partition("=")
        ours = ours.strip()
        if ours not in NAMES or ours in names or not theirs.strip():
            raise UserError(
                f"--lower-columns or --upper-columns {columns}: {pair!r} is no name=column pair, "
                f"such as prompt=question; the names are {', '.join(NAMES)}, each once"
            )
        names[ours] = theirs.strip()
    return names


def find_layout(columns, place, given=None):
    """The name of the layout that these columns are; given: the source's own, for the message."""
    for layout, needed in LAYOUTS.items():
        if all(column in columns for column in needed):
            return layout
    raise UserError(
        f"{place}: unknown layout with the columns {', '.join(map(repr, given or columns))}. "
        f"Known: {'; '.join(LAYOUTS)}. Name every column that is needed with --lower-columns or "
        "--upper-columns, for example --lower-columns prompt=question,response=answer"
    )


def unread_columns(names, layout, columns):
    """Those of the source's column names that this layout does not read.

    columns: those of `parse_columns`.
    """
    read = {*LAYOUTS[layout], *MEDIA, *columns.values()}
    optional = {"system", "bad", "kind"}
    if layout == "alpaca":
        optional.add("input")
    read |= optional - columns.keys()
    return sorted(f"{name!a:.40}" for name in names - read)


def unread_keys(row, layout):
    """Keys that hold something in a row's messages and are not read, such as reasoning."""
    unread = set()
    for column in LAYOUTS[layout]:
        messages = row.get(column)
        if not isinstance(messages, list):
            continue
        for message in messages:
            if not isinstance(message, dict):
                continue
            for key in message.keys() - KEYS:
                if message[key] not in (None, "", []):
                    unread.add(f"{key} of messages")
    return unread


# --- a row ----------------------------------------------------------------------------------------


def row_messages(row, layout, side, place):
    """A row of any layout -> messages `[{"role", "content"}, ...]`, a column "system" first.

    An empty system turn, as exports of chats have it, is left out.
    """
    turns = []
    for turn in _turns(row, layout, side, place):
        if turn["role"] != "system" or "lost" in turn or VISIBLE.search(turn["content"]):
            turns.append(turn)
    if any(turn["role"] == "system" for turn in turns):
        return turns
    system = text_of(row.get("system") or "", f'{place}: "system"')
    if VISIBLE.search(system):
        turns.insert(0, {"role": "system", "content": system})
    return turns


def _turns(row, layout, side, place):
    def get(column):
        if column not in row:
            raise UserError(
                f'{place}: no column "{column}"; found {", ".join(map(str, row))}'
            )
        return row[column]

    def text(column):
        return text_of(get(column), f'{place}: "{column}"')

    if layout == "alpaca":
        prompt = text("instruction")
        if text_of(row.get("input"), f'{place}: "input"').strip():
            prompt += "\n" + text("input")
        return _exchange(prompt, text("output"))
    if isinstance(row.get("input"), str) and VISIBLE.search(row["input"]):
        raise UserError(
            f'{place}: "input" has text that would not be read; name the columns '
            "instruction=...,input=input,output=... with --lower-columns or --upper-columns, or "
            "remove it"
        )
    if layout in ("messages", "conversations"):
        return _messages(get(layout), f'{place}: "{layout}"')
    if layout == "openorca":
        return _exchange(text("question"), text("response"))
    if layout == "chosen/rejected dialogues":
        read = _dialogue if isinstance(get(side), str) else _messages
        return read(get(side), f'{place}: "{side}"')
    answer = layout.removeprefix("prompt/")  # "response" or "completion"
    if layout == "prompt/chosen/rejected":
        answer = side
    reply = get(answer)
    if not isinstance(reply, list):
        reply = [{"role": "assistant", "content": text(answer)}]
    else:
        reply = _messages(reply, f'{place}: "{answer}"')
        if (
            reply and reply[0]["role"] != "assistant"
        ):  # the whole dialogue, its prompt included
            return reply
    if isinstance(get("prompt"), list):
        return _messages(get("prompt"), f'{place}: "prompt"') + reply
    prompt = text("prompt")
    if (
        reply
        and re.match(r"\s*Human:", prompt)
        and prompt.rstrip().endswith("\n\nAssistant:")
    ):
        reply[0]["content"] = reply[0]["content"].strip()
        return _dialogue(prompt, f'{place}: "prompt"')[:-1] + reply
    return [{"role": "user", "content": prompt}, *reply]


def _exchange(prompt, response):
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": response},
    ]


def text_of(value, place):
    """A cell as text, "" for an empty one; half a surrogate pair becomes a question mark."""
    if value is None:  # an empty cell
        return ""
    if not isinstance(value, str):
        raise UserError(
            f"{place} must be text, not {type(value).__name__} ({str(value)[:40]})"
        )
    if value.isascii():
        return value
    # Half a surrogate pair is legal in JSON and fatal to tokenizers and Arrow.
    return value.encode("utf-8", "replace").decode()


def _messages(value, place):
    if not isinstance(value, list):
        raise UserError(f"{place} must be a list of messages, not {type(value).__name__}")
    return [
        _message(item, f"{place} message {number}") for number, item in enumerate(value)
    ]


def _message(item, place):
    if not isinstance(item, dict):
        raise UserError(f"{place} must be an object, not {type(item).__name__}")
    role = str(item.get("role") or item.get("from")).lower()
    if role not in ROLES:
        raise UserError(f"{place} has the role {role!r}; known: {', '.join(ROLES)}")
    content = item.get("content")
    if content is None:
        content = item.get("value")
    kinds = set()
    if isinstance(content, list):
        content, kinds = _join_parts(content, place)
    message = {"role": ROLES[role], "content": text_of(content, f"{place}: content")}
    weight = item.get("weight")
    if weight not in (None, 0, 1):
        raise UserError(f"{place} has the weight {weight!r}; it must be 0 or 1")
    if weight == 0:
        message["weight"] = 0
    if role in CALLS or kinds.intersection(CALLS) or any(item.get(key) for key in CALLS):
        message["lost"] = "tool_call"
    elif not kinds.issubset(TEXTS):
        message["lost"] = "image_or_other_part"
    return message


def _join_parts(content, place):
    """(text, types) of a content in parts, of which only text can be trained on."""
    texts = []
    kinds = set()
    for item in content:
        if isinstance(item, dict):
            kinds.add(str(item.get("type") or ("text" if "text" in item else "other")))
            item = item.get("text")
        texts.append(text_of(item, place))
    return "".join(texts), kinds


def _dialogue(text, place):
    """An hh-rlhf transcript, `\\n\\nHuman: ...\\n\\nAssistant: ...`, -> messages."""
    before, *turns = re.split(r"(?:\A\s*|\n\n)(Human|Assistant):", text)
    if before.strip() or not turns:
        raise UserError(f'{place} is not a dialogue that starts with "\\n\\nHuman: "')
    messages = []
    for who, words in zip(turns[::2], turns[1::2], strict=True):
        messages.append({"role": ROLES[who.lower()], "content": words.strip()})
    return messages


# --- messages -------------------------------------------------------------------------------------


def clean_messages(messages, end_markers):
    """Messages up to the last answer to train on, roles alternating, end markers cut; or [].

    Many chat sets start in the middle (an assistant turn first) or end on a question; neither is
    something to train on, and chat templates refuse them. Repeated roles are joined.
    """
    cleaned = []
    asked = False
    for message in messages:
        asked = asked or message["role"] == "user"
        if message["role"] == "assistant":
            if not asked:
                continue
            message = message | {"content": _cut_end(message["content"], end_markers)}
        if cleaned and cleaned[-1]["role"] == message["role"]:
            cleaned[-1] = _joined(cleaned[-1], message)
        else:
            cleaned.append(message)
    while cleaned and (cleaned[-1]["role"] != "assistant" or "weight" in cleaned[-1]):
        cleaned.pop()
    return cleaned


def _cut_end(content, end_markers):
    """An answer without the end markers at its very end."""
    while True:
        bare = content.rstrip()
        marker = next((marker for marker in end_markers if bare.endswith(marker)), None)
        if marker is None:
            return content
        content = bare.removesuffix(marker).rstrip()


def _joined(first, second):
    """Two turns of one role as one."""
    content = first["content"] + "\n" + second["content"]
    if first["role"] == "assistant" and ("weight" in first) != ("weight" in second):
        return {"role": "assistant", "content": content, "lost": "mixed_weights"}
    return first | second | {"content": content}


def why_unusable(messages, row):
    """Why cleaned messages hold nothing to train on; None when they do. row: all its columns."""
    if not messages:
        return "no_assistant_turn"
    lost = {message["lost"] for message in messages if "lost" in message}
    if any(row.get(column) for column in MEDIA):
        lost.add("image_or_other_part")
    for reason in ("tool_call", "mixed_weights", "image_or_other_part"):
        if reason in lost:
            return reason
    if not VISIBLE.search(messages[-1]["content"]):
        return "empty_response"
    if not any(VISIBLE.search(message["content"]) for message in messages[:-1]):
        return "empty_prompt"
    return None


def transcript(messages):
    """Messages as a person reads them: the text alone when there is only one."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{turn['role'].capitalize()}: {turn['content']}" for turn in messages)


def conversation(row, answer=None):
    """The messages of a tokenised row or a line of curated.jsonl, ending with `answer` if given."""
    messages = row.get("messages") or _exchange(row["prompt"], row["response"])
    if isinstance(messages, str):
        messages = json.loads(messages)
    if answer is None:
        return messages
    return [*messages[:-1], messages[-1] | {"content": answer}]
