"""Tokenised, memory-mapped rows.

    source (file, folder, hub name) -> layout -> messages -> template -> segments -> tokens -> Arrow

Every row keeps `row_id`, its index in the source, through every filter: a selection made by row_id
hits the right rows whatever was dropped before. Choices the paper leaves open, made here:

1. Prompt and response are tokenised apart (`templates.py`). Generation could not reproduce the
   border of a prompt and a response that were tokenised together.
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
6. A chat template never changes an answer: what is trained is what the row says, between what the
   template writes around any answer (`templates.py`); where that fails, the row is set aside.
"""

import itertools
import json
import random
import re
import unicodedata
from collections import defaultdict
from operator import itemgetter
from os.path import commonprefix
from pathlib import Path
from types import SimpleNamespace

from data import layouts
from data.sources import find_parts, read_part, source_stamp
from data.templates import (
    TEMPLATE,
    Encoder,
    around_answer,
    markers,
    read_template,
    segments_of,
    special_strings,
    split_template,
)
from utils import UserError, content_hash, write_atomic

FORMAT = 12  # of the cached rows; raise it when their content changes for the same input
BATCH = 1000  # rows tokenised at a time: enough to keep the tokenizer's threads busy
ENDOFTEXT = (
    "<|endoftext|>"  # stands as text in data sets made from documents of any tokenizer
)
LABELS = (
    "bad",
    "kind",
)  # columns that a source may have: what is known to be wrong with a row
TOKEN_COLUMNS = ("input_ids", "trained", "rejected_input_ids", "rejected_trained")
EXTRAS = (*LABELS, "messages")  # columns that are shown when some row has them
TYPES = {
    "row_id": "int64",
    "hash": "string",
    "prompt_hash": "string",
    "prompt": "string",
    "response": "string",
    "complete": "bool",
    "bad": "bool",
    "kind": "string",
    "messages": "string",
}


def load_rows(
    source,
    tokenizer,
    *,
    name=None,
    columns=None,
    template=None,
    turns="last",
    side="chosen",
    max_length=2048,
    limit=None,
    seed=0,
    cache_dir=".cache",
):
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
    `layouts.conversation`; null for a row of one question and one answer). The cache is that of
    `datasets`; its key holds the content of the source's files and every setting.
    """
    import datasets

    name = name or str(source)
    if limit is not None and limit < 1:
        raise UserError(f"{name}: limit {limit}: it must be 1 or more")
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{name}: the tokenizer has no end-of-sequence token, so no response could ever end; "
            'set "eos_token" in its tokenizer_config.json'
        )
    if template is None and not tokenizer.chat_template:
        template = TEMPLATE
    settings = SimpleNamespace(  # a part of the cache's key
        columns=layouts.parse_columns(columns),
        template=template and split_template(template),
        turns=turns,
        side=side,
        max_length=max_length,
        limit=limit,
        seed=seed if limit else None,
    )
    files = find_parts(source)
    stamp = source_stamp(files)
    key = [FORMAT, stamp, vars(settings), _tokenizer_state(tokenizer)]
    fingerprint = content_hash(json.dumps(key))
    report_file = Path(cache_dir) / f"rows-{fingerprint}.json"

    def tokenised():
        source_rows = itertools.chain.from_iterable(
            read_part(part, source) for part in files
        )
        reader = Reader(tokenizer, settings, name)
        yield from reader.read(source_rows)
        if source_stamp(files) != stamp:
            raise UserError(f"{source}: has changed while it was read; start again")
        # The rows appear in the cache after this generator has ended: no rows without a report.
        write_atomic(report_file, json.dumps(reader.report))

    types = {name: datasets.Value(kind) for name, kind in TYPES.items()}
    types["input_ids"] = datasets.List(datasets.Value("int32"))
    types["trained"] = datasets.List(datasets.Value("int8"))
    datasets.disable_progress_bars()  # the reader has a bar of its own
    try:
        rows = datasets.Dataset.from_generator(
            tokenised,
            features=datasets.Features(types),
            cache_dir=str(cache_dir),
            fingerprint=fingerprint,
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ from None
    report = json.loads(report_file.read_text())
    missing = [column for column in EXTRAS if column not in report["extras"]]
    return rows.remove_columns(missing), report


def _tokenizer_state(tokenizer):
    """What the tokens of a text depend on, as JSON values."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = sorted(tokenizer.get_vocab().items())
    if backend is not None:
        state = json.loads(backend.to_str())
        state["truncation"] = state["padding"] = (
            None  # left behind by whoever called it last
        )
    return [
        state,
        tokenizer.chat_template,
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
    ]


class Reader:
    """One pass over a source: reads, renders and tokenises rows, and counts what is dropped."""

    def __init__(self, tokenizer, settings, name):
        self.tokenizer = tokenizer
        self.settings = settings
        self.name = name
        self.encoder = Encoder(tokenizer)
        self.markers = markers(tokenizer)
        self.given = set()  # names of columns, and keys of messages that are not read
        self.extras = set()
        self.dropped = defaultdict(list)
        counts = (
            "rows_in_source",
            "rows_kept",
            "truncated",
            "bad",
            "unlabelled",
            "control_text",
        )
        self.report = dict.fromkeys(counts, 0) | {
            "dropped": self.dropped,
            "layout": None,
        }

    def read(self, rows):
        """(place, row) of the source -> tokenised rows, in batches: memory is flat without a limit.

        The report is complete when the last row has been taken. Raises `UserError` without any row.
        """
        from tqdm import tqdm

        report = self.report
        bar = tqdm(rows, desc=f"reading {self.name}", unit=" rows", delay=3, leave=False)
        records = filter(None, itertools.starmap(self._render, self.sample(bar)))
        while batch := list(itertools.islice(records, BATCH)):
            for row in self._tokenise(batch):
                if row["messages"]:
                    self.extras.add("messages")
                report["rows_kept"] += 1
                report["truncated"] += not row["complete"]
                report["bad"] += row["bad"]
                yield row
        if not report["rows_in_source"]:
            raise UserError(f"{self.name}: the source holds no rows")
        if not report["rows_kept"]:
            counts = {reason: len(ids) for reason, ids in self.dropped.items()}
            raise UserError(f"{self.name}: no row is left to train on, dropped {counts}")
        report["extras"] = sorted(self.extras)
        columns = self.settings.columns
        report["unread"] = layouts.unread_columns(self.given, report["layout"], columns)
        if "bad" not in self.extras:
            report["unlabelled"] = 0

    def sample(self, rows):
        """(row_id, place, row) of all rows, or of `limit` at random (reservoir sampling), in order.

        The subset depends on the seed and on nothing that ran before.
        """
        limit = self.settings.limit
        generator = random.Random(self.settings.seed)
        kept = []
        for row_id, (place, row) in enumerate(rows):
            self.report["rows_in_source"] += 1
            if not limit:
                yield row_id, place, row
            elif len(kept) < limit:
                kept.append((row_id, place, row))
            else:
                slot = generator.randrange(row_id + 1)
                if slot < limit:
                    kept[slot] = row_id, place, row
        yield from sorted(kept, key=itemgetter(0))

    def _render(self, row_id, place, given):
        """A row -> its texts, labels and segments; None for a row that is dropped."""
        if not isinstance(given, dict):
            raise UserError(f"{place}: a row must be an object, not {type(given).__name__}")
        if {"row_id", "hash", "rank", "recommended"} <= given.keys():
            raise UserError(
                f"{place}: a line of a run's curated.jsonl, rejected answers included; train on "
                "what `python eval.py export` makes of that run"
            )
        settings = self.settings
        for label in LABELS:
            if settings.columns.get(label, label) in given:
                self.extras.add(label)
        row = renamed(given, settings.columns, place)
        layout = self.report["layout"] or layouts.find_layout(row, place, given)
        self.report["layout"] = layout
        self.given.update(given, layouts.unread_keys(row, layout))
        self.report["unlabelled"] += row.get("bad") in (None, "")
        source = layouts.row_messages(row, layout, settings.side, place)
        messages = layouts.clean_messages(source, (self.tokenizer.eos_token, ENDOFTEXT))
        reason = layouts.why_unusable(messages, given)
        if reason:
            self.dropped[reason].append(row_id)
            return None
        protect = self.encoder.protect
        shown = [turn | {"content": protect(turn["content"])} for turn in messages]
        try:
            segments = segments_of(shown, self.tokenizer, settings.template, settings.turns)
        except layouts.Unusable as reason:
            self.dropped[str(reason)].append(row_id)
            return None
        prompt = layouts.transcript(messages[:-1])
        self.report["control_text"] += bool(self.markers.search(prompt))
        normal = " ".join(unicodedata.normalize("NFC", prompt).split())
        *before, last = layouts.clean_messages(source, (ENDOFTEXT,))
        return {
            "row_id": row_id,
            "prompt": prompt,
            "response": messages[-1]["content"],
            "hash": content_hash(layouts.transcript(before), last["content"]),
            "prompt_hash": content_hash(normal),
            "segments": segments,
            "bad": _flag(
                row.get("bad"), place
            ),  # a row without a label is a good one of no kind
            "kind": layouts.text_of(row.get("kind"), f'{place}: the label "kind"'),
            "messages": json.dumps(messages, ensure_ascii=False)
            if len(messages) > 2
            else None,
        }

    def _tokenise(self, records):
        """Records -> those that keep something to train on, with tokens, cut to `max_length`."""
        max_length = self.settings.max_length
        template = self.settings.template
        ends = _end_ids(self.tokenizer, template)
        # Every source starts alike: with a BOS if the tokenizer adds one, or the template's own.
        start = self.tokenizer("a")["input_ids"][:1]
        if not template or start != [self.tokenizer.bos_token_id]:
            start = []
        heads = [record["segments"][0][0] for record in records]
        texts = [text for record in records for text, _ in record["segments"][1:]]
        heads = self.encoder.encode(heads, continued=False)
        continuations = iter(self.encoder.encode(texts, continued=True))
        for record, head in zip(records, heads, strict=True):
            ids = start + head
            prompt_tokens = len(ids)
            trained = [0] * prompt_tokens
            segments = record.pop("segments")
            for number, (_, loss) in enumerate(segments[1:], 2):
                tokens = next(continuations)
                # A chat template ends the turns between as it likes.
                is_end = loss and (template or number == len(segments))
                if is_end and (not tokens or tokens[-1] not in ends):
                    tokens = [*tokens, self.tokenizer.eos_token_id]
                ids += tokens
                trained += [loss] * len(tokens)
            record["complete"] = len(ids) <= max_length
            record["input_ids"] = ids[:max_length]
            record["trained"] = trained[:max_length]
            if prompt_tokens >= max_length:
                self.dropped["long_prompt"].append(record["row_id"])
            elif not any(record["trained"][1:]):  # a row's first token is never a target
                self.dropped["no_room"].append(record["row_id"])
            else:
                yield record


def renamed(row, columns, place):
    """A source's row with our names for its columns; columns: of `parse_columns`."""
    if not columns:
        return row
    names = {}
    for ours, theirs in columns.items():
        if theirs not in row:
            raise UserError(
                f'{place}: no column "{theirs}" for --lower-columns or --upper-columns '
                f"{ours}={theirs}; found {', '.join(map(str, row))}"
            )
        names[ours] = row[theirs]
    if columns.keys() <= {*LABELS}:  # the layout stays that of the source
        return row | names
    kept = {name: row.get(name) for name in LABELS}
    for name in ("system", "input"):
        if name in row and name not in columns.values():
            kept[name] = row[name]
    return kept | names


def _flag(value, place):
    """The label "bad" as a bool; spreadsheets write TRUE."""
    known = value.lower() if isinstance(value, str) else value
    if known in (None, "", False, 0, "0", "false"):
        return False
    if known in (True, 1, "1", "true"):
        return True
    raise UserError(f'{place}: the label "bad" must be true or false, not {value!r}')


# --- of tokens and rows ---------------------------------------------------------------------------


def end_ids(tokenizer, template=None):
    """Token ids that end an answer: EOS, and the control tokens that a template writes behind it.

    template: as `load_rows` takes it.
    """
    return _end_ids(tokenizer, read_template(tokenizer, template))


def _end_ids(tokenizer, split):
    _, end = around_answer(tokenizer, split)
    written = re.findall(special_strings(tokenizer), end)
    return {tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(written)}


def show_example(row, tokenizer):
    """The text of a row as the model sees it, for a terminal.

    Trained tokens stand between ⟦ and ⟧. What looks like a control token and is ordinary text
    stands behind a backslash.
    """
    encoder = Encoder(tokenizer)
    pattern = markers(tokenizer)
    shown = ""
    tokens = zip(row["trained"], row["input_ids"], strict=True)
    for trained, group in itertools.groupby(tokens, key=itemgetter(0)):
        run = ""
        for text, control in encoder.runs([token for _, token in group]):
            run += text if control else pattern.sub(r"\\\g<0>", text)
        shown += f"⟦{run}⟧" if trained else run
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in shown)


def empty_prompt(prompts):
    """What all prompts begin and end with: the template around an empty question."""
    head = commonprefix(prompts)  # noqa: RUF071, these are no paths
    backwards = [prompt[len(head) :][::-1] for prompt in prompts]
    tail = commonprefix(backwards)[::-1]  # noqa: RUF071
    return (head + tail) or prompts[0][:1]


def response_text(tokenizer, ids, template=None):
    """The text of a generated answer, without what a template writes around every answer.

    template: as `load_rows` takes it. What stands in front of an answer, such as an empty think
    block or a channel's header, is cut at the very beginning, and what stands behind it at the very
    end: an answer may hold the same text.
    """
    encoder = Encoder(tokenizer)
    return encoder.bare(encoder.answer(ids, read_template(tokenizer, template))).strip()


def reads_back(tokenizer, ids, template=None):
    """Whether a generated answer is one text that trains as itself: its row would read the same.

    False for an empty answer, for one with control tokens inside, such as a second channel, and for
    one that begins or ends twice. ids, template: see `response_text`.
    """
    encoder = Encoder(tokenizer)
    split = read_template(tokenizer, template)
    text = encoder.answer(ids, split)
    if not text or encoder.strings.search(text):
        return False
    messages = layouts.conversation({"prompt": ".", "response": text})
    rendered = segments_of(messages, tokenizer, split)[-1][0]
    again = encoder.encode([rendered], continued=True)[0]
    return encoder.answer(again, split) == text
