"""Judges of pairs of answers: any OpenAI-compatible endpoint, or a local model. See winrate.py.

A verdict is one number in [1, 2]: 1 the first answer is better, 2 the second is, 1.5 a tie. Every
pair is judged in both orders, because judges favour a position; verdicts are kept on disk.
"""

import concurrent.futures
import http.client
import json
import random
import re
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from tqdm import tqdm

import models
import utils
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


class Endpoint:
    """A judge behind an OpenAI-compatible /chat/completions address; the standard library only."""

    def __init__(self, url, name, key, timeout=60.0, retries=5, wait=1.0):
        self.url, self.name, self.key = url.rstrip("/") + "/chat/completions", name, key
        self.timeout, self.retries, self.wait = timeout, retries, wait

    def __call__(self, question):
        """(preference for the second answer in [1, 2], the raw reply); None when there is none.

        429, 5xx, timeouts, broken connections and unreadable replies are tried again, waiting
        twice as long each time (or as long as Retry-After says). A refused key ends everything.
        """
        body = json.dumps({"model": self.name, "temperature": 0, "max_tokens": 16,
                           "messages": [{"role": "user", "content": question}]}).encode()
        problem = "no reply"
        for attempt in range(self.retries + 1):
            pause = self.wait * 2**attempt * (1 + random.random() / 4)  # not all at the same time
            request = urllib.request.Request(self.url, body, {
                "Content-Type": "application/json", "Authorization": f"Bearer {self.key}"})
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    text = json.loads(reply.read())["choices"][0]["message"]["content"] or ""
                preference = parse_verdict(text) if isinstance(text, str) else None
                if preference is not None:
                    return preference, text
                problem = f"unreadable verdict {str(text)[:60]!r}"
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code} {detail_of(error)}"
                if error.code in (401, 403, 404):
                    raise UserError(f"{self.url}: the judge refuses every question ({problem}); "
                                    "check the key, the address and the judge's name") from None
                if error.code != 429 and error.code < 500:
                    return None, problem  # this question is refused; asking again would not help
                header = error.headers.get("Retry-After", "")
                pause = min(float(header), 300.0) if re.fullmatch(r"\d+(\.\d+)?", header) \
                    else pause
            except (*BROKEN, ValueError, KeyError, IndexError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt < self.retries:
                time.sleep(pause)
        return None, problem


def detail_of(error):
    """What the body of an HTTPError says, on one line; nothing when it stalls or is cut short."""
    try:
        return " ".join(error.read(300).decode("utf-8", "replace").split())
    except BROKEN:
        return ""


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
        config = self.model.config.get_text_config()
        room = getattr(config, "max_position_embeddings", None) or 2**31
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
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
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

    with concurrent.futures.ThreadPoolExecutor(parallel) as pool:
        futures = [pool.submit(ask, item) for item in jobs.items()]
        try:
            for future in tqdm(concurrent.futures.as_completed(futures), total=len(futures),
                               desc="judging", unit="verdict", delay=2):
                future.result()
        except BaseException:  # a refused key, a full disk, Ctrl-C: what is known is on disk
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for pair, keys in zip(pairs, verdicts, strict=True):
        known = [cache.known.get(key) for key in keys]
        pair["annotator"] = judge.name
        if not known:
            pair["preference"] = 1.5
        elif None not in known:
            pair["preference"] = (known[0] + 3 - known[1]) / 2  # the second order was swapped
    return counts | {"failed": len(problems), "problem": problems[0] if problems else None}


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
