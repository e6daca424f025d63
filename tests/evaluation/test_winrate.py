"""Win rates and judges: published figures, judge loops against a loopback server, formats."""

import collections
import http.server
import json
import math
import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, make_tokenizer

import eval as front
import utils
from evaluation import judge, winrate
from evaluation.texts import markdown_table
from utils import UserError

PUBLISHED = ROOT.parent / "shared" / "data" / "alpaca_eval"


def run_winrate(words):
    front.main(["winrate", *words])


# --- figures --------------------------------------------------------------------------------------

@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs the published preferences")
def test_published_win_rates_are_recomputed():
    """The leaderboard's win rates, standard errors and counts from its own preferences, to 1e-6."""
    rows = [json.loads(line) for line in (PUBLISHED / "preferences.jsonl").open()]
    published = [json.loads(line) for line in (PUBLISHED / "leaderboard.jsonl").open()]
    assert len(published) == 2
    for board in published:
        own = winrate.win_rate([r["preference"] for r in rows
                                if r["generator_2"] == board["model"]])
        for key in ("win_rate", "standard_error", "discrete_win_rate"):
            assert own[key] == pytest.approx(float(board[key]), abs=1e-6)
        for key in ("n_wins", "n_wins_base", "n_draws", "n_total"):
            assert own[key] == int(board[key])


def test_eq_win_rate_by_hand():
    """p - 1 = 0, 1, 0.5, 0.5, 0.25: mean 0.45, sd 0.3708; one missing; 0 is an old-style tie."""
    figures = winrate.win_rate([1, 2, 1.5, 0, 1.25, None, math.nan])
    sd = math.sqrt(sum((x - 0.45) ** 2 for x in (0, 1, 0.5, 0.5, 0.25)) / 4)
    assert figures == {
        "win_rate": pytest.approx(45.0), "standard_error": pytest.approx(100 * sd / math.sqrt(5)),
        "n_wins": 1, "n_wins_base": 2, "n_draws": 2, "n_total": 5, "n_missing": 2,
        "discrete_win_rate": pytest.approx(40.0)}
    assert winrate.win_rate([2])["standard_error"] is None
    for bad in ([], [None], [0.5], [1, 3]):
        with pytest.raises(UserError, match=r"\[1, 2\]"):
            winrate.win_rate(bad)


def test_rate_command(tmp_path, capfd, refused):
    rows = [{"generator_1": "base", "generator_2": "m", "preference": p} for p in (1, 2, 2, 1.5)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    run_winrate(["rate", str(tmp_path / "a.json")])
    text = capfd.readouterr().out
    assert json.loads(text.split("RESULT ")[1])["m"]["win_rate"] == pytest.approx(62.5)
    (tmp_path / "b.jsonl").write_text('{"preference": 1}\n')
    for name, words in (("b.jsonl", "generator_2"), ("none.json", "no such file")):
        assert words in refused(lambda name=name: run_winrate(["rate", str(tmp_path / name)]))
    (tmp_path / "c.json").write_text(json.dumps([*rows, rows[0] | {"preference": "x"}]))
    assert "row 5: 'preference' must be null or a number from 1 to 2, not \"x\"" in refused(
        lambda: run_winrate(["rate", str(tmp_path / "c.json")]))
    (tmp_path / "d.json").write_text(json.dumps([rows[0] | {"generator_2": ["m"]}]))
    assert "row 1: 'generator_2' must be text" in refused(
        lambda: run_winrate(["rate", str(tmp_path / "d.json")]))


def test_rate_of_a_model_against_two_references(tmp_path, capfd):
    rows = [{"generator_1": "base", "generator_2": "m", "preference": 1},
            {"generator_1": "other", "generator_2": "m", "preference": 2},
            {"generator_1": "base", "generator_2": "n", "preference": 2}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    run_winrate(["rate", str(tmp_path / "a.json")])
    result = json.loads(capfd.readouterr().out.split("RESULT ")[1])
    assert {name: figures["win_rate"] for name, figures in result.items()} == {
        "m against base": 0, "m against other": 100, "n": 100}


def test_files_may_begin_with_a_byte_order_mark(tmp_path):
    rows = [{"prompt": "red"}, {"prompt": "blue\u2028green"}]
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    for name, text in (("p.json", json.dumps(rows)), ("p.jsonl", lines)):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert winrate.read_prompts(tmp_path / name) == ["red", "blue\u2028green"]
    (tmp_path / "p.jsonl").write_text(lines + "\n{", encoding="utf-8-sig")
    with pytest.raises(UserError, match=r"p\.jsonl line 4: not valid JSON"):
        winrate.read_prompts(tmp_path / "p.jsonl")


def test_folders_are_made_before_the_work(tmp_path, monkeypatch, refused):
    for command in ("generate_outputs", "judge_outputs"):
        monkeypatch.setattr(winrate, command, lambda args: None)
    out = tmp_path / "a" / "b" / "x.json"
    run_winrate(["generate", "m", "--prompts", "p", "--out", str(out)])
    judging = ["judge", "o", "--reference", "r", "--out", str(out)]
    run_winrate([*judging, "--cache", str(tmp_path / "c" / "x.jsonl")])
    assert out.parent.is_dir() and (tmp_path / "c").is_dir() and not out.exists()
    out.touch()
    for flag, path, words in (("--out", out / "y.json", "cannot be made"),
                              ("--out", out / "z" / "y.json", "cannot be made"),
                              ("--cache", out / "y.json", "cannot be made"),
                              ("--out", out.parent, "is a folder")):
        line = refused(lambda f=flag, p=path: run_winrate([*judging, f, str(p)]))
        assert str(path) in line and words in line


def test_a_folder_that_disappears_is_one_line(tmp_path, refused):
    assert "No such file" in refused(lambda: utils.write_atomic(tmp_path / "gone" / "x", ""))
    (tmp_path / "x").touch()
    assert "File exists" in refused((tmp_path / "x").mkdir)


# --- the judge's loop -----------------------------------------------------------------------------

@pytest.mark.parametrize("text, verdict", [
    ("A", 1.0), ("b", 2.0), ("**B**", 2.0), ("Tie.", 1.5), ("Answer A is better.", 1.0),
    ("tie", 1.5), ("It's a tie", 1.5), ("The better answer is B", 2.0), ("", None), ("A or B",
     None), ("Neither is a clear winner", None), ("I cannot judge this.", None), ("Oh! 42", None)])
def test_parse_verdict(text, verdict):
    assert judge.parse_verdict(text) == verdict


class Server(http.server.ThreadingHTTPServer):
    """An OpenAI-compatible judge that prefers the answer with more "good" and misbehaves by plan.

    plan: {word: [behaviours]}; a question that holds the word meets one behaviour after another,
    then honest replies. asked: how often each question arrived.
    """

    def __init__(self, plan):
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan, self.asked, self.keys = plan, collections.Counter(), set()
        self.honest = collections.Counter()
        self.turn, self.lock = collections.Counter(), threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def reply(self, code, text, **headers):
        body = text.encode()
        self.send_response(code)
        for name, value in {"Content_Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        assert self.path == "/v1/chat/completions"
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question, server = sent["messages"][0]["content"], self.server
        with server.lock:
            server.asked[question] += 1
            server.keys.add(self.headers["Authorization"])
            behaviour = "answer"
            for word, behaviours in server.plan.items():
                if word in question:
                    turn = server.turn[question]
                    server.turn[question] += 1
                    behaviour = behaviours[turn] if turn < len(behaviours) else "answer"
        if behaviour in ("429", "429 odd"):
            odd = behaviour == "429 odd"
            return self.reply(429, "slow down", Retry_After="1.2.3" if odd else "0.01")
        if behaviour == "stalled":
            self.reply(500, "no", Content_Length=100)
            return time.sleep(1)
        if behaviour == "cut":
            return self.reply(200, '{"choices": ', Content_Length=100)
        if behaviour == "status":
            return self.wfile.write(b"nonsense\r\n\r\n")
        if behaviour == "list":
            return self.reply(200, '{"choices": [{"message": {"content": ["A"]}}]}')
        if behaviour in ("500", "400", "401"):
            return self.reply(int(behaviour), "no")
        if behaviour == "hang":
            return time.sleep(1)
        if behaviour == "garbage":
            return self.reply(200, "<html>not json")
        if behaviour == "shape":
            return self.reply(200, '{"choices": []}')
        text = "I cannot judge this."
        if behaviour == "answer":
            first, second = re.search(r"\[Answer A\]\n(.*)\n\n\[Answer B\]\n(.*)\n\nWhich",
                                      question, re.S).groups()
            a, b = first.count("good"), second.count("good")
            text = "A" if a > b else "B" if b > a else "tie"
            with server.lock:
                server.honest[question] += 1
        return self.reply(200, json.dumps({"choices": [{"message": {"content": text}}]}))


@pytest.fixture
def serve():
    servers = []

    def start(**plan):
        servers.append(Server(plan))
        return servers[-1]
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def judged(tmp_path, monkeypatch, capfd):
    """judged(server, pairs, **flags) -> (annotations, text) of `eval.py winrate judge`."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    def call(server, pairs, *flags):
        for name, side in (("outputs", 2), ("reference", 1)):
            (tmp_path / f"{name}.json").write_text(json.dumps(
                [{"instruction": p[0], "output": p[side], "generator": name} for p in pairs]))
        run_winrate(["judge", str(tmp_path / "outputs.json"), "--reference",
                      str(tmp_path / "reference.json"), "--out", str(tmp_path / "out.json"),
                      "--url", server.url, "--judge", "j", "--timeout", "10", "--wait", "0.01",
                      "--retries", "2", *flags])
        return json.loads((tmp_path / "out.json").read_text()), capfd.readouterr().out
    return call


PAIRS = [("zebra", "bad", "good good"), ("walrus", "good", "bad"), ("three", "good x", "x good"),
         ("four", "same", "same"), ("five", "good bad", "good good good")]


def test_every_pair_is_judged_in_both_orders_and_once(serve, judged, tmp_path):
    server = serve()
    rows, text = judged(server, PAIRS)
    assert [r["preference"] for r in rows] == [2, 1, 1.5, 1.5, 2]
    assert [(r["generator_1"], r["generator_2"], r["annotator"]) for r in rows] == [
        ("reference", "outputs", "j")] * 5
    assert len(server.asked) == 8 and set(server.asked.values()) == {1}  # equal ones are not asked
    assert server.keys == {"Bearer secret"}
    assert "8 asked, 0 from the cache, 1 equal, 0 failed; win rate 60.00" in text
    assert text.index("8 verdicts to ask") < text.index("judged 5 of 5")  # the estimate is first
    again, text = judged(server, [*PAIRS, ("six", "bad", "good")])
    assert again[:5] == rows and again[5]["preference"] == 2
    assert sum(server.asked.values()) == 10 and set(server.asked.values()) == {1}
    assert "2 asked, 8 from the cache" in text


def test_a_judge_that_favours_a_position_says_tie():
    """Always "A": one preference each way, so 1.5."""
    def first(question):
        return 1.0, "A"
    first.name = "first"
    pairs = winrate.pairs_of([{"instruction": "i", "output": "x"}],
                             [{"instruction": "i", "output": "y"}])
    counts = judge.judge_pairs(pairs, first, judge.Cache("/dev/null"))
    assert pairs[0]["preference"] == 1.5 and counts["asked"] == 2


@pytest.mark.parametrize("trouble", ["429", "429 odd", "500", "stalled", "hang", "cut", "status",
                                     "garbage", "shape", "list", "refuse"])
def test_trouble_is_retried_and_nothing_is_lost(serve, judged, trouble):
    """Two bad replies, then a good one: all is judged. More than the retries: asked again later."""
    flags = ["--timeout", "0.5"] if trouble in ("hang", "stalled") else []
    server = serve(zebra=[trouble] * 2)
    rows, text = judged(server, PAIRS, *flags)
    assert [r["preference"] for r in rows] == [2, 1, 1.5, 1.5, 2] and " 0 failed" in text
    assert set(server.honest.values()) == {1} and len(server.honest) == 8

    server = serve(zebra=[trouble] * 3)
    changed = [(f"{i} again", a, b) for i, a, b in PAIRS]
    rows, text = judged(server, changed, *flags)
    assert [r["preference"] for r in rows] == [None, 1, 1.5, 1.5, 2]
    assert "judged 4 of 5 pairs" in text and "2 failed" in text
    rows, text = judged(server, changed, *flags)  # the same command again asks for the two alone
    assert [r["preference"] for r in rows] == [2, 1, 1.5, 1.5, 2]
    assert "2 asked, 6 from the cache" in text and " 0 failed" in text
    assert set(server.honest.values()) == {1} and len(server.honest) == 8


def test_a_refused_question_is_not_asked_again_and_a_refused_key_ends_it(serve, judged, refused):
    server = serve(zebra=["400"])
    rows, text = judged(server, PAIRS)
    assert rows[0]["preference"] is None and "HTTP 400" in text
    assert set(server.asked.values()) == {1}
    server = serve(walrus=["401"] * 100)
    line = refused(lambda: judged(server, [(f"{i} key", a, b) for i, a, b in PAIRS]))
    assert "401" in line and "key" in line


def test_verdicts_survive_a_kill_in_the_middle_of_a_line(serve, judged, tmp_path):
    server = serve()
    judged(server, PAIRS)
    cache = tmp_path / "out.json.cache.jsonl"
    lines = [line for line in cache.read_text().splitlines() if line]
    cache.write_text("\n".join(lines[:5]) + "\n" + lines[5][:20])  # killed while writing the sixth
    rows, text = judged(server, PAIRS)
    assert "3 asked, 5 from the cache" in text
    assert [r["preference"] for r in rows] == [2, 1, 1.5, 1.5, 2]
    assert "0 asked, 8 from the cache" in judged(server, PAIRS)[1]


def test_estimate_asks_nothing_and_needs_no_key(serve, tmp_path, capfd, monkeypatch, refused):
    server = serve()
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for name, output in (("outputs", "good"), ("reference", "x" * 3600)):
        (tmp_path / f"{name}.json").write_text(json.dumps(
            [{"instruction": str(i), "output": output} for i in range(50)]))
    flags = ["judge", str(tmp_path / "outputs.json"), "--reference",
             str(tmp_path / "reference.json"), "--out", str(tmp_path / "out.json"),
             "--url", server.url, "--judge", "j"]
    run_winrate([*flags, "--estimate", "--price-in", "10", "--price-out", "30"])
    text = capfd.readouterr().out
    tokens = len(judge.QUESTION.format(instruction="1", first="good", second="x" * 3600)) / 4 * 100
    cost = (tokens * 10 + 400 * 30) / 1e6
    assert "100 verdicts to ask" in text and float(
        re.search(r"([\d.]+) at the given prices", text)[1]) == pytest.approx(cost, rel=0.01)
    assert "OPENAI_API_KEY is not set" in refused(lambda: run_winrate(flags))
    assert not server.asked and not (tmp_path / "out.json").exists()


def test_bad_input_of_judge(tmp_path, refused):
    outputs, other = tmp_path / "o.json", tmp_path / "r.json"
    outputs.write_text(json.dumps([{"instruction": "a", "output": "x"}]))
    other.write_text(json.dumps([{"instruction": "b", "output": "x"}]))

    def call(*flags, reference=other):
        return lambda: run_winrate(["judge", str(outputs), "--reference", str(reference), "--out",
                                     str(tmp_path / "out.json"), *flags])
    assert "no instruction in common" in refused(call("--url", "http://x", "--judge", "j"))
    assert "--url and --judge" in refused(call(reference=outputs))
    assert "--parallel 0" in refused(call("--parallel", "0"))
    other.write_text("[1, 2")
    assert "not valid JSON" in refused(call())
    other.write_text(json.dumps([{"instruction": "a"}]))
    assert "row 1: no 'output'" in refused(call())
    other.write_text(json.dumps([{"instruction": ["a"], "output": "x"}]))
    assert "r.json row 1: 'instruction' must be text, not [\"a\"]" in refused(call())


# --- models ---------------------------------------------------------------------------------------

def test_outputs_are_greedy_answers_in_the_trained_template(tmp_path, folders, capfd):
    """AlpacaEval's format; each output is transformers' own greedy answer to its prompt."""
    from transformers import AutoModelForCausalLM

    prompts = [{"instruction": "red blue", "dataset": "d"}, {"instruction": "\U0001f600 ثلاثة"},
               {"instruction": ""}, {"instruction": "green", "input": "seven"}]
    (tmp_path / "p.json").write_text(json.dumps(prompts))
    run_winrate(["generate", str(folders["llama"]), "--prompts", str(tmp_path / "p.json"),
                  "--out", str(tmp_path / "o.json"), "--max-new-tokens", "7", "--name", "tiny"])
    rows = json.loads((tmp_path / "o.json").read_text())
    assert "4 answers of tiny" in capfd.readouterr().out
    assert [r["instruction"] for r in rows] == ["red blue", "\U0001f600 ثلاثة", "", "green\nseven"]
    assert all(r.keys() == {"instruction", "output", "generator", "dataset"} for r in rows)
    assert [r["dataset"] for r in rows] == ["d", "", "", ""] and rows[2]["output"] == ""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folders["llama"]), make_tokenizer()
    for row in (rows[0], rows[1], rows[3]):
        ids = tokenizer(f"User: {row['instruction']}\nAssistant:", return_tensors="pt")["input_ids"]
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                max_new_tokens=7)[0, ids.shape[1]:]
        assert row["output"] == tokenizer.decode(answer, skip_special_tokens=True).strip()


def test_sampled_outputs_have_the_temperature_and_the_seed(tmp_path, folders, monkeypatch):
    asked = []
    monkeypatch.setattr(winrate, "generate", lambda model, prompts, seeds, **options: asked.append(
        (seeds, options["temperature"])) or [([5, 0], True)] * len(prompts))
    (tmp_path / "p.json").write_text(json.dumps([{"prompt": "red"}, {"prompt": "blue"}]))
    run_winrate(["generate", str(folders["llama"]), "--prompts", str(tmp_path / "p.json"), "--out",
                 str(tmp_path / "o.json"), "--temperature", "0.7", "--seed", "3",
                 "--max-new-tokens", "7"])
    assert asked == [(["3 0", "3 1"], 0.7)]


def test_a_prompt_without_room_for_its_answer_is_refused(tmp_path, folders, refused):
    """Longer than the context of 128 tokens, or with no room left behind it; never left empty."""
    for words, number in ((200, 7), (40, 120)):
        (tmp_path / "p.json").write_text(json.dumps(
            [{"prompt": "blue"}, {"prompt": " ".join(["red"] * words)}]))
        line = refused(lambda n=number: run_winrate(
            ["generate", str(folders["llama"]), "--prompts", str(tmp_path / "p.json"), "--out",
             str(tmp_path / "o.json"), "--max-new-tokens", str(n)]))
        assert re.search(rf"row 2 of the prompts: its \d+ tokens and --max-new-tokens {number} "
                         "exceed the model's context of 128", line)


def test_answers_end_where_the_template_goes_on(folders, monkeypatch):
    """What a plain template writes behind the response is learned as its end, and is no answer."""
    local = judge.LocalJudge(str(folders["llama"]), "cpu")
    said = ["red\n###", "red\n\n###\nred", "### red\n### blue\n###", "red", "###", "red ###"]
    monkeypatch.setattr(winrate, "generate", lambda *_, **__: [
        (local.tokenizer(text)["input_ids"], True) for text in said])

    def answers(template):
        return winrate.respond(local.model, local.tokenizer, ["seven"] * 6, max_new_tokens=9,
                               template=template)
    assert answers("Q: {prompt}\nA: {response}\n###\n") == [
        "red", "red\n\n###\nred", "### red\n### blue", "red", "", "red"]  # at the end alone
    assert answers("Q: {prompt}\nA: {response}") == [text.strip() for text in said]
    assert answers(None) == [text.strip() for text in said]


def test_a_judged_file_is_not_its_own_output(tmp_path, refused):
    rows = tmp_path / "o.json"
    rows.write_text(json.dumps([{"instruction": "a", "output": "x"}]))
    call = ["judge", str(rows), "--reference", str(rows), "--url", "http://x", "--judge", "j"]
    assert "would overwrite" in refused(lambda: run_winrate([*call, "--out", str(rows)]))
    assert "would overwrite" in refused(lambda: run_winrate(
        [*call, "--out", str(tmp_path / "a"), "--cache", str(tmp_path / "a")]))


@pytest.mark.parametrize("content", [
    b"[" * 100_000, b"\xff\xfe", b"[1]", b"{}", b"null", b'[{"instruction": "a", "output": 1}]',
    b'[{"instruction": "a", "output": "x", "generator": {}}]'])
def test_damaged_outputs_are_one_line(tmp_path, refused, content):
    bad, good = tmp_path / "bad.json", tmp_path / "good.json"
    bad.write_bytes(content)
    good.write_text(json.dumps([{"instruction": "a", "output": "x"}]))
    more = ["--out", str(tmp_path / "out.json"), "--url", "http://x", "--judge", "j"]
    for outputs, reference in ((bad, good), (good, bad)):
        assert "bad.json" in refused(lambda o=outputs, r=reference: run_winrate(
            ["judge", str(o), "--reference", str(r), *more]))
    assert "bad.json" in refused(lambda: run_winrate(["rate", str(bad)]))


def test_tables_of_foreign_names_cannot_steer_a_terminal(tmp_path, capfd):
    (tmp_path / "a.json").write_text(json.dumps(
        [{"generator_2": "\x1b[2Jm" + "z" * 50_000, "preference": 2.0}]))
    run_winrate(["rate", str(tmp_path / "a.json")])
    table = capfd.readouterr().out.split("RESULT")[0]
    assert "\x1b" not in table and len(table) < 1_000


def test_the_context_of_a_multimodal_model_is_its_text_models(folders, monkeypatch):
    local = judge.LocalJudge(str(folders["llama"]), "cpu")
    config = type(local.model.config)
    monkeypatch.setattr(config, "get_text_config",
                        lambda self, **_: SimpleNamespace(max_position_embeddings=9))
    assert local("red " * 20)[0] is None and "context of 9" in local("red " * 20)[1]
    with pytest.raises(UserError, match="context of 9;"):
        winrate.respond(local.model, local.tokenizer, ["red " * 20], max_new_tokens=1)


def test_base_and_adapter_of_a_run_differ(tmp_path, files, train, folders):
    run = train(files(), lr=0.3, epochs=1)
    (tmp_path / "p.jsonl").write_text("".join(
        json.dumps({"prompt": f"red {i} blue"}) + "\n" for i in range(6)))
    outputs = {}
    for name, flags in (("run", []), ("base", ["--base"])):
        run_winrate(["generate", str(run.out), "--prompts", str(tmp_path / "p.jsonl"), "--out",
                      str(tmp_path / f"{name}.json"), "--max-new-tokens", "8", *flags])
        outputs[name] = json.loads((tmp_path / f"{name}.json").read_text())
    run_winrate(["generate", str(folders["llama"]), "--prompts", str(tmp_path / "p.jsonl"),
                  "--out", str(tmp_path / "model.json"), "--max-new-tokens", "8"])
    plain = json.loads((tmp_path / "model.json").read_text())
    assert [r["output"] for r in outputs["base"]] == [r["output"] for r in plain]
    assert [r["output"] for r in outputs["run"]] != [r["output"] for r in plain]
    assert outputs["base"][0]["generator"] == "run (base)"


def test_local_judge_is_the_probability_of_the_letters(tmp_path, folders, capfd):
    """Preference of a pair = mean over orders of P(second), against a plain forward.

    The tokenizer knows no " A": the space is a token of its own, and the letters follow it.
    """
    from tokenizers import normalizers
    from transformers import AutoModelForCausalLM

    for name, output in (("o", "red"), ("r", "stone river")):
        (tmp_path / f"{name}.json").write_text(json.dumps([{"instruction": "i", "output": output}]))
    flags = ["judge", str(tmp_path / "o.json"), "--reference", str(tmp_path / "r.json"), "--out",
             str(tmp_path / "out.json"), "--local"]
    run_winrate([*flags, str(folders["llama"])])  # its context of 128 tokens is too short
    assert "2 failed" in capfd.readouterr().out
    from conftest import make_llama
    make_llama(max_position_embeddings=1024).save_pretrained(tmp_path / "long")
    make_tokenizer().save_pretrained(tmp_path / "long")
    run_winrate([*flags, str(tmp_path / "long")])
    found = json.loads((tmp_path / "out.json").read_text())[0]["preference"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "long"), make_tokenizer()
    a, b = (tokenizer(letter)["input_ids"][0] for letter in "AB")
    assert tokenizer(" A")["input_ids"] == [*tokenizer(" ")["input_ids"], a] and a != b
    shares = []
    for first, second in (("stone river", "red"), ("red", "stone river")):
        question = judge.QUESTION.format(instruction="i", first=first, second=second)
        ids = tokenizer(f"User: {question}\nAssistant: ", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            shares.append(torch.softmax(model(ids).logits[0, -1, [a, b]].double(), 0)[1].item())
    assert found == pytest.approx(1 + (shares[0] + 1 - shares[1]) / 2, abs=1e-6) and found != 1.5
    local = judge.LocalJudge(str(tmp_path / "long"), "cpu")
    local.tokenizer.backend_tokenizer.normalizer = normalizers.Replace("B", "A")
    with pytest.raises(UserError, match="does not tell the replies A and B apart"):
        local("which?")


def test_markdown_cells_hold_any_text():
    text = markdown_table(["a|b"], [["x\ny | <script>"]])
    assert text.splitlines()[0] == "| a\\|b |"
    assert text.splitlines()[2] == "| x<br>y \\| &lt;script> |"


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_a_temperature_that_is_none_is_refused(folders, tmp_path, refused, value):
    assert f"--temperature {float(value)}: 0 is greedy" in refused(lambda: run_winrate(
        ["generate", str(folders["llama"]), "--prompts", "p.json", "--out",
         str(tmp_path / "o.json"), "--temperature", value]))
