"""Row tests: which rows of a fine-tuning set look bad, and what is wrong with each.

A row is a question x and an answer y of T tokens, then end tokens. Two forward passes of one model,
no training: c_t = log p(y_t | x, y_<t), and u_t, the same behind the *blank* prompt, the template
around an empty question. The end tokens are kept apart from both.

    detector     value, higher is worse                       finds                    forwards
    end          E = -log p(end | x, y)                       cut short; runs on       c
    relevance    M = sum_t (u_t - c_t), over sqrt(T)          another question's       c, u
                                                              answer, a refusal
    fluency      -mean_t c_t                                  garbled                  c
    slip         the largest -sum of c_t over 2 tokens from   a wrong number, name or  c
                 a number, name or negation on, less ln T     negation
    peak         the same over any 2 tokens, less 2 ln T      a wrong word, a typo     c
    repetition   share of repeated 4-grams of the answer      repeats itself           none
    echo         -M / T where the answer is copied from x     copies the question      c, u
                 and says nothing new
    guidance     L(theta) - L(base)                           contradicts the trusted  a run's
                                                              rows (after a run)       last

c costs the tokens of every row and u those of every answer. Training needs every row's loss, and so
c, in any case; the tests add the forward of u.

Each value is compared with a *null*: what good rows look like. Never the whole file: among all its
rows a frequent fault hides itself.
 1. The file's own good rows. Faults made from its rows, cut at random places and with answers
    exchanged, say what bad values of E and M look like; the largest part of the file that they can
    explain is taken out (`without_made`). For the other values, an empirical null: the good side
    of the file and its mirror image (`good_side`), at about the same answer length. What a
    slip or a peak counts is bounded, and they flag no row (`RANKING`): good rows have them, too.
 2. Trusted rows, where there are any: p-values among those of about the same answer length, with an
    exponential tail beyond their worst tenth. Their style is not the file's, and the file's good
    rows are not quite known: the mean of both surprises counts, -ln p each.
 3. Repetition and echo are zero on most good rows: fixed scales (`SCALES`).
What the file suffers from weighs the detectors: a mixture of good rows and of each fault is fitted
to the surprises (`fit_causes`). The score of a row is its log odds of having a fault. The detector
with the largest weighted surprise is the reason; `unclear` where the runner-up is about as strong.
A row is flagged by Benjamini and Hochberg's rule if it is as bad as 15 % of the made faults.

Sources. M/T is pointwise mutual information as in domain-conditional PMI (Holtzman et al. 2021,
arXiv 2104.08315); its ratio form is IFD (Li et al. 2024, 2308.12032). Slip: "Token Cleaning" (Pang
et al. 2025, 2502.01968) scores tokens. Empirical null: Efron, JASA 99 (2004). The share that made
faults explain: Blanchard, Lee and Scott, JMLR 11 (2010). Odds: the local false discovery rate of
Efron et al., JASA 96 (2001). Weighted p-values: Genovese, Roeder and Wasserman, Biometrika 93
(2006). Flags: Benjamini and Hochberg 1995.

Blind spots. A wrong word, number, English negation or name lowers the rank of a fluent answer where
the model is good. An answer cut at the end of a sentence looks finished to a small model, and a
neighbour's answer nearly right. Tables, indented code and refrains repeat themselves. What is rare
looks bad: see who is flagged by length, language and code. Without trusted rows a rare fault is
ranked last, but hardly flagged, and a loss or boilerplate that most rows share *is* the null. A row
cut by a length limit has no end to judge.

Plain tensors and lists, float64; imports nothing of the project and can be copied as one file.
"""

import math

import torch

DETECTORS = ("end", "relevance", "fluency", "slip", "peak", "repetition", "echo", "guidance")
TAIL = 0.1            # share of the null beyond which its tail is taken as exponential
LEAST = 20            # rows of a null with a tail; fewer trusted rows are no null
BAND = 80             # null rows in a band of answer length, at least
MARGIN = math.log(3)  # nats; a runner-up closer than this makes the reason unclear
GARBLED = -math.log(0.01)  # nats; a loss as surprising explains the end and the relevance too
SPAN, GROWTH = 2, {"slip": 1.0, "peak": 2.0}  # tokens; nats it grows by with ln T
RANKING = {"slip": 6.0, "peak": 3.5}  # good rows have it: it flags none, counts up to so many nats
PLAUSIBLE = 0.15      # a flagged row is at least as bad as this share of the made faults
NUMBER, NEGATION, NAME, GOES_ON = 1, 2, 4, 8  # bits of `fact`
NEGATIONS = ("not", "no", "never", "cannot", "'t", "’t", "without", "none", "nor")
FDR = 0.1             # nominal share of good rows among the flagged: the nulls are estimates
RARE = 0.02           # the least share of the file that has each fault
FAULTY, FEW, MEANS = 3.0, 5, (2.0, 12.0)  # mean surprise of faulty rows: before any; so many; range
KNOWS_ENDS = 0.6      # AUROC of E on rows cut at random, below which E says nothing
# p = TAIL exp(-(value - start) / scale): on good rows of Alpaca 1 % have a repetition above 0.18.
SCALES = {"repetition": (0.15, 0.05), "echo": (0.0, 0.3)}
COPIED, NEWS, ECHO_LENGTH = 0.8, 0.1, 8  # an echo: copied 3-grams, new tokens, answer tokens
SYMMETRIC = {"end": (lambda x: x.clamp_min(0) ** (1 / 3), lambda x: x ** 3),
             "fluency": (lambda x: x.clamp_min(1e-3).log(), torch.exp)}


# --- one row --------------------------------------------------------------------------------------

def end(logps):
    """E = -sum of the end tokens' log-probs (n,), nats; NaN where there is no end to judge."""
    return -float(logps.double().sum()) if len(logps) else math.nan


def relevance(given, blank):
    """M = sum_t (u_t - c_t), nats: minus what the question tells about the answer.

    given, blank (T,): log-probs of the answer's tokens behind its own and the blank prompt. About
    zero or above: the question does not help. A sum, so that a long answer counts for more.
    ValueError for two lengths.
    """
    if given.shape != blank.shape:
        raise ValueError(f"{len(given)} and {len(blank)} log-probs of one answer")
    return float((blank.double() - given.double()).sum())


def fluency(given):
    """The mean loss of the answer's tokens (T,), nats a token; 0 for an empty answer."""
    return -float(given.double().mean()) if len(given) else 0.0


def fact(text):
    """What a token tells, bits of its text, which begins with a space where a word does.

    NUMBER; NEGATION, an English one; NAME, a capital; GOES_ON: no sentence ends here.
    """
    word = text.strip()
    negates = word.lower() in NEGATIONS or word.lower().endswith("n't")
    return (NUMBER * any(map(str.isdigit, word)) + NEGATION * negates
            + NAME * (text[:1] == " " and word[:1].isupper())
            + GOES_ON * (word[-1:].isalnum() or word[-1:] == ","))


def told(facts):
    """Places of the numbers, the negations and, inside of sentences, the names of a row's tokens.

    facts: `fact` of each token.
    """
    return [place for place, bits in enumerate(facts) if bits & (NUMBER | NEGATION) or (
        bits & NAME and place and facts[place - 1] & GOES_ON)]


def slip(given, places, span=SPAN):
    """-sum of the least likely `span` tokens of (T,) from one of these places on, nats, or NaN."""
    spans = torch.nn.functional.pad(-given.double(), (0, span)).unfold(0, span, 1).sum(dim=1)
    return float(spans[list(places)].max()) if len(places) else math.nan


def _grams(tokens, size):
    tokens = torch.as_tensor(tokens).tolist()  # the elements of a tensor are all different keys
    return [tuple(tokens[i:i + size]) for i in range(len(tokens) - size + 1)]


def repetition(answer, size=4):
    """Share of the answer's n-grams that occurred before in it, 0 to 1."""
    grams = _grams(answer, size)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def copied(answer, prompt, size=3):
    """(share of the answer's n-grams that stand in the prompt, share of its tokens that do not)."""
    known, words, grams = set(_grams(prompt, size)), set(_grams(prompt, 1)), _grams(answer, size)
    return (sum(gram in known for gram in grams) / len(grams) if grams else 0.0,
            sum(token not in words for token in _grams(answer, 1)) / max(1, len(answer)))


# --- one value a row ------------------------------------------------------------------------------

def echo(relevances, lengths, shares, news):
    """-M / T where the answer is copied and says nothing new, else NaN; all (N,).

    shares, news: of `copied`. Good rewriting has a low M, too; a short answer may be a quotation.
    """
    copies = (shares >= COPIED) & (news <= NEWS) & (lengths >= ECHO_LENGTH)
    return torch.where(copies, -relevances / lengths.clamp_min(1), torch.nan)


def scaled(name, found):
    """The values (N,) that a detector compares: nulls need rows of other lengths to be alike.

    found: {name: (N,)} of a row's numbers and `length`, tokens of the answer. M grows like sqrt(T)
    where the question says nothing, a slip, the worst of many places, like ln T: on good rows of
    Alpaca by 0.8 (5.9M parameters) to 0.9 nats (135M). A peak has more places.
    """
    if name == "echo":
        return echo(found["relevance"], found["length"], found["copied"], found["news"])
    if name in GROWTH:
        return found[name] - GROWTH[name] * found["length"].clamp_min(1).log()
    root = found["length"].clamp_min(1).sqrt() if name == "relevance" else 1.0
    return found[name] / root


# --- nulls ----------------------------------------------------------------------------------------

def good_side(values, name=None):
    """Efron's empirical null of values (n,) of which some are bad, and bad ones lie above.

    The values up to the median, and their mirror images above it, on the scale on which a detector
    is about symmetric: the cube root of E (a gamma-like sum: Wilson and Hilferty), the logarithm of
    a loss. Bad rows raise the median, which costs power alone.
    """
    there, back = SYMMETRIC.get(name, (lambda x: x, lambda x: x))
    values = there(values)
    middle = values.median()
    below = values[values <= middle]
    return back(torch.cat([below, 2 * middle - below]))


def enough(values):
    """Whether (n,) values are LEAST or more and no copies: half as many differ by a thousandth."""
    signs = (values.abs().clamp_min(1e-9).log() * 1000).round().unique()
    return len(values) >= LEAST and len(signs) >= LEAST // 2


def surprise(values, null):
    """-ln p of values (N,) among good rows' values, the null (n,); NaN values give 0.

    p is the share of the null at or above a value, by (1 + count) / (1 + n). Beyond the null's
    worst tenth, p = 0.1 exp(-(value - q) / s) with q its 90 % point and s the mean excess: an
    exponential tail, so that values beyond every null row still differ. Of too few null rows, or of
    copies of one, there is no tail to fit.
    """
    null = null[~null.isnan()].sort().values
    known = values.nan_to_num(-math.inf)
    above = len(null) - torch.searchsorted(null, known, right=False)
    found = -((1 + above.double()) / (1 + len(null))).log()
    point = quantile(null, 1 - TAIL) if len(null) else math.inf
    excess = null[null > point] - point
    if not enough(null) or not len(excess):
        return found
    scale = float(excess.mean())
    tail = -math.log(TAIL) + (known - point) / scale
    return torch.where(known > point, tail, found)


def quantile(values, shares):
    """The quantiles of values (n,), linear between two: `torch.quantile` reads 2^24 at most."""
    at = torch.as_tensor(shares, dtype=torch.float64) * (len(values) - 1)
    ordered = values.sort().values
    return torch.lerp(ordered[at.floor().long()], ordered[at.ceil().long()],
                      (at - at.floor()).to(ordered))


def bands(lengths, of, size=BAND):
    """Bands of answer length: for every row (N,) of `lengths` the number of its band.

    At most four; they hold about equally many of the rows `of` (n,), each at least size / 2 unless
    there is one alone. Where many rows have one length, that band is larger and there are fewer.
    """
    count, kept, start = min(4, max(1, len(of) // size)), [], 0
    for edge in quantile(of.double(), torch.arange(1, count, dtype=torch.float64) / count).tolist():
        below = int((of < edge).sum())
        if below - start >= size / 2 <= len(of) - below:
            kept, start = [*kept, edge], below
    edges = torch.tensor(kept, dtype=torch.float64)
    return torch.searchsorted(edges, lengths.double().contiguous(), right=True)


def banded_surprise(values, lengths, null=None, null_lengths=None, name=None, usual=None):
    """`surprise` of values (N,) against the null rows of about the same length.

    null, null_lengths (n,): trusted rows; None: the good side of the values of each band, on the
    scale of the detector `name`, of the rows that are `usual` (N,) bool.
    """
    trusted, usual = null is not None, slice(None) if usual is None else usual
    null, null_lengths = (null, null_lengths) if trusted else (values[usual], lengths[usual])
    own, other = bands(lengths, null_lengths), bands(null_lengths, null_lengths)
    found = torch.zeros_like(values)
    for band in own.unique().tolist():
        sample = null[other == band]
        sample = sample[~sample.isnan()]
        if len(sample):
            found[own == band] = surprise(values[own == band], sample if trusted
                                          else good_side(sample, name))
    return found


def without_made(values, made):
    """The null in values (n,) of which some are bad like `made` (m,), values of faults on purpose.

    With S the share of rows at or above a value: pi = min_t S(t) / S_made(t) over the made values'
    10 to 70 % points is the largest share of the file that such faults can explain. Returns
    (1 - pi) n quantiles, 50 at least, of S_0 = (S - pi S_made) / (1 - pi), made monotone.
    """
    values, made = (x[~x.isnan()].sort().values for x in (values, made))
    if not len(values) or not len(made):
        return values

    def above(sample, at):
        return 1 - torch.searchsorted(sample, at).double() / len(sample)

    at = quantile(made, torch.arange(2, 15, dtype=torch.float64) / 20)
    share = min(0.95, float((above(values, at) / above(made, at)).min()))
    rest = ((above(values, values) - share * above(made, values)) / (1 - share)).clamp(0, 1)
    rest = rest.flip(0).cummax(0).values.flip(0)
    count = max(50, round(len(values) * (1 - share)))
    wanted = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    places = torch.searchsorted(-rest, -wanted).clamp_max(len(values) - 1)
    return values[places]


def fixed_surprise(values, start, scale):
    """-ln p of values (N,) by a fixed tail p = TAIL exp(-(value - start) / scale); 0 below it."""
    values = values.nan_to_num(-math.inf)
    return torch.where(values > start, -math.log(TAIL) + (values - start) / scale, 0.0)


def surprises(found, trusted=None, made=None, names=None):
    """-ln p of every row under every detector, {name: (N,)}.

    found, trusted: {name: (N,)} and {name: (n,)} of end, relevance, fluency, slip, peak,
    repetition, copied, news, length and, as wanted, guidance. made: {"end": (m,), "relevance":
    (m,)}, `scaled` values of faults made on purpose. names: the detectors; None: all of `found`.
    """
    found, trusted = ({name: x.double() for name, x in part.items()} if part else part
                      for part in (found, trusted))
    parts = {"echo": {"copied", "news", "relevance"}}
    names = names or [name for name in DETECTORS if parts.get(name, {name}) <= set(found)]
    surprising = {name: fixed_surprise(scaled(name, found), *SCALES[name])
                  for name in names if name in SCALES}
    usual = torch.ones(len(found["length"]), dtype=torch.bool)
    for values in surprising.values():
        usual &= values < GARBLED  # what the text alone shows to be bad is no part of a null
    usual |= not usual.any()
    for name in names:
        values = scaled(name, found)
        if name in SCALES:
            continue
        if made is not None and name in made:
            null = without_made(values[usual], made[name])
            # No fault is too sure of its end.
            own = surprise(values, good_side(null, name) if name == "end" else null)
        else:
            own = banded_surprise(values, found["length"], name=name, usual=usual)
        known = scaled(name, trusted) if trusted is not None and name in trusted else values[:0]
        if enough(known[~known.isnan()]):
            own = (own + banded_surprise(values, found["length"], known, trusted["length"])) / 2
        surprising[name] = own.clamp_max(RANKING.get(name, math.inf))
    return {name: surprising[name] for name in names}


# --- verdicts -------------------------------------------------------------------------------------

def fit_causes(surprising, rounds=50):
    """(w (D,), mu (D,)) of D detectors: the share of rows that each fault has, its mean surprise.

    surprising: (N, D) of `surprises`. Maximum likelihood, by expectation and maximisation: a row is
    good, and its surprises exponential with mean one, as -ln p is; or it has one fault, and that
    detector's surprise has mean mu. A row that one fault explains says nothing about another, which
    a swapped answer, surprising all over, would otherwise do.
    """
    share = torch.full((surprising.shape[1],), RARE, dtype=surprising.dtype)
    mean = torch.full_like(share, FAULTY)
    for _ in range(rounds):
        odds = log_odds(surprising, share, mean)
        has = torch.cat([torch.zeros_like(odds[:, :1]), odds], dim=1).softmax(dim=1)[:, 1:]
        share = (has.sum(dim=0) / max(1, len(odds))).clamp_min(RARE)
        mean = ((has * surprising).sum(dim=0) + FAULTY * FEW) / (has.sum(dim=0) + FEW)
        mean = mean.clamp(*MEANS)
    return share, mean


def log_odds(surprising, share, mean):
    """(N, D): log odds of each fault against none, of surprises (N, D) and `fit_causes`."""
    good = (1 - share.sum()).clamp_min(0.05)
    return (share / mean / good).log() + surprising * (1 - 1 / mean)


def plausible(name, found, made=None):
    """(N,) bool: as bad as some of the made faults; True of a detector that has none of them."""
    values = scaled(name, found).nan_to_num(-math.inf)
    known = (made or {}).get(name, values[:0])
    known = known[~known.isnan()]
    return values >= (quantile(known, PLAUSIBLE) if len(known) else -math.inf)


def judge(surprising, found, made=None, fdr=FDR):
    """(score (N,), flagged (N,) bool, reason: N names) of {detector: (N,) surprise}.

    score: the log odds, nats, that a row has one of the faults, as `fit_causes` finds them in this
    file. Of the rows that are `plausible` those are flagged that Benjamini and Hochberg reject at
    `fdr`, by the largest surprise + ln w, without RANKING: a p-value by weighted Bonferroni.
    reason: of `_reason`, None for a row that is not flagged.
    """
    names = list(surprising)
    table = torch.stack([surprising[name] for name in names], dim=1)
    share, mean = fit_causes(table)
    score = log_odds(table, share, mean).logsumexp(dim=1)
    flags = torch.tensor([name not in RANKING for name in names])
    table = table + (share / share[flags].sum()).log()
    likely = torch.stack([plausible(name, found, made) for name in names], dim=1)
    table = table.where(likely & flags, -math.inf)
    chance = (-table.amax(dim=1)).exp()
    ordered = chance.sort().values
    level = fdr * torch.arange(1, len(ordered) + 1, dtype=torch.float64) / max(1, len(ordered))
    passed = (ordered <= level).nonzero().flatten()
    flagged = chance <= (ordered[passed[-1]] if len(passed) else -1.0)
    reasons = [_reason(dict(zip(names, row, strict=True))) if bad else None
               for bad, row in zip(flagged.tolist(), table.tolist(), strict=True)]
    return score, flagged, reasons


def _reason(row):
    """The detector that wins among {name: surprise} of a row; "unclear" with one within MARGIN."""
    ordered = sorted(row, key=lambda name: -row[name])
    if ordered[0] in ("end", "relevance") and row.get("fluency", 0.0) > GARBLED:
        return "fluency"
    close = len(ordered) > 1 and row[ordered[0]] - row[ordered[1]] < MARGIN
    return "unclear" if close else ordered[0]
