"""Row tests: every formula against the obvious computation, p-values against simulation."""

import math
import random

import pytest
import torch
from conftest import make_llama

import detect
import logprobs
import ranking
from batches import pack, row_losses

ENDS = {0, 3}


def facts(token):
    """Bits of `detect.fact`, for tokens without texts."""
    return token % 16


def told(answer):
    """Where a number, a negation or a name begins, by the words of `detect.fact` alone."""
    return [n for n, token in enumerate(answer) if facts(token) % 4
            or (facts(token) // 4 % 2 and n and facts(answer[n - 1]) >= 8)]


def rows_of(seed=0, count=9, turns=1):
    """Tokenised rows, ragged: some with one end token, some with two, the last one cut."""
    rng = random.Random(seed)
    rows = []
    for n in range(count):
        ids, trained = [7, 8], [0, 0]
        for _ in range(turns):
            question = [rng.randrange(10, 250) for _ in range(rng.randint(1, 6))]
            answer = [rng.randrange(10, 250) for _ in range(rng.randint(1, 9))]
            stop = [[0], [3, 0], [0]][n % 3]
            ids += [*question, 9, *answer, *stop]
            trained += [0] * (len(question) + 1) + [1] * (len(answer) + len(stop))
        rows.append({"input_ids": ids, "trained": trained})
    rows[-1] = {"input_ids": ids[:-1], "trained": trained[:-1]}
    return rows


@pytest.fixture(scope="module")
def model():
    llama = make_llama().double()
    llama.config._attn_implementation = logprobs.ATTENTION
    return llama.eval().requires_grad_(False)


def logps_of(model, ids):
    """log p of ids[1:], one token after the other, by the model's own logits; row alone."""
    logits = model(torch.tensor([ids[:-1]])).logits[0]
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


# --- one row --------------------------------------------------------------------------------------

def test_token_logps_are_those_of_the_rows_alone(model):
    rows = rows_of()
    logps, owner = logprobs.token_logps(model, pack(rows))
    for n, row in enumerate(rows):
        alone = logps_of(model, row["input_ids"])[torch.tensor(row["trained"][1:]).bool()]
        assert torch.allclose(logps[owner == n], alone, atol=1e-10)
    sums, counts = logprobs.sequence_logprobs(model, pack(rows))
    assert torch.equal(torch.bincount(owner), counts)
    assert torch.allclose(torch.zeros(len(rows)).double().index_add(0, owner, logps), sums)


@pytest.mark.parametrize("turns", [1, 2])
def test_the_evidence_of_a_row_by_brute_force(model, turns):
    rows, blank = rows_of(turns=turns), [7, 8, 9]
    found = ranking.row_evidence(model, rows, ENDS, facts, blank)
    for n, row in enumerate(rows):
        ids = row["input_ids"]
        start = max(p for p in range(len(ids)) if not row["trained"][p]) + 1
        stop = len(ids)
        while ids[stop - 1] in ENDS:
            stop -= 1
        logps = logps_of(model, ids)
        c, last = logps[start - 1:stop - 1], logps[stop - 1:]
        u = logps_of(model, blank + ids[start:stop])[len(blank) - 1:]
        answer, prompt = ids[start:stop], ids[:start]
        expected = {"end": -sum(last.tolist()) if len(last) else math.nan,
                    "relevance": -sum((c - u).tolist()), "fluency": -sum(c.tolist()) / len(c),
                    "slip": max((-float(c[i:i + 2].sum()) for i in told(answer)), default=math.nan),
                    "peak": max(-float(c[i:i + 2].sum()) for i in range(len(c))),
                    "length": len(answer), "repetition": detect.repetition(answer),
                    "copied": detect.copied(answer, prompt)[0],
                    "news": sum(t not in prompt for t in answer) / len(answer)}
        for name, value in expected.items():
            assert float(found[name][n]) == pytest.approx(value, abs=1e-9, nan_ok=True), (name, n)
    assert found["end"].isnan().tolist() == [False] * 8 + [True]
    assert torch.equal(found["loss"], row_losses(model, rows)[0])


def test_an_answer_of_the_whole_context_stands_behind_the_end_of_the_blank_prompt(
        model, monkeypatch):
    """A model of learned positions has none behind its context, one of a window refuses it."""
    rows, blank = rows_of(), list(range(5, 25))
    room = max(len(row["input_ids"]) for row in rows)
    monkeypatch.setattr(model.config, "max_position_embeddings", room)
    found = ranking.row_evidence(model, rows, ENDS, facts, blank)
    for n, row in enumerate(rows):
        prompt, answer, _ = ranking.last_turn(row, ENDS)
        behind = ranking.behind_blank(model, blank, answer)["input_ids"]
        kept = len(behind) - len(answer)
        assert len(behind) == min(room, len(blank) + len(answer)) and behind[kept:] == answer
        assert behind[:kept] == blank[len(blank) - kept:]
        c = logps_of(model, prompt + answer)[len(prompt) - 1:]
        u = logps_of(model, behind)[kept - 1:]
        assert float(found["relevance"][n]) == pytest.approx(-float((c - u).sum()), abs=1e-9)
    assert ranking.behind_blank(model, blank, [3] * room)["input_ids"] == [24] + [3] * room


def test_the_evidence_does_not_depend_on_the_packing(model, monkeypatch):
    rows = rows_of()
    whole = ranking.row_evidence(model, rows, ENDS, facts, [7, 8, 9])
    monkeypatch.setattr("batches.TOKENS_AT_ONCE", 20)
    for name, values in ranking.row_evidence(model, rows, ENDS, facts, [7, 8, 9]).items():
        assert torch.allclose(values, whole[name], atol=1e-10, equal_nan=True), name


def test_log_probs_of_two_answers_are_refused():
    with pytest.raises(ValueError, match="2 and 1 log-probs of one answer"):
        detect.relevance(torch.tensor([-1.0, -2.0]), torch.tensor([-3.0]))


def test_repetition_and_copies():
    assert detect.repetition([1, 2, 3]) == 0 and detect.repetition([]) == 0
    assert detect.repetition([1, 2, 3, 4] * 3) == 1 - 4 / 9
    assert detect.copied([5, 1, 2, 3, 6], [0, 1, 2, 3]) == (1 / 3, 2 / 5)
    assert detect.copied([], [1]) == (0.0, 0.0)
    value = detect.echo(torch.tensor([-20.0, -20, -20, -4]), torch.tensor([10.0, 10, 10, 2]),
                        torch.tensor([1, 1, 0.5, 1]), torch.tensor([0, 0.4, 0, 0]))
    assert value[0] == 2 and value[1:].isnan().all()


def test_a_slip_is_in_a_number_a_negation_or_a_name():
    pieces = [" The", " river", " Rhine", ",", " Basel", ".", " It", " isn", "'t", " 1", "2", " km"]
    places = detect.told([*map(detect.fact, pieces)])
    assert places == [2, 4, 8, 9, 10]
    for worst, value in ((2, 7), (3, 7), (4, 7), (5, 7), (8, 7), (10, 7), (11, 7), (6, 2), (0, 2)):
        logps = torch.full((12,), -1.0)  # 2 nats a span, and 7 where one of its tokens is odd
        logps[worst] = -6.0
        assert detect.slip(logps, places) == value, pieces[worst]
    assert detect.slip(torch.tensor([-3.0]), [0]) == 3 and math.isnan(detect.slip(logps, []))
    texts = ("", " ", "\n", " Not", "Don't", " a", "B", " É", "٣", " No,", " (Bob", "U.S.")
    assert [*map(detect.fact, texts)] == [0, 0, 0, 14, 10, 8, 8, 12, 9, 12, 8, 0]


@pytest.mark.parametrize(("name", "ahead"), [("slip", 0.99), ("peak", 0.9)])  # as far as it counts
def test_odd_words_lower_the_rank_and_flag_no_row(name, ahead):
    found = {name: torch.cat([draw(380, 50, "normal"), draw(20, 51) + 30]), "length":
             torch.full((400,), 50.0).double(), "fluency": draw(400, 52, "normal").exp()}
    surprising = detect.surprises(found)
    assert surprising[name][380:].tolist() == [detect.RANKING[name]] * 20
    score, flagged, reasons = detect.judge(surprising, found)
    assert score[380:].min() > score[:380].quantile(ahead) and name not in reasons
    assert not flagged[380:].any()
    others = detect.judge({"fluency": surprising["fluency"]}, found)[1]
    assert torch.equal(flagged, others)  # what flags nothing takes no share of the others' level


# --- nulls ----------------------------------------------------------------------------------------

def draw(count, seed, kind="exponential"):
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    return normal if kind == "normal" else -uniform.log()


@pytest.mark.parametrize("kind", ["exponential", "normal"])
def test_p_values_against_simulation(kind):
    """Of good rows a share of at most p has p-values of p and less; exactly p in the bulk."""
    null, fresh = draw(4000, 1, kind), draw(200_000, 2, kind)
    p = (-detect.surprise(fresh, null)).exp()
    for level in (0.5, 0.2, 0.05, 0.01, 0.001):
        share = float((p <= level).double().mean())
        assert share <= 1.35 * level
        if kind == "exponential" or level >= 0.2:
            assert share >= level / 1.35
    order = fresh.argsort()
    assert (detect.surprise(fresh, null)[order].diff() >= 0).all()


def test_p_values_of_the_bulk_are_counts():
    null = torch.arange(100, dtype=torch.float64)
    surprising = detect.surprise(torch.tensor([-1.0, 0.0, 49.5, math.nan]).double(), null)
    assert (-surprising).exp().tolist() == pytest.approx([1, 1, 51 / 101, 1])
    far = detect.surprise(torch.tensor([200.0]).double(), null)
    point = float(torch.quantile(null, 0.9))
    mean = sum(v - point for v in range(100) if v > point) / sum(v > point for v in range(100))
    assert float(far) == pytest.approx(-math.log(0.1) + (200 - point) / mean)


def test_longer_answers_are_compared_with_longer_ones():
    lengths = torch.arange(400, dtype=torch.float64)
    values = lengths + draw(400, 3, "normal")
    found = detect.banded_surprise(values, lengths, values, lengths)
    assert found[:100].max() > 3 and found[:100].max() > 10 * detect.surprise(values, values)[0]
    assert detect.bands(lengths, lengths).bincount().tolist() == [100] * 4
    assert detect.bands(lengths, lengths[:50]).unique().tolist() == [0]


def test_a_band_holds_enough_rows_where_many_are_as_long():
    """A row alone in its band would be its own null, and never odd."""
    for lengths, sizes in (([50] + [100] * 319, [320]), ([3] * 120 + [10] * 280, [120, 280]),
                           ([1] * 39 + [2] * 281, [320]), ([1] * 40 + [2] * 280, [40, 280]),
                           ([1] * 281 + [2] * 39, [320])):
        lengths = torch.tensor(lengths).double()
        band = detect.bands(lengths, lengths)
        assert band.unique(return_counts=True)[1].tolist() == sizes
    values = 1.05 + 0.1 * draw(320, 60, "normal")
    values[0] = 9.0
    lengths = torch.tensor([50.0] + [100.0] * 319).double()
    found = {"fluency": values, "length": lengths}
    assert detect.judge(detect.surprises(found), found)[1].nonzero().tolist() == [[0]]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2])
def test_the_good_side_of_a_file_is_its_good_rows(share):
    good = draw(20_000, 4, "normal")
    bad = draw(round(20_000 * share / (1 - share)), 5, "normal") / 2 + 6
    null = detect.good_side(torch.cat([good, bad]))
    assert -0.05 < null.mean() < 0.35 and null.std() == pytest.approx(1, abs=0.25)
    values = torch.tensor([1.0, 2, 3, 8, 9]).double()
    assert detect.good_side(values).tolist() == [1, 2, 3, 5, 4, 3]
    assert detect.good_side(values ** 3, "end").tolist() == pytest.approx([1, 8, 27, 125, 64, 27])
    assert detect.good_side(values.exp(), "fluency").log().tolist() == pytest.approx(
        [1, 2, 3, 5, 4, 3])


@pytest.mark.parametrize("name", ["slip", "peak"])
def test_the_worst_of_many_places_is_compared_with_as_many(name):
    """Places with exponential tails of GROWTH nats: about as many long rows stand out as short."""
    lengths = torch.randint(4, 200, (4000,), generator=torch.Generator().manual_seed(30))
    worst = torch.stack([draw(n, seed).max() for seed, n in enumerate(lengths.tolist())])
    worst = worst * detect.GROWTH[name]
    found = {name: worst, "length": lengths.double()}
    values, long = detect.scaled(name, found), lengths > 100
    growth = [detect.GROWTH[name] * math.log(n) for n in lengths.tolist()]
    assert torch.allclose(values, worst - torch.tensor(growth, dtype=torch.float64))
    for of, low, high in ((values, 0.9, 1.1), (worst, 2, 9)):
        tail = of > torch.quantile(of, 0.9)
        assert low < float(tail[long].double().mean() / tail[~long].double().mean()) < high


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_made_faults_tell_how_much_of_a_file_is_bad(share):
    good, bad = draw(4000, 6, "normal"), draw(round(4000 * share / (1 - share)), 7, "normal") + 5
    values = torch.cat([good, bad])
    null = detect.without_made(values, draw(1000, 8, "normal") + 5)
    assert 1 - len(null) / len(values) == pytest.approx(share, abs=0.05)
    assert null.median().abs() < 0.15
    # What cannot be told apart stays in: the tail is never lighter than that of the good rows.
    assert 1.2 < torch.quantile(null, 0.9) < 2 and torch.quantile(null, 0.99) > 2.2


def null_by_hand(values, made):
    """`detect.without_made` in plain numbers."""
    values, made = sorted(values.tolist()), sorted(made.tolist())

    def above(sample, t):
        return sum(v >= t for v in sample) / len(sample)

    points = [torch.quantile(torch.tensor(made).double(), q / 20).item() for q in range(2, 15)]
    pi = min([0.95] + [above(values, t) / above(made, t) for t in points])
    rest = [min(1, max(0, (above(values, t) - pi * above(made, t)) / (1 - pi))) for t in values]
    rest = [max(rest[n:]) for n in range(len(rest))]  # a share at or above t does not grow with t
    count = max(50, round(len(values) * (1 - pi)))
    return [next((v for v, share in zip(values, rest, strict=True) if share <= (k + 0.5) / count),
                 values[-1]) for k in range(count)]


@pytest.mark.parametrize(("good", "bad"), [(300, 0), (300, 130), (30, 10), (0, 200)])
def test_the_null_without_made_faults_by_hand(good, bad):
    values = torch.cat([draw(good, 6, "normal"), draw(bad, 7, "normal") + 2])
    made = draw(150, 8, "normal") + 2
    assert detect.without_made(values, made).tolist() == pytest.approx(null_by_hand(values, made))


def test_what_the_text_shows_is_no_part_of_a_null_and_no_fault_is_sure_of_its_end():
    found = file_of(400, 1, cut=80)
    found["repetition"][300:] = 0.9
    found["end"][300:], found["relevance"][300:] = 40.0, 3.0
    made = {"end": draw(200, 50) + 9, "relevance": 0.7 + 0.7 * draw(200, 51, "normal")}
    surprising, usual = detect.surprises(found, None, made), slice(0, 300)
    for name in made:
        values = detect.scaled(name, found)
        null = detect.without_made(values[usual], made[name])
        null = detect.good_side(null, "end") if name == "end" else null
        assert torch.allclose(surprising[name], detect.surprise(values, null))


def test_fixed_scales_by_hand():
    values = torch.tensor([0.1, 0.15, 0.2, math.nan], dtype=torch.float64)
    assert detect.fixed_surprise(values, 0.15, 0.05).exp().tolist() == pytest.approx(
        [1, 1, 10 * math.e, 1])


# --- files ----------------------------------------------------------------------------------------

def file_of(count, seed, cut=0, other=0):
    """Numbers of a file: `cut` rows without an end, then `other` rows with another's answers."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(3, count, generator=generator, dtype=torch.float64)
    length = (3 + 1.2 * normal[0]).exp().clamp(1, 800).round()
    found = {"length": length, "end": draw(count, seed + 1), "loss": length,
             "relevance": -length.sqrt() * (2 + 0.7 * normal[1]),
             "fluency": (1.1 + 0.2 * normal[2]).exp(), "repetition": torch.zeros(count).double(),
             "copied": torch.zeros(count).double(), "news": torch.ones(count).double()}
    found["end"][:cut] += 9
    found["relevance"][cut:cut + other] += 2.7 * length[cut:cut + other].sqrt()
    return found


@pytest.mark.parametrize("trusted", [True, False])
def test_a_clean_file_comes_out_clean_and_a_dirty_one_does_not(trusted):
    made = {"end": draw(200, 50) + 9, "relevance": 0.7 + 0.7 * draw(200, 51, "normal")}
    null = file_of(400, 90) if trusted else None
    flagged = []
    for seed in range(5):
        clean = file_of(1000, 100 * seed)
        _, bad, _ = detect.judge(detect.surprises(clean, null, made), clean, made)
        flagged.append(float(bad.double().mean()))
    assert max(flagged) <= 0.02
    found = file_of(1000, 7, cut=150, other=150)
    score, flagged, reason = detect.judge(detect.surprises(found, null, made), found, made)
    bad = torch.arange(1000) < 300
    assert ranking.auroc(-score, bad) > 0.95
    assert flagged[:150].double().mean() > 0.8 and flagged[300:].double().mean() < 0.05
    assert [reason[:150].count("end") > 100, reason[150:300].count("end") < 10] == [True, True]
    assert reason[150:300].count("relevance") > 25
    assert all((name is None) == (not bad) for name, bad in
               zip(reason, flagged.tolist(), strict=True))


def test_rows_that_their_text_gives_away_are_no_part_of_the_null():
    """Echoes have a very low loss; as many as that would make ordinary rows look garbled."""
    found = file_of(1000, 1)
    found["copied"][:500], found["news"][:500] = 1.0, 0.0
    found["fluency"][:500] *= 0.3
    found["length"][:500] = found["length"][:500].clamp_min(10)
    found["relevance"][:500] = -2.5 * found["length"][:500]
    _, flagged, reason = detect.judge(detect.surprises(found), found)
    assert reason[:500].count("echo") > 400 and flagged[500:].double().mean() < 0.1
    assert (detect.surprises(found)["fluency"][500:] > 5).double().mean() < 0.02


def test_trusted_rows_of_another_style_are_only_half_of_the_null():
    found, other = file_of(1000, 1, cut=300), file_of(400, 90)
    made = {"end": draw(200, 50) + 9}
    other["fluency"] = other["fluency"] * 0.6  # every row of the file looks garbled
    own, both = (detect.surprises(found, null, made) for null in (None, other))
    alone = detect.banded_surprise(found["fluency"], found["length"], other["fluency"],
                                   other["length"])
    assert torch.allclose(both["fluency"], (own["fluency"] + alone) / 2)
    assert torch.equal(both["repetition"], own["repetition"])
    del other["fluency"]
    assert torch.equal(detect.surprises(found, other, made)["fluency"], own["fluency"])


def test_a_handful_of_trusted_rows_is_no_null():
    """Their largest value would be all that a tail is fitted to."""
    found, few = file_of(300, 1), file_of(19, 90)
    own = detect.surprises(found)
    assert all(torch.equal(own[name], values) for name, values in detect.surprises(
        found, few).items())
    enough = file_of(20, 90)
    assert not torch.equal(detect.surprises(found, enough)["fluency"], own["fluency"])
    values = torch.tensor([0.0, 18.5, 1e9]).double()
    counts = detect.surprise(values, torch.arange(19).double())
    assert counts.exp().tolist() == pytest.approx([1, 20, 20])
    assert detect.surprise(values, torch.arange(20).double())[2] > 1e6


def test_copies_of_one_row_are_no_null():
    """Their values differ by rounding, and a tail as narrow made a thousand million nats."""
    found, same = file_of(300, 1), file_of(1, 90)
    copies = {name: values[torch.zeros(40, dtype=torch.long)] + 1e-7 * torch.arange(40)
              for name, values in same.items()}
    own = detect.surprises(found)
    assert all(torch.equal(own[name], values) for name, values in detect.surprises(
        found, copies).items())
    doubled = {name: torch.cat([values[:100], values[:1].expand(150)])
               for name, values in found.items()}
    assert all(values.max() < 200 for values in detect.surprises(doubled).values())
    counts = detect.surprise(torch.tensor([1.0, 2.0, 3.0]).double(), torch.ones(20).double())
    assert counts.exp().tolist() == pytest.approx([1, 21, 21])


def test_without_an_end_a_row_is_not_judged_by_it():
    found = file_of(500, 3)
    found["end"][:100] = math.nan
    assert (detect.surprises(found, file_of(400, 90))["end"][:100] == 0).all()
    assert list(detect.surprises(found, names=["fluency", "echo"])) == ["fluency", "echo"]


def causes_by_hand(rows, rounds=50):
    """`detect.fit_causes` in plain numbers: ([share], [mean]) of rows, a list of surprises each."""
    count = len(rows[0])
    share, mean = [detect.RARE] * count, [detect.FAULTY] * count
    for _ in range(rounds):
        has = []
        for row in rows:
            good = max(0.05, 1 - sum(share))  # all surprises exponential with mean one
            likely = [w * math.exp(-t / mu) / mu / math.exp(-t)
                      for w, mu, t in zip(share, mean, row, strict=True)]
            has.append([one / (good + sum(likely)) for one in likely])
        share = [max(detect.RARE, sum(h[d] for h in has) / len(rows)) for d in range(count)]
        mean = [min(12, max(2, (sum(h[d] * r[d] for h, r in zip(has, rows, strict=True))
                                + detect.FAULTY * detect.FEW)
                            / (sum(h[d] for h in has) + detect.FEW))) for d in range(count)]
    return share, mean


def test_the_faults_of_a_file_are_those_of_the_likeliest_mixture():
    table = torch.stack([draw(60, 1), draw(60, 2), draw(60, 3)], dim=1)
    table[:20, 0] *= 6
    share, mean = detect.fit_causes(table)
    by_hand = causes_by_hand(table.tolist())
    assert share.tolist() == pytest.approx(by_hand[0]) and mean.tolist() == pytest.approx(
        by_hand[1])
    odds = [math.log(sum(w * math.exp(-t / mu) / mu / math.exp(-t) for w, mu, t in zip(
        *by_hand, row, strict=True)) / max(0.05, 1 - sum(by_hand[0]))) for row in table.tolist()]
    names = ("fluency", "relevance", "guidance")
    found = dict.fromkeys((*names, "length"), torch.zeros(60))
    score, _, _ = detect.judge(dict(zip(names, table.T, strict=True)), found)
    assert score.tolist() == pytest.approx(odds)


@pytest.mark.parametrize("bad", [0.0, 0.1, 0.4])
def test_one_fault_explains_what_it_does_to_other_detectors(bad):
    """Faulty rows surprise the second detector too: alone it would take that for its own fault."""
    share, alone = torch.zeros(2), torch.zeros(1)
    for seed in range(5):
        table = torch.stack([draw(1000, seed), draw(1000, seed + 50)], dim=1)
        table[:round(1000 * bad)] *= torch.tensor([8.0, 2.5])
        share = share + detect.fit_causes(table)[0] / 5
        alone = alone + detect.fit_causes(table[:, 1:])[0] / 5
    assert float(share[0]) == pytest.approx(max(bad, detect.RARE), abs=0.03)
    assert float(alone) == pytest.approx(max(bad, detect.RARE), abs=0.05)
    assert float(share[1]) <= max(detect.RARE + 0.01, 0.5 * float(alone))


def test_of_no_rows_nothing_is_known():
    assert detect.fit_causes(torch.zeros(0, 2).double())[0].tolist() == [detect.RARE] * 2
    assert [len(part) for part in detect.judge({"end": torch.zeros(0).double()}, {
        "end": torch.zeros(0).double()})] == [0, 0, 0]


@pytest.mark.parametrize("ranking_only", [False, True])
def test_flags_are_those_of_benjamini_and_hochberg(ranking_only):
    surprising = {"fluency": draw(300, 20) ** 2, "repetition": draw(300, 21) * 2}
    if ranking_only:  # it has a share of the bad rows, and none of the level
        surprising["slip"] = (2 * draw(300, 22)).clamp_max(6)
    found = dict.fromkeys((*surprising, "length"), torch.zeros(300))
    _, flagged, _ = detect.judge(surprising, found, fdr=0.2)
    share, _ = causes_by_hand(torch.stack([*surprising.values()], dim=1).tolist())
    p = [min(math.exp(-float(t)) * sum(share[:2]) / w
             for t, w in zip(row[:2], share[:2], strict=True))
         for row in zip(*surprising.values(), strict=True)]
    passing = max(k for k in range(1, 301) if sorted(p)[k - 1] <= 0.2 * k / 300)
    assert flagged.tolist() == [value <= sorted(p)[passing - 1] for value in p]


def test_a_row_unlike_any_made_fault_is_not_flagged():
    found = {"end": torch.tensor([0.1] * 98 + [8.0, 30.0]).double(), "length": torch.ones(100)}
    surprising = {"end": torch.tensor([0.0] * 98 + [20.0, 40.0]).double()}
    made = {"end": torch.linspace(19, 39, 21).double()}  # 15 % of them: 22 and below
    score, flagged, _ = detect.judge(surprising, found, made)
    assert flagged.tolist() == [False] * 99 + [True] and score[98] > score[0]
    assert detect.judge(surprising, found)[1].tolist() == [False] * 98 + [True, True]
    found["end"][99] = math.nan
    assert not detect.plausible("end", found, made)[99] and detect.plausible("end", found)[99]


def test_a_detector_that_does_not_flag_a_row_is_not_its_reason():
    """A relevance unlike that of any exchanged answer: repeated words are why it is flagged."""
    surprising = {"relevance": torch.tensor([0.5] * 99 + [30.0]).double(),
                  "repetition": torch.tensor([0.5] * 99 + [20.0]).double()}
    found = {"relevance": torch.full((100,), -1.0).double(), "repetition": torch.ones(100).double(),
             "length": torch.ones(100).double()}
    _, flagged, reasons = detect.judge(surprising, found, {"relevance": draw(50, 1) + 5})
    assert flagged.tolist() == [False] * 99 + [True] and reasons[99] == "repetition"
    assert detect.judge(surprising, found)[2][99] == "relevance"


@pytest.mark.parametrize("count", [1, 60])
def test_a_file_whose_rows_all_repeat_themselves(count):
    """None of them is left for a null without one, and a single row makes no faults."""
    found = file_of(count, 1)
    found["repetition"] = torch.full((count,), 0.9).double()
    made = {"relevance": torch.zeros(0).double()} if count == 1 else {
        "end": draw(30, 2), "relevance": draw(30, 3)}
    score, flagged, reasons = detect.judge(detect.surprises(found, None, made), found, made)
    assert score.isfinite().all()
    assert set(reasons) == {"repetition"} and flagged.all()


def test_the_reason_is_the_winner_if_it_wins_clearly():
    rows = {"end": [20.0, 20, 20, 0, 9, 0], "relevance": [0, 19.5, 0, 20, 9.5, 20],
            "fluency": [0, 0, 6, 0, 0, 6]}
    assert [detect._reason({k: v[n] for k, v in rows.items()}) for n in range(6)] == [
        "end", "unclear", "fluency", "relevance", "unclear", "fluency"]


def test_tokens_may_be_a_tensor():
    tokens = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert detect.repetition(torch.tensor(tokens)) == detect.repetition(tokens) > 0
    assert detect.copied(torch.tensor(tokens), torch.tensor(tokens)) == (1.0, 0.0)


def test_quantiles_of_more_values_than_torch_reads():
    values = torch.randn(999, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = torch.tensor([0.0, 0.1, 0.37, 1.0], dtype=torch.float64)
    assert torch.equal(detect.quantile(values, shares), torch.quantile(values, shares))
    assert detect.quantile(values, 0.95) == torch.quantile(values, 0.95)
    assert detect.quantile(torch.arange(2**24 + 3).double(), 0.5) == 2**23 + 1


def test_plain_arrays_of_any_kind_of_number():
    """float32, whole numbers, and only some of the detectors."""
    found = {"end": torch.rand(30), "fluency": torch.rand(30), "length": torch.arange(1, 31)}
    assert list(detect.surprises(found)) == ["end", "fluency"]
    assert all(x.dtype == torch.float64 for x in detect.surprises(found).values())
