"""Data: sources, layouts, templates, tokenised memory-mapped rows, packed batches.

    source (file, folder, hub name) -> layout -> messages -> template -> segments -> tokens -> Arrow

Every row keeps `row_id`, its index in the source, through every filter: a selection made by row_id
hits the right rows whatever was dropped before. Choices the paper leaves open, made here:

1. Prompt and response are tokenised apart. Tokenised together, a merge across the border would
   take the first response token out of the loss, and generation could not reproduce the split.
2. EOS follows complete responses only and is trained on, by position and never by token id, so a
   tokenizer whose pad is its EOS trains the same. A truncated response gets none: it is not an end.
3. A prompt of `max_prompt` tokens or more is dropped (appendix D: 2,048), template included; when
   every turn is trained, that is the first question.
4. OpenOrca's system prompt is dropped, as the authors do. A system message in a chat is kept: the
   chat template places it; the plain template puts it in front of the first user turn.
5. Special-token strings inside user text become ordinary text; only the template writes control
   tokens. An end marker at the very end of a response, as in FLAN, is cut: it is the EOS. Which
   strings are one depends on the tokenizer; `hash` does not, so a ranking made with one tokenizer
   names the rows of another: it is taken with no marker but <|endoftext|> cut.
"""

import csv
import functools
import itertools
import json
import os
import random
import re
import shutil
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import torch

import recipes
from utils import UserError, content_hash, first_line, hub_answers, write_atomic

TEMPLATE = "User: {prompt}\nAssistant: {response}"
FORMAT = 2  # of the cached rows; raise it when their content changes for the same input
BATCH = 1000  # rows tokenised at a time: enough to keep the tokenizer's threads busy
SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
TOKEN_COLUMNS = ("input_ids", "trained", "rejected_input_ids", "rejected_trained")
ENDOFTEXT = "<|endoftext|>"  # found as text in data sets made from documents of any tokenizer
# Stands in for special-token string number {}. Text never holds half a surrogate pair, see `_text`.
MARK = "\ud800{}\udfff"
CHAT_DATE = "26 Jul 2024"  # some chat templates print today's date: rows would differ by the day
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
                 | {"input", "system_prompt", "bad", "kind"})
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user",
         "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
         "bot": "assistant", "tool": "tool", "function": "tool", "observation": "tool"}


# ------------------------------------------------------------------------------ sources

def find_parts(source, split):
    """The parts of a source in order: paths of data files, or one `datasets.Dataset`."""
    path = Path(source)
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise UserError(f"{source}: unknown file type; known: {', '.join(SUFFIXES)}")
        return [path]
    if path.is_dir():
        return _folder_parts(path, split)
    if re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", str(source)) and path.suffix not in SUFFIXES \
            and not str(source).startswith("."):
        return [_load_hub(str(source), split or "train")]
    raise UserError(f"{source}: no such file or folder (a hub data set reads owner/name or "
                    "owner/name:config)")


def _folder_parts(folder, split):
    import datasets

    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        try:
            saved = datasets.load_from_disk(str(folder))
        except Exception as error:
            raise UserError(f"{folder}: cannot be read ({first_line(error)})") from None
        if isinstance(saved, dict):
            if (split or "train") not in saved:
                raise UserError(f"{folder}: no split \"{split or 'train'}\"; it has "
                                + ", ".join(saved))
            saved = saved[split or "train"]
        return [saved]
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES
                   and not any(part.startswith(".") for part in path.relative_to(folder).parts)
                   and path.is_file())
    word = re.compile(rf"(^|[^a-z]){re.escape((split or 'train').lower())}($|[^a-z])")
    named = [path for path in files if word.search(str(path.relative_to(folder)).lower())]
    # Without a split, files named "train" win: test files beside them must not slip into training.
    chosen = named or ([] if split else files)
    if not chosen:
        what = f' of a split "{split}"' if split else ""
        raise UserError(f"{folder}: no {'/'.join(SUFFIXES)} file{what} in this folder")
    return chosen


def _load_hub(source, split):
    import datasets

    name, _, config = source.partition(":")
    reachable = hub_answers("dataset_info", name, "data set")
    if not reachable:
        datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True
    try:
        return datasets.load_dataset(name, config or None, split=split)
    except Exception as error:
        if reachable:
            raise UserError(f"{source}: cannot be loaded ({first_line(error)})") from None
        raise UserError(f"{source}: no such file or folder, the hub cannot be reached, and the "
                        "data set is not in the local cache; check the network or pass a file") \
            from None


def read_part(part, source):
    """Yield (place, row) for each row of a part; the place is for messages."""
    if not isinstance(part, Path):
        for number, row in enumerate(part):
            yield f"{source} row {number}", row
        return
    reader = {".parquet": _read_parquet, ".csv": _read_csv}.get(part.suffix, _read_json)
    try:
        yield from reader(part)
    except OSError as error:
        raise UserError(f"{part}: {error.strerror or first_line(error)}") from None


def _read_json(path):
    with open(path, "rb") as file:
        # A .json file is a list of objects, or one object a line like .jsonl.
        if path.suffix == ".json" and file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
            file.seek(0)
            try:
                rows = json.loads(file.read())
            except ValueError as error:
                raise UserError(f"{path}: not valid JSON ({error})") from None
            for number, row in enumerate(rows):
                yield f"{path} element {number}", row
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path} line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{place}: not valid JSON ({error})") from None
            yield place, row


def _check_header(path, names):
    """`UserError` for a name that two columns have; nameless ones, as spreadsheets write, pass."""
    if doubled := [name for name, count in Counter(names).items() if name and count > 1]:
        raise UserError(f'{path}: {names.count(doubled[0])} columns are called "{doubled[0]}"; '
                        "rename or remove all but one")


def _read_csv(path):
    # Python's reader keeps every cell a string: an answer "007" must not become the number 7.
    csv.field_size_limit(2**31 - 1)
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            _check_header(path, reader.fieldnames or ())
            for row in reader:
                place = f"{path} line {reader.line_num}"
                if None in row or None in row.values():
                    raise UserError(f"{place}: not as many cells as the header has columns")
                yield place, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path} line {reader.line_num + 1}: not valid CSV ({error})") from None


def _read_parquet(path):
    import pyarrow
    import pyarrow.parquet

    try:
        number, file = 0, pyarrow.parquet.ParquetFile(path)
        _check_header(path, file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=BATCH):
            for row in batch.to_pylist():
                yield f"{path} row {number}", row
                number += 1
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a valid parquet file ({first_line(error)})") from None


# ------------------------------------------------------------------------------ layouts

def parse_columns(columns):
    """`"prompt=question,response=answer"` or a dict -> a dict from our name to the source's."""
    if not columns:
        return {}
    if isinstance(columns, str):
        pairs = [pair.partition("=") for pair in columns.split(",")]
        if not all(ours.strip() and theirs.strip() for ours, _, theirs in pairs):
            raise UserError(f"--lower-columns or --upper-columns {columns}: write name=column "
                            "pairs separated by commas, such as prompt=question,response=answer")
        columns = {ours.strip(): theirs.strip() for ours, _, theirs in pairs}
    unknown = [ours for ours in columns if ours not in COLUMNS]
    if unknown:
        raise UserError(f"--lower-columns or --upper-columns: unknown name {unknown[0]!r}; known: "
                        + ", ".join(COLUMNS))
    return dict(columns)


def find_layout(columns, place):
    """The name of the layout that these columns are."""
    for layout, needed in LAYOUTS.items():
        if all(column in columns for column in needed):
            return layout
    known = "; ".join(f"{layout} ({', '.join(needed)})" for layout, needed in LAYOUTS.items())
    raise UserError(f"{place}: unknown layout with the columns {', '.join(map(str, columns))}. "
                    f"Known: {known}. Name the columns with --lower-columns or --upper-columns, "
                    "for example --lower-columns prompt=question,response=answer")


def row_messages(row, layout, side, place):
    """A row of any layout -> messages `[{"role", "content"}, ...]`."""
    def get(column):
        if column not in row:
            raise UserError(f'{place}: no column "{column}"; found {", ".join(map(str, row))}')
        return row[column]

    def text(column):
        return _text(get(column), f'{place}: "{column}"')

    if layout in ("messages", "conversations"):
        return _messages(get(layout), f'{place}: "{layout}"')
    if layout == "alpaca":
        prompt, extra = text("instruction"), text("input") if "input" in row else ""
        return _exchange(prompt + "\n" + extra if extra.strip() else prompt, text("output"))
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
    if re.match(r"\s*Human:", prompt) and prompt.rstrip().endswith("\n\nAssistant:"):
        reply[0]["content"] = reply[0]["content"].strip()
        return _dialogue(prompt, f'{place}: "prompt"')[:-1] + reply
    return [{"role": "user", "content": prompt}, *reply]


def _exchange(prompt, response):
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _text(value, place):
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
        role = message.get("role") or message.get("from")
        if not isinstance(role, str) or role not in ROLES:
            raise UserError(f"{here} has the role {role!r}; known: {', '.join(ROLES)}")
        content = message.get("content", message.get("value"))
        if isinstance(content, list):  # parts; only text can be trained on
            content = "".join(_text(part.get("text") if isinstance(part, dict) else part, here)
                              for part in content)
        messages.append({"role": ROLES[role], "content": _text(content, f"{here}: content")})
    return messages


def _dialogue(text, place):
    """An hh-rlhf transcript, `\\n\\nHuman: ...\\n\\nAssistant: ...`, -> messages."""
    before, *turns = re.split(r"(?:\A|\n\n)(Human|Assistant):", text)
    if before.strip() or not turns:
        raise UserError(f'{place} is not a dialogue that starts with "\\n\\nHuman: "')
    return [{"role": ROLES[{"Human": "user"}.get(who, "assistant")], "content": words.strip()}
            for who, words in zip(turns[::2], turns[1::2], strict=True)]


def clean_messages(messages, end_markers):
    """Messages up to the last assistant turn, roles alternating, end markers cut; or [].

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
            cleaned[-1]["content"] += "\n" + content
        else:
            cleaned.append({"role": role, "content": content})
    while cleaned and cleaned[-1]["role"] != "assistant":
        cleaned.pop()
    return cleaned


def transcript(messages):
    """Messages as a person reads them: the text alone when there is only one."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{m['role'].capitalize()}: {m['content']}" for m in messages)


# ------------------------------------------------------------------------------ templates

def split_template(template):
    """A template -> its three literal parts: before the prompt, between, after the response."""
    template = template.replace("\\n", "\n")  # what a shell passes for "\n"
    if (template.count("{prompt}"), template.count("{response}")) != (1, 1) \
            or template.index("{prompt}") > template.index("{response}"):
        raise UserError(f"--template {template!r}: it must hold {{prompt}} once and then "
                        f"{{response}} once, such as {TEMPLATE!r}")
    before, rest = template.split("{prompt}")
    return before, *rest.split("{response}")


def plain_segments(messages, template, turns):
    """Messages -> segments [(text, trained)], alternating 0 and 1, under a plain template.

    Whitespace at the end of a prompt moves to the front of the response: tokenizers join a space
    with the word after it, so a prompt that ends in one leaves the model a token it never saw.
    """
    before, between, after = template
    segments, text, question = [], "", []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            question.append(message["content"])
            continue
        text += ("\n" if segments or text else "") + before + "\n".join(question) + between
        answer, question = message["content"] + after, []
        last = number == len(messages) - 1
        if last or (turns == "all" and message["content"].strip()):
            head = text.rstrip()
            answer = text[len(head):] + (answer.rstrip() if after else answer)
            segments += [(head, 0), (answer, 1)]
            text = ""
        else:
            text += answer
    return segments


def chat_segments(messages, tokenizer, turns, place):
    """The same under the tokenizer's chat template; a response is what a turn adds to its prompt.

    Whitespace after the end-of-turn token is left out of the loss: generation stops before it.
    """
    def render(count, prompt=False):
        return tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=prompt, date_string=CHAT_DATE)

    full, segments, done = render(len(messages)), [], 0
    for number, message in enumerate(messages):
        last = number == len(messages) - 1
        if message["role"] != "assistant" or not (
                last or (turns == "all" and message["content"].strip())):
            continue
        head = render(number, prompt=True)
        answer = full if last else render(number + 1)
        answer = answer.rstrip()
        if not (full.startswith(head) and full.startswith(answer) and len(answer) > len(head)):
            advice = "; train on the last turn only" if turns == "all" else ""
            raise UserError(f"{place}: the tokenizer's chat template does not render a finished "
                            "turn as its generation prompt plus the response, so the response "
                            f"cannot be told apart; pass a plain --template{advice}")
        segments += [(full[done:len(head)], 0), (full[len(head):len(answer)], 1)]
        done = len(answer)
    return segments


# ------------------------------------------------------------------------------ tokens

def special_tokens(tokenizer):
    """{id: text} of the control tokens."""
    return {number: token.content for number, token in tokenizer.added_tokens_decoder.items()
            if token.special}


def make_encoder(tokenizer):
    """-> protect(text), encode(texts, continued) -> lists of token ids.

    `protect` hides special-token strings of user text behind marks; `encode` turns those into
    ordinary tokens, and special tokens that the template wrote into control tokens. `continued`
    texts follow other text: a tokenizer that puts a space in front of every text (Llama 2, Mistral)
    must not put one there, so they are tokenised behind a newline that is then cut off.
    """
    specials = sorted(special_tokens(tokenizer).values(), key=len, reverse=True)
    strings = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
    marks = re.compile(MARK.format(r"(\d+)"))

    def call(texts, literal):
        return tokenizer(texts, add_special_tokens=False, split_special_tokens=literal,
                         return_attention_mask=False, return_token_type_ids=False,
                         verbose=False)["input_ids"] if texts else []

    newline, alone, behind = call(["\n", "a", "\na"], False)
    spaced = behind[:len(newline)] == newline and behind[len(newline):] != alone

    def plain(texts, continued, literal=False):
        if not (continued and spaced):
            return call(texts, literal)
        return [ids[len(newline):] if ids[:len(newline)] == newline else call([text], literal)[0]
                for ids, text in zip(call(["\n" + text for text in texts], literal), texts,
                                     strict=True)]

    def encode(texts, continued):
        split = [marks.split(text) for text in texts]  # text, number of a special, text ...
        ids = plain([pieces[0] for pieces in split], continued)
        for row, (_, *rest) in zip(ids, split, strict=True):
            for place, piece in enumerate(rest):
                literal = place % 2 == 0
                if piece:
                    row += plain([specials[int(piece)] if literal else piece],
                                 continued or bool(row), literal)[0]
        return ids

    return lambda text: strings.sub(lambda m: MARK.format(specials.index(m[0])), text), encode


def _tokenizer_hash(tokenizer):
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return content_hash(repr(sorted(tokenizer.get_vocab().items())))
    state = json.loads(backend.to_str())
    state["truncation"] = state["padding"] = None  # left behind by whoever called it last
    return content_hash(json.dumps(state, sort_keys=True))


# ------------------------------------------------------------------------------ rows

def load_rows(source, tokenizer, *, name=None, split=None, columns=None, template=None,
              turns="last", side="chosen", max_length=2048, max_prompt=2048, limit=None, seed=0,
              cache_dir=".cache"):
    """Tokenised rows of a source, memory-mapped from a cache, and a report of what was dropped.

    source      file (.jsonl, .json, .parquet, .csv), folder, or hub name owner/name[:config]
    name        what messages call it, such as "lower"
    columns     our column names -> the source's, when the layout is not a known one
    template    plain template; None: the tokenizer's chat template, else TEMPLATE
    turns       "last": loss on the last assistant turn; "all": on every one
    side        "chosen" or "rejected": the response of preference pairs (join them on row_id)
    max_length  tokens of prompt plus response; longer responses are cut and get no EOS
    max_prompt  prompts of so many tokens or more are dropped
    limit       a seeded random subset of so many rows of the source

    Columns: row_id, hash, prompt_hash, prompt, response, input_ids, trained (1: carries loss),
    complete (not cut), and bad, kind where the source has them.
    """
    name = name or str(source)
    if not str(source).strip():
        raise UserError(f"{name}: the name of the source is empty, as a shell variable that is not "
                        "set leaves it; give a file, a folder or a hub name")
    for value, flag in ((max_length, "max_length"), (max_prompt, "max_prompt"), (limit, "limit")):
        if value is not None and value < 1:
            raise UserError(f"{name}: {flag} {value}: it must be 1 or more")
    if turns not in ("last", "all") or side not in ("chosen", "rejected"):
        raise UserError(f"{name}: turns is last or all, side is chosen or rejected; "
                        f"got {turns!r} and {side!r}")
    if tokenizer.eos_token_id is None:
        raise UserError(f"{name}: the tokenizer has no end-of-sequence token, so no response could "
                        'ever end; set "eos_token" in its tokenizer_config.json')
    source = recipes.resolve(source, cache_dir)  # a name such as "redorca" becomes a file
    columns, parts = parse_columns(columns), find_parts(source, split)
    chat = getattr(tokenizer, "chat_template", None) if template is None else None
    template = None if chat else split_template(template or TEMPLATE)
    files = [file for part in parts for file in (
        [part] if isinstance(part, Path) else [Path(f["filename"]) for f in part.cache_files])]
    fingerprint = content_hash(json.dumps([
        FORMAT, [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns)
                 for file in files], [getattr(part, "_fingerprint", "") for part in parts], split,
        columns, chat, template, _tokenizer_hash(tokenizer), tokenizer.eos_token_id,
        tokenizer.bos_token_id, turns, side, max_length, max_prompt, limit, limit and seed]))
    folder = Path(cache_dir) / fingerprint
    if _open_cache(folder) is None:
        Path(cache_dir).mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".partial-{fingerprint}-", dir=cache_dir))
        try:
            report = _build(
                lambda: ((place, row) for part in parts for place, row in read_part(part, source)),
                partial / "rows.arrow", tokenizer, name=name, columns=columns, template=template,
                turns=turns, side=side, max_length=max_length, max_prompt=max_prompt, limit=limit,
                seed=seed)
            write_atomic(partial / "report.json", json.dumps(report))
            if _open_cache(folder) is None:  # else another process was faster, with the same rows
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(partial, folder)
        except OSError:
            if _open_cache(folder) is None:
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    rows, report = _open_cache(folder)
    return rows, {"source": str(source), "name": name, **report, "fingerprint": fingerprint}


def _open_cache(folder):
    """(rows, report) of a finished cache folder, or None when it is missing or damaged."""
    import datasets

    try:
        report = json.loads((folder / "report.json").read_text())
        rows = datasets.Dataset.from_file(str(folder / "rows.arrow"))
    except Exception:  # damaged or half there in any way: tokenised again
        return None
    return (rows, report) if len(rows) == report["rows_kept"] else None


def _build(read, path, tokenizer, *, name, columns, template, turns, side, max_length, max_prompt,
           limit, seed):
    """Read, render, tokenise and write in batches; nothing is held in memory as a whole."""
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter
    from tqdm import tqdm

    # One pass to count and to find labels, which may start at a late row: for the time left, for
    # the subset, and so that a broken line at the end of a large file is found before the hours of
    # work and not after.
    total, labels, found = 0, {extra: columns.get(extra, extra) for extra in ("bad", "kind")}, set()
    for _, row in tqdm(read(), desc=f"reading {name}", delay=3, leave=False):
        total += 1
        if isinstance(row, dict):
            found.update(extra for extra, column in labels.items() if column in row)
    if not total:
        raise UserError(f"{name}: the source holds no rows")
    extras = sorted(found)  # a row without its own label is a good one of no kind
    schema = {"row_id": Value("int64"), "hash": Value("string"), "prompt_hash": Value("string"),
              "prompt": Value("string"), "response": Value("string"),
              "input_ids": List(Value("int32")), "trained": List(Value("int8")),
              "complete": Value("bool")} | {
                  extra: Value("bool" if extra == "bad" else "string") for extra in extras}
    # A generator of its own: the subset depends on the seed and on nothing that ran before.
    wanted = range(total)
    if limit and limit < total:
        wanted = set(random.Random(seed).sample(wanted, limit))
    report = {"layout": None, "rows_in_source": total, "rows_read": len(wanted), "rows_kept": 0,
              "dropped": defaultdict(list), "truncated": 0, "tokens": 0, "response_tokens": 0}
    protect, encode = make_encoder(tokenizer)
    rows = enumerate(tqdm(read(), total=total, desc=f"tokenising {name}", unit=" rows", delay=3,
                          leave=False))
    records = _render((row for row in rows if row[0] in wanted), report, tokenizer, protect,
                      columns, extras, template, turns, side)
    with ArrowWriter(path=str(path), features=Features(schema)) as writer:
        while batch := list(itertools.islice(records, BATCH)):
            kept = _tokenise(batch, report, tokenizer, encode, not template, max_length, max_prompt)
            if kept:
                writer.write_batch({column: [row[column] for row in kept] for column in schema})
        if report["rows_kept"]:
            writer.finalize()
    if not report["rows_kept"]:
        why = ", ".join(f"{len(ids)} {reason}" for reason, ids in report["dropped"].items())
        refusal = report.get("template_refusal")
        raise UserError(f"{name}: no row is left to train on ({why})"
                        + (f"; the chat template says: {refusal}" if refusal else ""))
    return report


def _render(rows, report, tokenizer, protect, columns, extras, template, turns, side):
    """Source rows -> records with text and segments, those without a question or answer dropped."""
    from jinja2 import TemplateError

    end_markers = (tokenizer.eos_token, ENDOFTEXT)
    for row_id, (place, row) in rows:
        if not isinstance(row, dict):
            raise UserError(f"{place}: a row must be an object, not {type(row).__name__}")
        if columns:
            row = _rename(row, columns, extras, place)
        report["layout"] = report["layout"] or find_layout(row, place)
        source = row_messages(row, report["layout"], side, place)
        messages = clean_messages(source, end_markers)
        prompt = transcript(messages[:-1])
        response = messages[-1]["content"] if messages else ""
        if not messages or not response.strip() or not any(
                message["content"].strip() for message in messages[:-1]):
            reason = ("no_assistant_turn" if not messages else
                      "empty_prompt" if response.strip() else "empty_response")
            report["dropped"][reason].append(row_id)
            continue
        shown = [message | {"content": protect(message["content"])} for message in messages]
        try:
            segments = (plain_segments(shown, template, turns) if template else
                        chat_segments(shown, tokenizer, turns, place))
        except TemplateError as error:  # such as a role that this chat template does not know
            report.setdefault("template_refusal", first_line(error))
            report["dropped"]["template_refused"].append(row_id)
            continue
        *before, last = clean_messages(source, (ENDOFTEXT,))
        record = {"row_id": row_id, "prompt": prompt,
                  "hash": content_hash(transcript(before), last["content"]),
                  "prompt_hash": content_hash(" ".join(prompt.split())), "response": response,
                  "segments": segments}
        if "bad" in extras:
            record["bad"] = _flag(row.get("bad"), place)
        if "kind" in extras:
            record["kind"] = _text(row.get("kind"), f'{place}: "kind"')
        yield record


def _rename(row, columns, extras, place):
    for ours, theirs in columns.items():
        if theirs not in row:
            raise UserError(f'{place}: no column "{theirs}" for --lower-columns or --upper-columns '
                            f"{ours}={theirs}; found {', '.join(map(str, row))}")
    return {extra: row.get(extra) for extra in extras} | {
        ours: row[theirs] for ours, theirs in columns.items()}


def _flag(value, place):
    if value in (None, "", False, 0, "0", "false", "False"):
        return False
    if value in (True, 1, "1", "true", "True"):
        return True
    raise UserError(f'{place}: "bad" must be true or false, not {value!r}')


def _tokenise(batch, report, tokenizer, encode, chat, max_length, max_prompt):
    """Records -> those that keep something to train on, with tokens, cut to `max_length`."""
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    # The same start for every source: a BOS where the tokenizer adds one by itself. A chat
    # template writes its own.
    start = [bos] if not chat and bos is not None and tokenizer("a")["input_ids"][0] == bos else []
    # An unknown last character is often a special token and is not an end.
    ends = set(special_tokens(tokenizer)) - {tokenizer.unk_token_id} | {eos}
    heads = encode([record["segments"][0][0] for record in batch], continued=False)
    rest = iter(encode([text for record in batch for text, _ in record["segments"][1:]],
                       continued=True))
    kept = []
    for record, head in zip(batch, heads, strict=True):
        ids = start + head
        prompt_tokens, trained = len(ids), [0] * len(ids)
        for _, loss in record.pop("segments")[1:]:
            tokens = next(rest)
            if loss and (not tokens or tokens[-1] not in ends):
                tokens = [*tokens, eos]
            ids += tokens
            trained += [loss] * len(tokens)
        complete = len(ids) <= max_length
        ids, trained = ids[:max_length], trained[:max_length]
        if prompt_tokens >= max_prompt:
            report["dropped"]["long_prompt"].append(record["row_id"])
        elif not any(trained[1:]):  # the first token of a row is never a target
            report["dropped"]["no_room"].append(record["row_id"])
        else:
            kept.append(record | {"input_ids": ids, "trained": trained, "complete": complete})
            report["rows_kept"] += 1
            report["truncated"] += not complete
            report["tokens"] += len(ids)
            report["response_tokens"] += sum(trained)
    return kept


# ------------------------------------------------------------------------------ row sets

def row_lengths(rows):
    """Tokens of every row, as an int64 tensor, without turning token lists into Python objects."""
    import pyarrow.compute

    lengths = [torch.zeros(0, dtype=torch.int64)]
    for table in rows.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=10_000):
        counts = pyarrow.compute.list_value_length(table["input_ids"])
        lengths.append(torch.from_numpy(counts.to_numpy().astype("int64")))
    return torch.cat(lengths)


def check_lengths(rows, context_length, name):
    """`UserError` when a row is longer than the model's context."""
    lengths = row_lengths(rows)
    if len(lengths) and (longest := int(lengths.max())) > context_length:
        position = int((lengths > context_length).nonzero()[0])
        raise UserError(
            f"{name}: {int((lengths > context_length).sum())} rows are longer than the model's "
            f"context of {context_length} tokens (longest: {longest}; first: row_id "
            f"{rows[position]['row_id']}); pass --max-length {context_length} or less")


def split_held_out(rows, count, seed):
    """(train, held_out): `count` rows that training never sees, fewer where prompts repeat.

    Rows of one prompt stay together, so no prompt is on both sides.
    """
    groups, hashes = {}, (prompt for part in rows.select_columns(["prompt_hash"]).with_format(
        "arrow").iter(batch_size=10_000) for prompt in part["prompt_hash"].to_pylist())
    for position, prompt in enumerate(hashes):
        groups.setdefault(prompt, []).append(position)
    groups, held = list(groups.values()), []
    for group in (groups[number] for number in permutation(len(groups), seed, 0, 2).tolist()):
        if len(held) + len(group) <= count:
            held += group
    if not held or len(held) == len(rows):
        raise UserError(f"cannot hold out {count} of {len(rows)} rows ({len(groups)} different "
                        "prompts) and still have rows on both sides; choose another number or "
                        "pass a separate held-out source")
    chosen = set(held)
    return (rows.select([p for p in range(len(rows)) if p not in chosen]),
            rows.select(sorted(held)))


def prompt_overlap(a, b):
    """The row_ids of `a` whose prompt, up to whitespace, also occurs in `b`.

    In Arrow's own memory: ten million rows as Python objects would take a gigabyte and minutes.
    """
    import pyarrow
    import pyarrow.compute

    def parts(rows, columns):
        return rows.select_columns(columns).with_format("arrow").iter(batch_size=500_000)

    other = pyarrow.chunked_array([chunk for part in parts(b, ["prompt_hash"])
                                   for chunk in part["prompt_hash"].chunks], pyarrow.string())
    return [row_id for part in parts(a, ["row_id", "prompt_hash"]) for row_id in part.filter(
        pyarrow.compute.is_in(part["prompt_hash"], value_set=other))["row_id"].to_pylist()]


@functools.lru_cache(maxsize=4)
def permutation(num_rows, seed, epoch, stream):
    """The order of an epoch, (num_rows,) int64; `stream` 0 is the lower level, 1 the upper.

    A generator of its own: the order does not depend on what else drew random numbers. Cached,
    every step asks: do not write into it.
    """
    generator = torch.Generator().manual_seed(
        int(content_hash(str(seed), str(epoch), str(stream)), 16) >> 1)
    return torch.randperm(num_rows, generator=generator)


# ------------------------------------------------------------------------------ batches

def tokens_only(rows):
    """The columns that `pack` reads: what is not selected is not copied out of the Arrow file."""
    if isinstance(rows, list):
        return rows
    return rows.select_columns([name for name in rows.column_names if name in TOKEN_COLUMNS])


def load_pairs(source, tokenizer, **options):
    """Preference pairs: `load_rows` of the chosen side, with the rejected side's token columns.

    A pair needs both sides; one whose sides are equal says nothing and is dropped. The report
    gains "unpaired" and "equal", lists of row_ids.
    """
    import datasets

    chosen, report = load_rows(source, tokenizer, side="chosen", **options)
    rejected, _ = load_rows(source, tokenizer, side="rejected", **options)
    if report["layout"] not in ("prompt/chosen/rejected", "chosen/rejected dialogues"):
        raise UserError(f"{source}: preference pairs need chosen and rejected columns; this is "
                        f"the {report['layout']} layout")
    position = {row_id: p for p, row_id in enumerate(rejected["row_id"][:])}
    ids, other = chosen["row_id"][:], dict(_texts(rejected))
    equal = [row_id for row_id, text in _texts(chosen) if other.get(row_id) == text]
    unpaired = [i for i in ids if i not in position]
    dropped = {*equal, *unpaired}
    keep = [p for p, row_id in enumerate(ids) if row_id not in dropped]
    if not keep:
        raise UserError(f"{source}: no pair with two different responses is left")
    rejected = rejected.select([position[ids[p]] for p in keep]).select_columns(
        ["input_ids", "trained"]).rename_columns(
        {"input_ids": "rejected_input_ids", "trained": "rejected_trained"})
    pairs = datasets.concatenate_datasets([chosen.select(keep), rejected], axis=1)
    return pairs, report | {"dropped": report["dropped"] | {"equal": equal, "unpaired": unpaired}}


def _texts(rows):
    """(row_id, hash of its text as trained on) of every row."""
    for part in rows.select_columns(["row_id", "prompt", "response"]).iter(batch_size=10_000):
        for row_id, prompt, response in zip(
                part["row_id"], part["prompt"], part["response"], strict=True):
            yield row_id, content_hash(prompt, response)


def sequences(rows):
    """The token sequences of rows: a pair gives its chosen and then its rejected one."""
    return [side for row in rows for side in (
        [row] if "rejected_input_ids" not in row else
        [row, {"input_ids": row["rejected_input_ids"], "trained": row["rejected_trained"]}])]


def take(rows, indices):
    """The rows at `indices` (a tensor or list) as a list of dictionaries, in one read."""
    columns = rows[[int(i) for i in indices]]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def pack(rows, device="cpu"):
    """Rows -> one sequence without padding, T tokens in all, for `logprobs.sequence_logprobs`.

    input_ids, position_ids (1, T): positions restart at every row, which is what isolates rows.
    cu_seqlens (B + 1,) int32: where each row starts, and T.
    targets (T,): the next token of the same row; 0 at a row's last position.
    response_mask (T,): True where the target carries loss.
    """
    ids, positions, targets, mask, starts = [], [], [], [], [0]
    for row in rows:
        ids += row["input_ids"]
        positions += range(len(row["input_ids"]))
        targets += [*row["input_ids"][1:], 0]
        mask += [*row["trained"][1:], 0]
        starts.append(len(ids))
    return {
        "input_ids": torch.tensor([ids], dtype=torch.int64, device=device),
        "position_ids": torch.tensor([positions], dtype=torch.int64, device=device),
        "cu_seqlens": torch.tensor(starts, dtype=torch.int32, device=device),
        "targets": torch.tensor(targets, dtype=torch.int64, device=device),
        "response_mask": torch.tensor(mask, dtype=torch.bool, device=device),
    }


def show_example(row, tokenizer):
    """The text of a row as the model sees it, the trained tokens between ⟦ and ⟧."""
    text, start = "", 0
    ids, trained = row["input_ids"], row["trained"]
    for end in range(1, len(ids) + 1):
        if end == len(ids) or trained[end] != trained[start]:
            run = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)
            text += f"⟦{run}⟧" if trained[start] else run
            start = end
    return text
