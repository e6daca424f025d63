"""Sources, templates, columns and tokenizers that cannot work: one clear line each."""

import gzip
import json
import os

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from conftest import CHATML, make_tokenizer, write_rows
from transformers import PreTrainedTokenizerFast

from data import layouts, sets, sources, tokens
from utils import UserError

GOOD = b'{"prompt": "a", "response": "b"}\n'


@pytest.fixture
def refused(tmp_path):
    """refused(message, file name and content, or rows, ...): one line, nothing half-written."""
    def call(message, name="x.jsonl", content=GOOD, tokenizer=None, **options):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=message) as caught:
            tokens.load_rows(path, tokenizer or make_tokenizer(), name="lower",
                             cache_dir=tmp_path / "cache", **options)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
        assert not list((tmp_path / "cache").glob("*"))
    return call


# --- files ----------------------------------------------------------------------------------------

DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(("name", "content", "message"), [
    ("x.jsonl", GOOD + b'{"prompt": "a", "response": ' + DEEP + b"}\n",
     r"x\.jsonl line 2: not valid JSON \(maximum recursion depth"),
    ("x.json", DEEP, r"x\.json: not valid JSON \(maximum recursion depth"),
    ("x.jsonl", GOOD + b'{"prompt": "\xff", "response": "b"}\n',
     r"x\.jsonl line 2: not valid JSON \('utf-8' codec can't decode byte 0xff"),
    ("x.jsonl", GOOD + b'{"prompt": "a", "response": "b", "response": "c"}\n',
     r'line 2: not valid JSON \(two values for the key "response"\)'),
    ("x.jsonl", b'[\n{"prompt": "a", "response": "b"}\n]\n',
     r"x\.jsonl line 1: a list begins, not an object; call the file \.json"),
    ("x.json", b'[{"prompt": "a", "prompt": "b", "response": "c"}]',
     r'x\.json: not valid JSON \(two values for the key "prompt"\)'),
    ("x.jsonl", b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}\n',
     r'line 1: .*two values for the key "content"'),
    *[(f"x.{kind}", GOOD.decode().encode(code), rf"x\.{kind}: written in UTF-16")
      for kind in ("json", "jsonl", "csv") for code in ("utf-16", "utf-16-le", "utf-16-be")],
    ("x.jsonl", bytes(4096), r"x\.jsonl: written in UTF-16, or no text at all"),
    ("x.csv", b"prompt,response\na,\xff\n", r"x\.csv: not UTF-8 \('utf-8' codec"),
])
def test_what_is_no_text_in_utf_8(refused, name, content, message):
    refused(message, name, content)


def test_a_mark_of_utf_8_passes(tmp_path):
    """As Windows editors write; in front of every kind of text file."""
    for name, content in (("x.jsonl", GOOD), ("x.json", b"[" + GOOD + b"]"), ("y.json", GOOD),
                          ("x.csv", b"prompt,response\na,b\n")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        rows, _ = tokens.load_rows(tmp_path / name, make_tokenizer(), cache_dir=tmp_path / "cache")
        assert (rows[0]["prompt"], rows[0]["response"]) == ("a", "b")


def test_parquet_whose_text_is_not_utf_8(refused, tmp_path):
    bad = pyarrow.array([b"b"] * 1500 + [b"\xff\xfe"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"] * 1501, "response": bad}),
                                tmp_path / "x.parquet")
    refused(r"x\.parquet: among the 1000 rows from row 1000: not valid UTF-8", "x.parquet", None)


@pytest.mark.parametrize("column", [
    pyarrow.array([2**45], pyarrow.timestamp("s")), pyarrow.array([2**30], pyarrow.date32()),
    pyarrow.StructArray.from_arrays([pyarrow.array([1]), pyarrow.array([2])], ["a", "a"])],
    ids=["time", "date", "two fields of one name"])
def test_parquet_with_a_value_that_python_cannot_hold(refused, tmp_path, column):
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "response": ["b"], "when": column}),
                                tmp_path / "x.parquet")
    refused(r"x\.parquet: among the 1000 rows from row 0: a value that cannot be read \(.*column",
            "x.parquet", None)


def test_sounds_and_broken_images_are_not_decoded(tmp_path):
    """A saved data set with such columns beside prompt and response reads like one without."""
    table = pyarrow.table({"prompt": ["a", "c"], "response": ["b", "d"],
                           "media": [{"bytes": b"no picture", "path": None}] * 2})
    for kind in (datasets.Image(), datasets.Audio()):
        features = datasets.Features({"prompt": datasets.Value("string"),
                                      "response": datasets.Value("string"), "media": kind})
        folder = tmp_path / type(kind).__name__
        datasets.Dataset(table.cast(features.arrow_schema)).select([1, 0]).save_to_disk(folder)
        found, _ = tokens.load_rows(folder, make_tokenizer(), cache_dir=tmp_path / "cache")
        assert found["prompt"][:] == ["c", "a"] and found["response"][:] == ["d", "b"]


def test_values_of_json_columns_are_decoded(tmp_path):
    """`datasets` keeps them as text; beside a column with images as well."""
    features = datasets.Features({"prompt": datasets.Value("string"), "response": datasets.Json(),
                                  "media": datasets.Image()})
    for names in (["prompt", "response"], [*features]):
        saved = datasets.Dataset.from_list([{"prompt": "a", "response": "b", "media": None}],
                                           features=features).select_columns(names)
        saved.save_to_disk(tmp_path / str(len(names)))
        rows, _ = tokens.load_rows(tmp_path / str(len(names)), make_tokenizer(),
                                   cache_dir=tmp_path / "cache")
        assert rows["response"][:] == ["b"]


def test_a_compressed_file(tmp_path):
    def rows(path):
        return [row for _, row in sources.read_part(path, path)]

    path = tmp_path / "x.jsonl.gz"
    for content, message in ((DEEP, r"\(maximum recursion"), (b'[{"a": 1, "a": 2}]', 'key "a"'),
                             (b"{}\n{\xff", r"x\.jsonl\.gz line 2: not valid JSON")):
        path.write_bytes(gzip.compress(content))
        with pytest.raises(UserError, match=message):
            rows(path)
    whole = gzip.compress(GOOD * 100)
    for content in (whole[:30], GOOD, whole[:20] + b"\xff" * 20 + whole[40:]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"x\.jsonl\.gz: (Compressed|Not a gzip|Error -3)"):
            rows(path)
    path.write_bytes(whole)
    assert rows(path) == [json.loads(GOOD)] * 100
    assert sources.find_parts(path) == [path]
    path = path.replace(tmp_path / "X.JSONL.GZ")
    assert sources.find_parts(tmp_path) == [path] and len(rows(path)) == 100
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf [" + GOOD + b"]"))
    assert rows(path) == [json.loads(GOOD)]


def test_names_that_are_no_file(refused, tmp_path):
    refused("File name too long", "x" * 300 + ".jsonl", None)
    os.mkfifo(tmp_path / "pipe")
    refused("pipe: a pipe or a device; its rows are read more than once", "pipe", None)
    os.mkfifo(tmp_path / "pipe.jsonl")
    refused(r"pipe\.jsonl: a pipe or a device", "pipe.jsonl", None)
    refused("/dev/null: a pipe or a device", "/dev/null", None)


def test_a_file_that_may_not_be_read(refused, monkeypatch):
    real = open

    def refuse(path, *args, **options):
        if str(path).endswith("x.jsonl"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **options)
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(UserError, match=r"x\.jsonl: Permission denied"):
        list(sources.read_part(sources.Path("x.jsonl"), "x"))


# --- templates and tokenizers ---------------------------------------------------------------------

@pytest.mark.parametrize(("broken", "message"), [
    ("{{ 1 + 'a' }}", "TypeError: unsupported operand"),
    ("{{ messages[7]['content'] }}", "UndefinedError: "),
    ("{{ {}.popitem() }}", "KeyError: |SecurityError: "),
    ("{{ raise_exception('never') }}", "TemplateError: never"),
    ("{% for %}", "TemplateSyntaxError: "),
    ("{{ 1 / 0 }}", "ZeroDivisionError: ")])
def test_a_chat_template_that_raises(refused, broken, message):
    refused(rf"no row is left to train on \(1 template_refused\); the chat template says: "
            rf"({message})", tokenizer=make_tokenizer(broken + CHATML))


def test_a_template_that_refuses_some_rows_drops_these(tmp_path):
    """The rows themselves may be at fault: the plan names them."""
    fails = "{% if messages[0]['content'] == 'a' %}{{ 1 + 'a' }}{% endif %}"
    path = tmp_path / "x.jsonl"
    path.write_bytes(GOOD + GOOD.replace(b'"a"', b'"c"'))
    rows, report = tokens.load_rows(path, make_tokenizer(fails + CHATML),
                                    cache_dir=tmp_path / "cache")
    assert report["dropped"] == {"template_refused": [0]} and list(rows["row_id"]) == [1]


def test_a_tokenizer_that_cannot_encode(refused):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "a": 1, "b": 2}, "<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    refused("the tokenizer cannot encode some text.*[Mm]issing",
            tokenizer=PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>"))


# --- columns --------------------------------------------------------------------------------------

@pytest.mark.parametrize(("columns", "name"), [
    ("prompt=a,prompt=b,response=c", "prompt"), ("prompt=text,response=text", "text"),
    ("prompt=a, response = b ,kind= a", "a")])
def test_columns_named_twice(refused, columns, name):
    refused(f"--lower-columns or --upper-columns: '{name}' stands there twice", columns=columns)
    if isinstance(columns, str) and "prompt=a,prompt" not in columns:
        pairs = dict(pair.split("=") for pair in columns.replace(" ", "").split(","))
        with pytest.raises(UserError, match=f"'{name}' stands there twice"):
            layouts.parse_columns(pairs)


def test_both_sides_of_a_pair_count(tmp_path):
    """A rejected answer past the context is refused, and the plan's tokens hold both sides."""
    pairs = [{"prompt": f"red {i}", "chosen": "blue", "rejected": "stone " * (3 + 40 * (i == 2))}
             for i in range(4)]
    rows, _ = sets.load_pairs(write_rows(tmp_path / "pairs.jsonl", pairs), make_tokenizer(),
                              cache_dir=tmp_path)
    sides = [[len(row[f"{side}input_ids"]) for row in rows] for side in ("", "rejected_")]
    assert max(sides[1]) > max(sides[0])
    assert sets.row_lengths(rows).tolist() == [sum(both) for both in zip(*sides, strict=True)]
    sets.check_lengths(rows, max(sides[1]), "upper")
    with pytest.raises(UserError, match=r"1 rows are longer.*first: row_id 2"):
        sets.check_lengths(rows, max(sides[1]) - 1, "upper")
