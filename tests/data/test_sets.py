"""data/sets.py: held-out prompts train on no level, pairs, and what is said of a set."""

from types import SimpleNamespace

import datasets
import pytest
from conftest import make_rows, make_tokenizer, write_rows

from data import sets, tokens
from utils import UserError


@pytest.fixture
def load(tmp_path):
    """load(rows, ...) -> rows."""
    def call(rows, read=tokens.load_rows, **options):
        path = write_rows(tmp_path / "source.jsonl", rows)
        return read(path, make_tokenizer(), cache_dir=tmp_path / "cache", **options)
    return call


@pytest.fixture
def levels(tmp_path):
    """levels(lower rows, upper rows, ...) -> what `load_levels` gives."""
    def call(context_length=999, **options):
        settings = dict.fromkeys(("lower", "upper", "upper_heldout", "lower_heldout",
                                  "lower_columns", "upper_columns", "template"))
        settings |= {"turns": "last", "max_length": 99, "upper_loss": "sft", "seed": 0,
                     "cache_dir": tmp_path / "cache"}
        for name, value in options.items():
            if isinstance(value, list):
                value = write_rows(tmp_path / f"{name}.jsonl", value)
            settings[name] = value
        return sets.load_levels(SimpleNamespace(**settings), make_tokenizer(), context_length)
    return call


# --- levels ---------------------------------------------------------------------------------------

@pytest.mark.parametrize(("trusted", "held_out"), [(5, 1), (40, 4), (6000, 500)])
def test_a_tenth_is_held_out_and_the_seed_is_the_runs(levels, trusted, held_out):
    held = []
    for seed in (3, 3, 4):
        loaded = levels(lower=make_rows(3, 1), upper=make_rows(trusted, 2), seed=seed)
        held.append(loaded.upper_heldout["row_id"][:])
        assert len(held[-1]) == held_out
        assert len(loaded.upper) == trusted - held_out
        assert loaded.lower_heldout is None
    assert held[0] == held[1]
    assert held[0] != held[2] or trusted == 5


def test_held_out_rows_are_read_the_way_their_level_is(levels):
    columns = "prompt=question,response=response"
    renamed = [{"question": row["prompt"], "response": row["response"], "prompt": "never read"}
               for row in make_rows(9, 2)]
    loaded = levels(lower=make_rows(6, 1), upper=renamed[:5], upper_heldout=renamed[5:],
                    upper_columns=columns, lower_limit=4, upper_limit=3)
    assert len(loaded.lower) == 4
    assert len(loaded.upper) == 3
    assert len(loaded.upper_heldout) == 4
    assert "never read" not in loaded.upper_heldout["prompt"][:]


def test_held_out_questions_train_on_no_level(levels, capsys):
    """The row is dropped and counted, wherever its question is held out."""
    rows = make_rows(20, 1)
    other = [row | {"response": "another answer"} for row in rows]
    loaded = levels(lower=rows[:8], upper=[*other[5:8], *other[10:15]],
                    upper_heldout=[*rows[0:2], other[12]], lower_heldout=[rows[7], rows[19]])
    assert list(loaded.lower["row_id"]) == [2, 3, 4, 5, 6]
    assert list(loaded.upper["row_id"]) == [0, 1, 3, 4, 6, 7]
    assert sorted(loaded.reports["lower"]["dropped"]["held_out_prompt"]) == [0, 1, 7]
    assert sorted(loaded.reports["upper"]["dropped"]["held_out_prompt"]) == [2, 5]
    assert sets.left_out(loaded.reports["lower"]) == ", dropped {'held_out_prompt': 3}"
    assert "prompts of lower rows that upper rows have too: 2" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"lower: every row has a prompt that is held out"):
        levels(lower=rows[:8], upper=rows[10:], upper_heldout=rows[:10])


def test_split_held_out_is_disjoint_by_prompt(load):
    source = []
    for n in range(90):
        prompt = f"p {n // 3}" if n % 2 else f"p  {n // 3} "
        source.append({"prompt": prompt, "response": f"r{n}"})
    rows, _ = load(source)
    train, held = sets.split_held_out(rows, 20, seed=0)
    assert 18 <= len(held) <= 20
    assert sets.prompt_overlap(train, held) == []
    assert sorted([*train["row_id"], *held["row_id"]]) == list(range(90))
    assert list(held["row_id"]) == sorted(held["row_id"]) != list(range(len(held)))
    for count in (0, 90, 200):
        with pytest.raises(UserError, match=r"cannot hold out"):
            sets.split_held_out(rows, count, 0)


def test_prompt_overlap_is_up_to_whitespace_and_composition(load):
    one, _ = load([{"prompt": p, "response": "x"} for p in ("one", "two  words", "caf\u00e9")])
    two, _ = load([{"prompt": p, "response": "y"} for p in ("two words", "cafe\u0301")])
    assert sets.prompt_overlap(one, two) == [1, 2]
    assert sets.first_places(["a", "b", "a"]) == {"a": 0, "b": 1}


# --- pairs ----------------------------------------------------------------------------------------

def test_pairs_join_on_row_ids(load):
    long = "red " * 40
    source = [
        {"prompt": "a", "chosen": "yes", "rejected": long},
        {"prompt": "b", "chosen": "yes", "rejected": "yes <eos>"},  # an end marker is no answer
        {"prompt": "c", "chosen": long + "yes", "rejected": long + "no"},  # equal up to the cut
        {"prompt": "d", "chosen": "yes", "rejected": " "},
        {"prompt": "e", "chosen": "good", "rejected": "bad"},
    ]
    rows, report = load(source, sets.load_pairs, max_length=30)
    assert report["dropped"] == {"unpaired": [3], "two questions": [], "equal": [1, 2]}
    assert report["truncated"] == 3
    assert list(rows["row_id"]) == [0, 4]
    tokenizer = make_tokenizer()
    rejected = {"input_ids": rows[1]["rejected_input_ids"], "trained": rows[1]["rejected_trained"]}
    assert tokens.show_example(rejected, tokenizer) == "User: e\nAssistant:⟦ bad<eos>⟧"
    assert tokens.show_example(rows[1], tokenizer) == "User: e\nAssistant:⟦ good<eos>⟧"
    assert len(load(source, sets.load_pairs)[0]) == 3
    _, report = load(source)
    assert "rejected answers not read" in sets.left_out(report)


def test_a_pair_of_answers_to_two_questions_is_none(load):
    text = "\n\nHuman: {}\n\nAssistant: {}"
    source = []
    for one, other in (("a", "a"), ("b", "c")):
        source.append({"chosen": text.format(one, "yes"), "rejected": text.format(other, "no")})
    rows, report = load(source, sets.load_pairs)
    assert report["dropped"]["two questions"] == [1]
    assert list(rows["row_id"]) == [0]
    with pytest.raises(UserError, match=r"no pair with two different responses"):
        load(source[1:], sets.load_pairs)
    with pytest.raises(UserError, match=r"preference pairs need chosen and rejected columns"):
        load(make_rows(3, 1), sets.load_pairs)


# --- reports and checks ---------------------------------------------------------------------------

def test_what_is_left_out_is_said():
    report = {"dropped": {"tool_call": [1, 2], "empty_prompt": []}, "bad": 1, "unlabelled": 3,
              "truncated": 2, "unread": [f"c{n}" for n in range(12)]}
    assert sets.left_out(report) == (
        ", dropped {'tool_call': 2}, 2 responses cut, 1 labelled bad, 3 without a label count as "
        "good, not read: c0, c1, c2, c3, c4, c5, c6, c7, c8 and 3 more")
    assert sets.left_out({}) == ""


def test_both_sides_of_a_pair_count(load):
    source = [{"prompt": f"red {n}", "chosen": "blue", "rejected": "no"} for n in range(4)]
    source[2]["rejected"] = "stone " * 43
    rows, _ = load(source, sets.load_pairs)
    sides = [[len(row["input_ids"]), len(row["rejected_input_ids"])] for row in rows]
    assert sets.row_lengths(rows).tolist() == [sum(both) for both in sides]
    longest = max(map(max, sides))
    sets.check_lengths(rows, longest, "upper")
    with pytest.raises(UserError, match=r"upper: 1 rows are longer.*first: row_id 2"):
        sets.check_lengths(rows, longest - 1, "upper")
    assert sets.row_lengths(rows.select([2, 0])).tolist() == [sum(sides[2]), sum(sides[0])]


def test_check_vocabulary(load):
    """Ids count from zero."""
    rows, _ = load(make_rows(3, 1))
    largest = max(max(row["input_ids"]) for row in rows)
    config = SimpleNamespace(vocab_size=largest + 1)
    config.get_text_config = lambda: config
    sets.check_vocabulary({"lower": rows}, config)
    config.vocab_size = largest
    with pytest.raises(UserError, match=f"lower: .* token {largest}, .* has {largest} tokens"):
        sets.check_vocabulary({"lower": rows}, config)


def test_the_hash_of_rows_is_that_of_their_content(load):
    """The same rows of another file or selection; a label changes nothing, a token does."""
    source = make_rows(6, 1)
    rows, _ = load(source)
    expected = sets.rows_hash(rows)
    labelled, _ = load([row | {"bad": True} for row in source])
    backwards = labelled.select([5, 4, 3, 2, 1, 0])
    assert sets.rows_hash(backwards) != expected
    assert sets.rows_hash(backwards.select([5, 4, 3, 2, 1, 0])) == expected
    assert sets.rows_hash(load(source[:5])[0]) != expected
    source[3]["response"] += " stone"
    assert sets.rows_hash(load(source)[0]) != expected
    one = datasets.Dataset.from_dict({"row_id": [0], "input_ids": [[1, 2]], "trained": [[0, 1]]})
    assert sets.rows_hash(one) != sets.rows_hash(one.map(lambda row: {"trained": [1, 0]}))
