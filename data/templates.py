"""Messages -> segments of text, and segments -> tokens.

A segment is (text, trained): prompts carry no loss (0), responses do (1). They are tokenised apart:
together, a merge across the border would take the first response token out of the loss.
"""

import re

from runtime.command import reading
from utils import UserError

TEMPLATE = "User: {prompt}\nAssistant: {response}"
CHAT_DATE = (
    "26 Jul 2024"  # some chat templates print today's date: rows would differ by the day
)
# Stands in for special-token string number {}. Text never holds half a surrogate pair: `text_of`.
MARK = "\ud800{}\udfff"


def split_template(template):
    """A template -> its three literal parts: before the prompt, between, after the response."""
    template = template.replace("\\n", "\n")  # what a shell passes for "\n"
    match = re.fullmatch(r"(.*)\{prompt\}(.*)\{response\}(.*)", template, re.DOTALL)
    if not match or template.count("{prompt}") + template.count("{response}") > 2:
        raise UserError(
            f"--template {template!r}: it must hold {{prompt}} once and then {{response}} once, "
            f"such as {TEMPLATE!r}"
        )
    return match.groups()


def trained_turns(messages, turns):
    """Places of the answers that carry loss. turns: "last", or "all" that have text and weight."""
    last = len(messages) - 1
    places = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        wanted = turns == "all" and message["content"].strip() and "weight" not in message
        if number == last or wanted:
            places.append(number)
    return places


def plain_segments(messages, template, turns):
    """Messages -> segments, alternating 0 and 1, under a plain template (of `split_template`).

    Whitespace at the end of a prompt moves to the front of the response: tokenizers join a space
    with the word after it, so a prompt that ends in one leaves the model a token it never saw.
    """
    before, between, after = template
    trained = trained_turns(messages, turns)
    segments = []
    text = ""
    question = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            question.append(message["content"])
            continue
        if segments or text:
            text += "\n"
        text += before + "\n".join(question) + between
        question = []
        answer = message["content"] + after
        if number not in trained:
            text += answer
            continue
        head = text.rstrip()
        if after:
            answer = answer.rstrip()
        segments += [(head, 0), (text[len(head) :] + answer, 1)]
        text = ""
    return segments


def chat_segments(messages, tokenizer, turns, place):
    """Messages -> segments under the tokenizer's chat template.

    A response is what a turn adds to its prompt. Whitespace after the end-of-turn token is left out
    of the loss: generation stops before it. Raises `UserError` where a template does not render
    like that, and whatever the template itself raises.
    """

    def render(count, prompt=False):
        return tokenizer.apply_chat_template(
            messages[:count],
            tokenize=False,
            add_generation_prompt=prompt,
            date_string=CHAT_DATE,
        )

    full = render(len(messages))
    segments = []
    done = 0
    for number in trained_turns(messages, turns):
        head = render(number, prompt=True)
        answer = render(number + 1).rstrip()
        starts = full.startswith(head) and full.startswith(answer)
        if not starts or len(answer) <= len(head):
            raise UserError(
                f"{place}: the tokenizer's chat template does not render a finished turn as its "
                "generation prompt plus the response, so the response cannot be told apart; pass "
                "a plain --template, or train on the last turn only"
            )
        segments += [(full[done : len(head)], 0), (full[len(head) : len(answer)], 1)]
        done = len(answer)
    return segments


def special_tokens(tokenizer):
    """{id: text} of the control tokens."""
    tokens = {}
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            tokens[number] = token.content
    return tokens


class Encoder:
    """Segments -> token ids, in which only a template writes control tokens.

    `protect` hides special-token strings of user text behind marks; `encode` turns those into
    ordinary tokens, and special tokens that the template wrote into control tokens.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.specials = sorted(special_tokens(tokenizer).values(), key=len, reverse=True)
        self.strings = re.compile("|".join(map(re.escape, self.specials)) or r"(?!)")
        self.marks = re.compile(MARK.format(r"(\d+)"))
        # A tokenizer that puts a space in front of every text (Llama 2, Mistral) must not put one
        # between prompt and response. Such texts are tokenised behind a newline that is cut off.
        self.newline, alone, behind = self._call(["\n", "a", "\na"], literal=False)
        count = len(self.newline)
        self.puts_space = behind[:count] == self.newline and behind[count:] != alone

    def protect(self, text):
        """The text with a mark in place of every special-token string."""
        return self.strings.sub(
            lambda match: MARK.format(self.specials.index(match[0])), text
        )

    def encode(self, texts, continued):
        """Texts -> lists of token ids; `continued` texts follow other text of their row."""
        split = [
            self.marks.split(text) for text in texts
        ]  # text, number of a special, text ...
        ids = self._plain([pieces[0] for pieces in split], continued, literal=False)
        for row, pieces in zip(ids, split, strict=True):
            for place, piece in enumerate(pieces[1:]):
                literal = place % 2 == 0
                if literal:
                    piece = self.specials[int(piece)]
                if piece:
                    row += self._plain([piece], continued or bool(row), literal)[0]
        return ids

    def _plain(self, texts, continued, literal):
        if not (continued and self.puts_space):
            return self._call(texts, literal)
        count = len(self.newline)
        lists = []
        for ids, text in zip(
            self._call(["\n" + t for t in texts], literal), texts, strict=True
        ):
            if ids[:count] == self.newline:
                lists.append(ids[count:])
            else:
                lists += self._call([text], literal)
        return lists

    def _call(self, texts, literal):
        if not texts:
            return []
        with reading(
            "the tokenizer cannot encode some text"
        ):  # such as an unknown character
            return self.tokenizer(
                texts,
                add_special_tokens=False,
                split_special_tokens=literal,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )["input_ids"]
