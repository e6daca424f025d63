"""Tokenised, memory-mapped rows.

    source (file, folder, hub name) -> layout -> messages -> template -> segments -> tokens -> Arrow

Every row keeps `row_id`, its index in the source, through every filter: a selection made by row_id
hits the right rows whatever was dropped before. Choices the paper leaves open, made here:

1. Prompt and response are tokenised apart. Tokenised together, a merge across the border would
   take the first response token out of the loss, and generation could not reproduce the split.
2. EOS follows complete responses only and is trained on, by position and never by token id, so a
   tokenizer whose pad is its EOS trains the same. A truncated response gets none: it is not an end.
3. A prompt of `max_length` tokens or more is dropped (appendix D: 2,048), template included; when
   every turn is trained, that is the first question.
4. OpenOrca's system prompt is dropped, as the authors do. A system message in a chat is kept: the
   chat template places it; the plain template puts it in front of the first user turn.
5. Special-token strings inside user text become ordinary text; only the template writes control
   tokens. An end marker at the very end of a response, as in FLAN, is cut: it is the EOS. Which
   strings are one depends on the tokenizer; `hash` does not, so a ranking made with one tokenizer
   names the rows of another: it is taken with no marker but <|endoftext|> cut.
"""

import itertools
import json
import random
import re
import unicodedata
from collections import defaultdict
from operator import itemgetter
from pathlib import Path

from data import layouts
from data.cache import file_hash, open_or_make
from data.sources import find_parts, read_part
from utils import UserError, content_hash, first_line

TEMPLATE = "User: {prompt}\nAssistant: {response}"
FORMAT = 10  # of the cached rows; raise it when their content changes for the same input
BATCH = 1000  # rows tokenised at a time: enough to keep the tokenizer's threads busy
ENDOFTEXT = "<|endoftext|>"  # found as text in data sets made from documents of any tokenizer
LABELS = ("bad", "kind")  # columns that a source may have: what is known to be wrong with a row
# Stands in for special-token string number {}. Text never holds half a surrogate pair: `text_of`.
MARK = "\ud800{}\udfff"
CHAT_DATE = "26 Jul 2024"  # some chat templates print today's date: rows would differ by the day


# --- templates ------------------------------------------------------------------------------------

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
        if last or (turns == "all" and message.get("weight", message["content"].strip())):
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
                last or (turns == "all" and message.get("weight", message["content"].strip()))):
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


# --- tokens ---------------------------------------------------------------------------------------

def special_tokens(tokenizer):
    """{id: text} of the control tokens."""
    return {number: token.content for number, token in tokenizer.added_tokens_decoder.items()
            if token.special}


def end_ids(tokenizer):
    """Token ids that end a turn. An unknown last character is often a special token, and no end."""
    return set(special_tokens(tokenizer)) - {tokenizer.unk_token_id} | {tokenizer.eos_token_id}


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
        try:
            return tokenizer(texts, add_special_tokens=False, split_special_tokens=literal,
                             return_attention_mask=False, return_token_type_ids=False,
                             verbose=False)["input_ids"] if texts else []
        except Exception as error:  # the tokenizer's own classes, or plain Exception
            raise UserError("the tokenizer cannot encode some text, such as a character that it "
                            f"has no token for ({first_line(error)})") from None

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


# --- rows -----------------------------------------------------------------------------------------

def load_rows(source, tokenizer, *, name=None, columns=None, template=None,
              turns="last", side="chosen", max_length=2048, limit=None, seed=0, cache_dir=".cache"):
    """Tokenised rows of a source, memory-mapped from a cache, and a report of what was dropped.

    source      file (.jsonl, .json, .parquet, .csv), folder[@split], or hub name
                owner/name[:config][@split]
    name        what messages call it, such as "lower"
    columns     our column names -> the source's, when the layout is not a known one
    template    plain template; None: the tokenizer's chat template, else TEMPLATE
    turns       "last": loss on the last assistant turn; "all": on every one
    side        "chosen" or "rejected": the response of preference pairs (join them on row_id)
    max_length  tokens of prompt plus response: longer responses are cut and get no EOS, prompts of
                so many tokens or more are dropped
    limit       a seeded random subset of so many rows of the source, held in memory meanwhile

    Columns: row_id, hash, prompt_hash, prompt, response, input_ids, trained (1: carries loss),
    complete (not cut), and where the source has them: bad, kind, and messages (JSON text, see
    `layouts.conversation`; null for a row of one question and one answer).
    """
    name = name or str(source)
    if not str(source).strip():
        raise UserError(f"{name}: the name of the source is empty, as a shell variable that is not "
                        "set leaves it; give a file, a folder or a hub name")
    for value, flag in ((max_length, "max_length"), (limit, "limit")):
        if value is not None and value < 1:
            raise UserError(f"{name}: {flag} {value}: it must be 1 or more")
    if turns not in ("last", "all") or side not in ("chosen", "rejected"):
        raise UserError(f"{name}: turns is last or all, side is chosen or rejected; "
                        f"got {turns!r} and {side!r}")
    if tokenizer.eos_token_id is None:
        raise UserError(f"{name}: the tokenizer has no end-of-sequence token, so no response could "
                        'ever end; set "eos_token" in its tokenizer_config.json')
    columns, parts = layouts.parse_columns(columns), find_parts(source)
    chat = getattr(tokenizer, "chat_template", None) if template is None else None
    template = None if chat else split_template(TEMPLATE if template is None else template)
    stamp = _source_stamp(parts)
    fingerprint = content_hash(json.dumps([
        FORMAT, stamp, [getattr(part, "_fingerprint", "") for part in parts], columns, chat,
        template, _tokenizer_hash(tokenizer), tokenizer.eos_token_id, tokenizer.bos_token_id,
        turns, side, max_length, limit, limit and seed]))

    def build(path):
        report = _build((row for part in parts for row in read_part(part, source)), path, tokenizer,
                        name=name, columns=columns, template=template, turns=turns, side=side,
                        max_length=max_length, limit=limit, seed=seed)
        if _source_stamp(parts) != stamp:
            raise UserError(f"{source}: has changed while it was read; start again")
        return report

    rows, report = open_or_make(Path(cache_dir) / fingerprint, build)
    return rows, {"source": str(source), "name": name, **report, "fingerprint": fingerprint}


def _source_stamp(parts):
    """(ending, content hash) of every file that the rows come from. No times: two runs that start
    together both write the toy's rows."""
    files = [file for part in parts for file in (
        [part] if isinstance(part, Path) else [Path(f["filename"]) for f in part.cache_files])]
    return [(file.suffix, file_hash(file)) for file in files]


def _build(rows, path, tokenizer, *, name, columns, template, turns, side, max_length, limit, seed):
    """Read, render, tokenise and write in batches: one pass; memory is flat without `limit`."""
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter
    from tqdm import tqdm

    schema = {"row_id": Value("int64"), "hash": Value("string"), "prompt_hash": Value("string"),
              "prompt": Value("string"), "response": Value("string"), "complete": Value("bool"),
              "input_ids": List(Value("int32")), "trained": List(Value("int8"))}
    extras = {"bad": Value("bool"), "kind": Value("string"), "messages": Value("string")}
    report = {"layout": None, "rows_in_source": 0, "rows_kept": 0, "truncated": 0, "tokens": 0,
              "dropped": defaultdict(list), "unread": set(), "unlabelled": 0, "bad": 0}
    protect, encode = make_encoder(tokenizer)
    present = set()  # extra columns that some row has; the others are not shown
    bar = tqdm(rows, desc=f"reading {name}", unit=" rows", delay=3, leave=False)
    records = _render(_sample(bar, limit, seed, report), report, present, tokenizer, protect,
                      columns, template, turns, side)
    with ArrowWriter(path=str(path), features=Features(schema | extras)) as writer:
        while batch := list(itertools.islice(records, BATCH)):
            kept = _tokenise(batch, report, tokenizer, encode, not template, max_length)
            if kept:
                writer.write_batch({column: [row[column] for row in kept]
                                    for column in schema | extras})
            if any(row["messages"] for row in kept):
                present.add("messages")
        if report["rows_kept"]:
            writer.finalize()
    report["unlabelled"] *= "bad" in present
    report["columns"] = [*schema, *(extra for extra in extras if extra in present)]
    if not report["rows_in_source"]:
        raise UserError(f"{name}: the source holds no rows")
    report["unread"] = layouts.unread(report["unread"], report["layout"], columns)
    if not report["rows_kept"]:
        why = ", ".join(f"{len(ids)} {reason}" for reason, ids in report["dropped"].items())
        refusal = report.get("template_refusal")
        raise UserError(f"{name}: no row is left to train on ({why})"
                        + (f"; the chat template says: {refusal}" if refusal else ""))
    return report


def _sample(rows, limit, seed, report):
    """(row_id, place, row) of all rows, or of `limit` at random (reservoir sampling), in order. The
    subset depends on the seed and on nothing that ran before. Counts the rows of the source."""
    generator, kept = random.Random(seed), []
    for row_id, (place, row) in enumerate(rows):
        report["rows_in_source"] += 1
        if not limit:
            yield row_id, place, row
        elif len(kept) < limit:
            kept.append((row_id, place, row))
        elif (slot := generator.randrange(row_id + 1)) < limit:
            kept[slot] = row_id, place, row
    yield from sorted(kept, key=itemgetter(0))


def _render(rows, report, present, tokenizer, protect, columns, template, turns, side):
    """Source rows -> records with text and segments, those without a question or answer dropped."""
    end_markers = (tokenizer.eos_token, ENDOFTEXT)
    for row_id, place, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{place}: a row must be an object, not {type(row).__name__}")
        present.update(label for label in LABELS if columns.get(label, label) in row)
        if {"row_id", "hash", "rank", "recommended"} <= row.keys():
            raise UserError(f"{place}: a line of a run's curated.jsonl, rejected answers included; "
                            "train on what `python eval.py export` makes of that run, or on the "
                            "original rows with --keep")
        given, row = row, renamed(row, columns, place) if columns else row
        if report["layout"] is None:
            report["layout"] = layouts.find_layout(row, place, given)
        report["unread"].update(given, layouts.unread_keys(row, report["layout"]))
        report["unlabelled"] += row.get("bad") in (None, "")
        source = layouts.row_messages(row, report["layout"], side, place)
        messages = layouts.clean_messages(source, end_markers)
        if reason := layouts.why_unusable(messages, given):
            report["dropped"][reason].append(row_id)
            continue
        prompt = layouts.transcript(messages[:-1])
        shown = [message | {"content": protect(message["content"])} for message in messages]
        try:
            segments = (plain_segments(shown, template, turns) if template else
                        chat_segments(shown, tokenizer, turns, place))
        except UserError:
            raise
        except Exception as error:  # a template is a program; it may not know a role, or be broken
            report.setdefault("template_refusal", f"{type(error).__name__}: {first_line(error)}")
            report["dropped"]["template_refused"].append(row_id)
            continue
        *before, last = layouts.clean_messages(source, (ENDOFTEXT,))
        # A row without its own label is a good one of no kind.
        yield {"row_id": row_id, "prompt": prompt, "response": messages[-1]["content"],
               "hash": content_hash(layouts.transcript(before), last["content"]),
               "prompt_hash": content_hash(" ".join(unicodedata.normalize("NFC", prompt).split())),
               "segments": segments, "bad": _flag(row.get("bad"), place),
               "kind": layouts.text_of(row.get("kind"), f'{place}: the label "kind"'),
               "messages": json.dumps(messages, ensure_ascii=False) if len(messages) > 2 else None}


def renamed(row, columns, place):
    """A source's row with our names for its columns; columns: of `parse_columns`, not empty."""
    for ours, theirs in columns.items():
        if theirs not in row:
            raise UserError(f'{place}: no column "{theirs}" for --lower-columns or --upper-columns '
                            f"{ours}={theirs}; found {', '.join(map(str, row))}")
    if not columns.keys() - {*LABELS}:
        return row | {ours: row[theirs] for ours, theirs in columns.items()}
    kept = {"system", "input"} & (row.keys() - {*columns.values()})
    return {name: row.get(name) for name in (*LABELS, *kept)} | {
        ours: row[theirs] for ours, theirs in columns.items()}


def _flag(value, place):
    known = value.lower() if isinstance(value, str) else value  # spreadsheets write TRUE
    if known in (None, "", False, 0, "0", "false"):
        return False
    if known in (True, 1, "1", "true"):
        return True
    raise UserError(f'{place}: the label "bad" must be true or false, not {value!r}')


def _tokenise(batch, report, tokenizer, encode, chat, max_length):
    """Records -> those that keep something to train on, with tokens, cut to `max_length`."""
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    # Every source starts alike: with a BOS if the tokenizer adds one; a chat template has its own.
    first = tokenizer("a")["input_ids"][:1]
    start = first if not chat and bos is not None and first == [bos] else []
    ends = end_ids(tokenizer)
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
        if prompt_tokens >= max_length:
            report["dropped"]["long_prompt"].append(record["row_id"])
        elif not any(trained[1:]):  # the first token of a row is never a target
            report["dropped"]["no_room"].append(record["row_id"])
        else:
            kept.append(record | {"input_ids": ids, "trained": trained, "complete": complete})
            report["rows_kept"] += 1
            report["truncated"] += not complete
            report["bad"] += record["bad"]
            report["tokens"] += len(ids)
    return kept


def show_example(row, tokenizer):
    """The text of a row as the model sees it, for a terminal; trained tokens between ⟦ and ⟧."""
    text, tokens = "", zip(row["trained"], row["input_ids"], strict=True)
    for trained, part in itertools.groupby(tokens, key=itemgetter(0)):
        run = tokenizer.decode([token for _, token in part], clean_up_tokenization_spaces=False)
        text += f"⟦{run}⟧" if trained else run
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def empty_prompt(prompts):
    """What all prompts begin and end with: the template around an empty question."""
    first, shortest = prompts[0], min(len(p) for p in prompts)
    head = next((i for i in range(shortest) if any(p[i] != first[i] for p in prompts)), shortest)
    tail = next((i for i in range(shortest - head) if any(p[-1 - i] != first[-1 - i]
                                                          for p in prompts)), shortest - head)
    return (first[:head] + first[len(first) - tail:]) or first[:1]


def response_text(tokenizer, ids, template=None):
    """The text of a generated answer, without what a plain template writes behind every response.

    template: as `load_rows` takes it. Cut at the very end only: an answer may hold the same text.
    """
    text = tokenizer.decode(ids, skip_special_tokens=True).strip()
    if template is None:  # a chat template, or TEMPLATE, ends with the response
        return text
    end = split_template(template)[2]
    for special in special_tokens(tokenizer).values():
        end = end.replace(special, "")
    return text.removesuffix(end.strip()).strip()
