"""Log importance weights of the reference package, for test_dsir.py.

    pip install data-selection==1.0.3 nltk==3.9.1 && python tests/baselines/make_dsir_reference.py

NLTK 3.10 replaced Python's `re` by the `regex` package, whose \\w holds other characters (x² is one
word to `re` and two to `regex`); the package was published with `re`, and so are these figures.
"""

import json
import random
import tempfile
from pathlib import Path

OUT = Path(__file__).parent / "data" / "dsir_reference.json"
ODD = [
    "don't STOP... (at 3.5 km²)\n\tplease",
    "naïve café, cafe\u0301 İstanbul ß ẞ",
    "x",
    "?!",
    "数字 一二三 \U0001f600\u2b50\ufe0f!!",
    "a a a a a a",
    "snake_case and kebab-case",
    "½ ₂ ⅷ ४",
    "e\u200dmoji \U0001f469\u200d\U0001f469\u200d\U0001f467 ",
]
WORDS = [
    "sort",
    "list",
    "the",
    "a",
    "of",
    "numbers",
    "write",
    "poem",
    "about",
    "river",
    "stone",
    "answer",
    "question",
    "why",
    "because",
    "model",
    "data",
    "rows",
    "trusted",
    "noisy",
]


def make_texts():
    """(lower, upper): seeded sentences and the odd ones."""
    rng = random.Random(0)

    def text(words):
        return " ".join(
            rng.choice(words) + rng.choice(["", "", ",", ".", "?\n"])
            for _ in range(rng.randint(1, 40))
        )

    return ODD + [text(WORDS) for _ in range(51)], ODD[:2] + [
        text(WORDS[:12]) for _ in range(18)
    ]


def package_weights(lower, upper, **options):
    """(log importance weights, words) of every lower text, by the package in one process."""
    import numpy as np
    from data_selection import HashedNgramDSIR

    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for name, texts in (("lower", lower), ("upper", upper)):
            paths[name] = f"{folder}/{name}.jsonl"
            Path(paths[name]).write_text(
                "".join(json.dumps({"text": text}) + "\n" for text in texts)
            )
        dsir = HashedNgramDSIR(
            [paths["lower"]],
            [paths["upper"]],
            cache_dir=f"{folder}/cache",
            num_proc=1,
        )
        dsir.fit_importance_estimator(**options)
        dsir.compute_importance_weights()
        return [
            np.load(f"{folder}/cache/{name}/0.npy").tolist()
            for name in ("log_importance_weights", "perexample_metadata")
        ]


if __name__ == "__main__":
    lower, upper = make_texts()
    weights, words = package_weights(lower, upper)
    capped, _ = package_weights(lower, upper, num_tokens_to_fit=600)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(
        json.dumps(
            {
                "made by": "data-selection 1.0.3, nltk 3.9.1",
                "lower": lower,
                "upper": upper,
                "log_weights": weights,
                "words": words,
                "log_weights_fitted_on_600": capped,
            },
            indent=0,
        )
    )
