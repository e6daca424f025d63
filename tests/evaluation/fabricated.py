"""Run folders as the training scripts write them, without training; harmful text; parsed pages."""

import html.parser
import json
import re

import torch
from conftest import write_rows
from safetensors.torch import save_file

import eval as front

HOSTILE = ("</div></article><script>alert(1)</script><img src=x onerror=alert(2)>"
           "<svg onload=alert(3)><a href='javascript:x'>&lt;b&gt; \" ' ]]> --> </style> "
           "$\\frac{1}{2}$ مرحبا \u202e reversed \u2066 \U0001f469\u200d\U0001f4bb \x00\x1b[31m "
           "e\u0301\u0323") * 2


def fabricate(folder, steps=6, epochs=2, rows=40, method="bds", seed=0, labels=True, text=None,
              finished=True, scores=True, args=None, upper=(0.5, 0.3), kinds=("clean", "cut")):
    """A run folder as the training scripts write it, without training."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    (folder / "config.json").write_text(json.dumps({
        "args": {"method": method, "seed": seed, "epochs": epochs, "batch": 8, "num_answers": 1,
                 "lower": "lower.jsonl", "upper": "upper.jsonl", "upper_heldout": "held.jsonl",
                 "lower_split": None, "lower_columns": None, "toy": False, "model": "m",
                 "cache_dir": str(folder / "no-cache"), "keep_fraction": 0.8} | (args or {}),
        "environment": {"torch": "2"}, "data": {"lower": "a", "upper_heldout": "b"}}))
    (folder / "weights").mkdir()
    omega, lines = torch.zeros(rows), []
    for step in range(steps):
        epoch = step * epochs // steps
        line = {"step": step, "epoch": epoch, "rho": 0.1 * (epoch + 1),
                "upper_loss": 1 / (1 + step), "lower_loss": 1.0, "time/step": 0.5}
        if method == "online":
            line |= {"ratio_mean": 1.0, "ratio_max": 1.5, "ratio_ess": 2.0, "ratio_clamped": 0,
                     "masked_share": 0.1, "answers": 5, "answer_length": 4.0, "time/generate": 0.1}
        if step == steps - 1 or (step + 1) * epochs // steps > epoch:
            omega = omega + torch.randn(rows, generator=generator)
            save_file({"omega": omega}, folder / "weights" / f"epoch_{epoch + 1}.safetensors")
            share = epoch / max(1, epochs - 1)
            line |= {"upper_heldout": upper[0] + share * (upper[1] - upper[0]), "omega/ess": rows,
                     "omega/ess_share": 1.0, "omega/uniform": False, "omega/collapsed": False}
        lines.append(line)
    write_rows(folder / "metrics.jsonl", lines)
    if not finished:
        return folder
    order = omega.argsort(descending=True).tolist()
    entries = []
    for rank, row in enumerate(order, 1):
        entry = {"row_id": row, "hash": f"{row:016x}", "rank": rank, "kept": rank <= 0.8 * rows,
                 "weight": 1.0} | ({"base_loss": 1.0, "final_loss": 0.5, "length": row % 7 + 1}
                                   if scores else {})
        if labels:
            entry |= {"bad": rank % 3 == 0, "kind": kinds[rank % 3 == 0]}
        entries.append(entry)
    write_rows(folder / "weights.jsonl", entries)
    if text is not None:
        write_rows(folder / "curated.jsonl", [entry | {
            "prompt": text, "response": text, "refined": text if n % 2 else None, "margin": 1.0,
            "recommended": "refined" if n % 2 else "original"} for n, entry in enumerate(entries)])
    result = {"method": method, "seed": seed, "rows": rows, "upper_heldout": upper[1],
              "upper_heldout_per_token": upper[1] + 0.01, "lower_original": 1.0, "lower_kept": 0.9}
    if labels:
        result |= {f"{name}/{key}": value for name, value in (
            ("weight", 0.9), ("base", 0.7), ("length", 0.5)) for key in ("auroc", "precision")}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


class Page(html.parser.HTMLParser):
    """Tags, attributes and text of a page, and whether every tag that was opened is closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = set(), [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def make_page(tmp_path, *folders):
    """(HTML, parsed page) of a report; whatever its rows hold, it can do nothing."""
    out = tmp_path / "out" / "page.html"
    front.main(["report", *map(str, folders), "--out", str(out)])
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.tags & {"script", "img", "iframe", "a", "object", "form", "base"}
    assert not any(name.startswith("on") or name in ("src", "action") for name, _ in
                   page.attributes)
    links = {value for name, value in page.attributes if name in ("href", "xlink:href")}
    assert all(link.startswith(("#", "data:,")) for link in links)
    assert set(re.findall(r"https?://[^\s\"<]*", text)) <= {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, never fetched
    assert "default-src 'none'" in text and "url(http" not in text
    assert out.with_suffix(".md").read_text(encoding="utf-8")
    assert not list(out.parent.glob(".*partial"))
    return text, " ".join(page.text)
