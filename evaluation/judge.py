"""Judges of pairs of answers: any OpenAI-compatible endpoint, or a local model. See winrate.py.

A verdict is one number in [1, 2]: 1 the first answer is better, 2 the second is, 1.5 a tie. Every
pair is judged in both orders, because judges favour a position; verdicts are kept on disk.
"""

import http.client
import json
import os
import queue
import random
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

import models
import utils
from evaluation.runs import read_text
from runtime import processes
from utils import UserError

# Plain letters, both named once, the order of the question: nothing for a judge to lean on.
QUESTION = """You compare two answers to an instruction. Judge which one a careful person would \
prefer: correct, helpful, harmless, to the point. Length alone is no merit.

[Instruction]
{instruction}

[Answer A]
{first}

[Answer B]
{second}

Which answer is better? Reply with one word: A, B or tie."""

# Words that may stand beside a verdict; with any other word the reply is not one.
FILLER = {"the", "answer", "option", "response", "verdict", "better", "best", "is", "it's", "it",
          "i", "would", "say", "choose", "pick", "prefer", "my", "wins"}

BROKEN = (OSError, http.client.HTTPException)  # timeouts and refused connections are OSError
REDIRECTS = (301, 302, 303, 307, 308)
MAX_REDIRECTS = 5
MAX_REPLY = 2**20    # bytes; a verdict has a few hundred
MAX_PAUSE = 300.0    # seconds of one Retry-After that are obeyed
MAX_WAITING = 600.0  # seconds between the tries of one question, added up


class TryAgain(Exception):
    """No verdict this time; `after`: seconds that the server asks to wait, or None."""

    def __init__(self, problem, after=None):
        super().__init__(problem)
        self.after = after


class Endpoint:
    """A judge behind an OpenAI-compatible /chat/completions address; the standard library only.

    timeout: seconds for one whole reply, from the look-up of the host to the last byte. Setting
    `stopped` ends the waits between tries. The key goes to no other origin (scheme, host, port)
    than the url's, and stands in no text that is returned or raised here.
    """

    def __init__(self, url, name, key, timeout=60.0, retries=5, wait=1.0):
        self.url, self.name, self.key = check_url(url) + "/chat/completions", name, key.strip()
        self.timeout, self.retries, self.wait = timeout, retries, wait
        self.stopped = threading.Event()
        if not re.fullmatch("[!-~]+", self.key):
            raise UserError("the judge's key is empty, or a space or a character that is not ASCII "
                            "stands in it; correct it")
        # As a server may escape it: \" or \u002b or %2B.
        self.key_pattern = re.compile(r"\\*".join(
            f"(?:{re.escape(letter)}|%{ord(letter):02x}|u{ord(letter):04x})"
            for letter in self.key), re.IGNORECASE)
        if not 0 < timeout <= 86400:
            raise UserError(f"--timeout {timeout}: must lie in (0, 86400] seconds")
        if not 0 <= wait <= MAX_WAITING:
            raise UserError(f"--wait {wait}: must lie in [0, {MAX_WAITING:g}] seconds")

    def __call__(self, question):
        """(preference for the second answer in [1, 2], the raw reply); None when there is none.

        429, 5xx, timeouts, broken connections and unreadable replies are tried again, waiting
        twice as long each time (or as long as Retry-After says). A refused key ends everything.
        """
        body = json.dumps({"model": self.name, "temperature": 0, "max_tokens": 16,
                           "messages": [{"role": "user", "content": question}]}).encode()
        waited = 0.0
        for attempt in range(self.retries + 1):
            try:
                return self.ask_once(body)
            except TryAgain as trouble:
                problem, pause = str(trouble), trouble.after
            if pause is None:
                pause = self.wait * 2.0**min(attempt, 20)
                pause *= 1 + random.random() / 4  # not all threads at one time
            waited += pause
            if attempt == self.retries or waited > MAX_WAITING or self.stopped.wait(pause):
                break
        return None, problem

    def ask_once(self, body):
        """One try: what `__call__` returns, or `TryAgain`."""
        reply = self.post(body)
        if not 200 <= reply.status < 300:
            problem = f"HTTP {reply.status} {self.shown(reply.body)}"
            if reply.status in (401, 403, 404):
                raise UserError(f"{self.url}: the judge refuses every question ({problem}); "
                                "check the key, the address and the judge's name")
            if reply.status != 429 and reply.status < 500:
                return None, problem  # this question is refused; asking again would not help
            after = reply.headers.get("Retry-After", "")
            raise TryAgain(problem, min(float(after), MAX_PAUSE)
                           if re.fullmatch(r"\d+(\.\d+)?", after) else None)
        if len(reply.body) > MAX_REPLY:
            return None, f"a reply of more than {MAX_REPLY:,} bytes, read no further"
        try:
            text = json.loads(reply.body)["choices"][0]["message"]["content"] or ""
        except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise TryAgain(self.shown(f"{type(error).__name__}: {error}")) from None
        preference = parse_verdict(text) if isinstance(text, str) else None
        if preference is None:
            raise TryAgain(f"unreadable verdict {self.shown(str(text))[:60]!r}")
        return preference, self.shown(text)

    def post(self, body):
        """The reply to a question, see `read_reply`; redirects within the origin are followed.

        The question is posted there again whatever the code says: nothing else has an answer.
        """
        end, url = time.monotonic() + self.timeout, self.url
        for _ in range(MAX_REDIRECTS + 1):
            request = urllib.request.Request(url, body, {
                "Content-Type": "application/json", "Authorization": f"Bearer {self.key}"})
            try:
                reply = read_reply(request, end - time.monotonic())
            except TimeoutError:
                raise TryAgain(f"no whole reply within --timeout {self.timeout:g}") from None
            except (*BROKEN, ValueError) as error:
                raise TryAgain(self.shown(f"{type(error).__name__}: {error}")) from None
            if reply.status not in REDIRECTS:
                return reply
            url = self.redirected(url, reply.headers.get("Location", ""))
        raise UserError(f"{self.url}: redirects more than {MAX_REDIRECTS} times; check the address")

    def redirected(self, url, location):
        """The address that a redirect names; `UserError` when it has another origin."""
        try:
            target = urllib.parse.urljoin(url, location)
            same = bool(location) and origin_of(target) == origin_of(url)
        except ValueError:
            same = False
        if not same:
            raise UserError(f"{self.url}: redirects to {self.shown(location)[:100] or 'no address'}"
                            ", another server, which the key is not sent to; correct --url")
        return target

    def shown(self, text):
        """Text of a server or an exception as it may be seen: one line, cut short, no key in it."""
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        text = self.key_pattern.sub("[key]", text)  # before it is cut: half a key is too much
        text = "".join(letter if letter.isprintable() else " " for letter in text)
        return " ".join(text.split())[:300]


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Leaves a redirect to the caller; urllib's own takes the key along to any host."""

    def http_error_302(self, *_):
        return None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


OPENER = urllib.request.build_opener(NoRedirects)


def read_reply(request, seconds):
    """The reply to a request: a namespace of status, headers, body (MAX_REPLY + 1 bytes at most).

    `TimeoutError` when it is not all there after `seconds`; of a refusal the status is enough. The
    exchange has a thread of its own, because a socket's timeout starts anew with every byte and
    the look-up of a host has none. After the deadline it is left to itself.
    """
    if seconds <= 0:
        raise TimeoutError
    end, done = time.monotonic() + seconds, threading.Event()
    reply = SimpleNamespace(status=None, headers={}, body=bytearray(), error=None)

    def exchange():
        try:
            try:
                answer = OPENER.open(request, timeout=seconds)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                reply.headers, reply.status = answer.headers, answer.status
                while reply.status not in REDIRECTS and len(reply.body) <= MAX_REPLY:
                    if time.monotonic() > end:
                        raise TimeoutError
                    part = answer.read1(MAX_REPLY + 1 - len(reply.body))
                    if not part:
                        break
                    reply.body += part
        except Exception as error:  # raised below, in the caller's thread
            reply.error = error
        done.set()

    threading.Thread(target=exchange, daemon=True).start()
    in_time = done.wait(seconds)
    if reply.status is None or reply.status < 300:
        if reply.error is not None:
            raise reply.error
        if not in_time:
            raise TimeoutError
    return reply


def origin_of(url):
    """(scheme, host, port) of an address; `ValueError` when it cannot be read."""
    parts = urllib.parse.urlsplit(url)
    return (parts.scheme, parts.hostname,
            parts.port or {"http": 80, "https": 443}.get(parts.scheme))


def check_url(url):
    """The address without its last slash; `UserError` when no key can be sent there."""
    try:
        scheme, host, _ = origin_of(url)
    except ValueError:
        scheme, host = None, None
    if not re.fullmatch("[!-~]+", url):
        wrong = "is empty, or a space or a character that is not ASCII stands in it"
    elif scheme is None:
        wrong = "its host or port cannot be read"
    elif scheme not in ("http", "https"):
        wrong = "begins with neither http:// nor https://"
    elif not host:
        wrong = "names no host"
    elif re.search("[@?#]", url):
        wrong = "holds a user name, or goes on behind ? or #"
    else:
        return url.rstrip("/")
    # What stands in front of an @ or behind a ? may be a secret.
    name = "--url" if re.search("[@?#]", url) else f"--url {url!r}"
    raise UserError(f"{name}: {wrong}; give an address like https://host/v1")


def read_key(variable):
    """The judge's key, from the environment; `UserError` without it."""
    key = os.environ.get(variable, "").strip()
    if not key:  # a name that is not in capitals may be the key itself
        name = variable if variable.isupper() else "the variable that --key-variable names"
        raise UserError(f"{name} is not set: the judge's key is read from the environment (any "
                        "text for a local server that asks for none)")
    return key


class LocalJudge:
    """A local model as judge: its probability of "B" against "A" as its reply.

    Scored at the first token in which the two differ: a space in front may be a token of its own.
    """

    def __init__(self, name, device="auto"):
        self.name = name
        self.model = models.load_model(name, processes.pick_device(device))
        self.tokenizer, self.lock = models.load_tokenizer(name), threading.Lock()

    def __call__(self, question):
        import torch

        if self.tokenizer.chat_template:
            text, letters = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False,
                add_generation_prompt=True), ("A", "B")
        else:
            text, letters = f"User: {question}\nAssistant:", (" A", " B")
        both = [self.tokenizer(text + letter, add_special_tokens=False)["input_ids"]
                for letter in letters]
        place = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), None)
        if place is None:
            raise UserError(f"{self.name}: its tokenizer does not tell the replies A and B apart; "
                            "choose another judge")
        ids, (a, b) = both[0][:place], (tokens[place] for tokens in both)
        room = models.context_length(self.model.config)
        if len(ids) > room:
            return None, f"{len(ids)} tokens are more than the judge's context of {room}"
        with self.lock, torch.no_grad():
            logits = self.model(torch.tensor([ids], device=self.model.device),
                                use_cache=False).logits[0, -1].double()
        return 1 + torch.sigmoid(logits[b] - logits[a]).item(), "probability"


def parse_verdict(text):
    """1.0 for A, 2.0 for B, 1.5 for a tie, None for anything else."""
    said = [w for w in re.findall(r"[a-z']+", text.lower()) if w not in FILLER]
    said = ["tie"] if said == ["a", "tie"] else said
    return {"a": 1.0, "b": 2.0, "tie": 1.5}.get(said[0]) if len(set(said)) == 1 else None


class Cache:
    """Verdicts on disk, a line each, flushed as they come; a half-written last line is ignored."""

    def __init__(self, path):
        self.path, self.known, self.lock = Path(path), {}, threading.Lock()
        lines = read_text(self.path).splitlines() if self.path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
                self.known[entry["key"]] = entry["preference"]
            except (ValueError, KeyError, TypeError):
                continue

    def add(self, key, preference, reply):
        with self.lock, open(self.path, "a", encoding="utf-8") as file:
            # A kill may have left half a line: start on a new one, empty lines are skipped.
            file.write("\n" + json.dumps({"key": key, "preference": preference, "reply": reply})
                       + "\n")
            self.known[key] = preference


def verdicts_of(pair, name):
    """{key: question} of both orders, the model's answer second and then first; {} for equal ones.

    The key stands for everything that is sent.
    """
    if pair["output_1"] == pair["output_2"]:
        return {}
    questions = [QUESTION.format(instruction=pair["instruction"], first=pair[a], second=pair[b])
                 for a, b in (("output_1", "output_2"), ("output_2", "output_1"))]
    return {utils.content_hash(name, question): question for question in questions}


def judge_pairs(pairs, judge, cache, parallel=4):
    """Fill in `preference` of every pair from two verdicts; returns counts for the summary line.

    Equal answers are ties and cost nothing. A pair with a missing verdict keeps None.
    """
    verdicts = [verdicts_of(pair, judge.name) for pair in pairs]
    every = {key: question for both in verdicts for key, question in both.items()}
    jobs = {key: question for key, question in every.items() if key not in cache.known}
    counts = {"asked": len(jobs), "cached": len(every) - len(jobs), "equal": verdicts.count({})}
    problems = []

    def ask(item):
        preference, reply = judge(item[1])
        if preference is None:
            problems.append(reply)
        else:
            cache.add(item[0], preference, reply)

    stopped = getattr(judge, "stopped", None) or threading.Event()
    for _ in tqdm(call_all(ask, list(jobs.items()), parallel, stopped), total=len(jobs),
                  desc="judging", unit="verdict", delay=2):
        pass
    for pair, keys in zip(pairs, verdicts, strict=True):
        known = [cache.known.get(key) for key in keys]
        pair["annotator"] = judge.name
        if not known:
            pair["preference"] = 1.5
        elif None not in known:
            pair["preference"] = (known[0] + 3 - known[1]) / 2  # the second order was swapped
    return counts | {"failed": len(problems), "problem": problems[0] if problems else None}


def call_all(function, items, parallel, stopped):
    """function(item) for every item, `parallel` at a time; yields once for each that is done.

    The first error, or Ctrl-C, is raised at once and sets `stopped`: nothing is waited for. The
    threads are daemons, so the process ends while some of them wait for a server.
    """
    waiting, finished = queue.SimpleQueue(), queue.SimpleQueue()

    def work():
        while not stopped.is_set():
            try:
                function(waiting.get_nowait())
            except queue.Empty:
                return
            except BaseException as error:
                return finished.put(error)
            finished.put(None)

    try:
        if parallel == 1:  # a local model stays in the main thread, which Ctrl-C interrupts
            for item in items:
                function(item)
                yield
            return
        for item in items:
            waiting.put(item)
        for _ in range(min(parallel, len(items))):
            threading.Thread(target=work, daemon=True).start()
        for _ in items:
            if (error := finished.get()) is not None:
                raise error
            yield
    except BaseException:  # a refused key, a full disk, Ctrl-C: what is known is on disk
        stopped.set()
        raise


def estimate(pairs, cache, name, price_in, price_out):
    """One line before anything is asked: verdicts, tokens (4 characters each), and what they cost.

    price_in, price_out: per million tokens.
    """
    questions = {key: len(text) for pair in pairs for key, text in verdicts_of(pair, name).items()}
    new = [length for key, length in questions.items() if key not in cache.known]
    tokens = sum(new) / 4
    cost = (tokens * price_in + 4 * len(new) * price_out) / 1e6
    return (f"{len(pairs)} pairs, both orders: {len(new)} verdicts to ask, "
            f"{len(questions) - len(new)} known; about {tokens / 1e6:.2f}M tokens in, "
            f"{4 * len(new) / 1e6:.3f}M out"
            + (f", {cost:.2f} at the given prices" if price_in or price_out else ""))
