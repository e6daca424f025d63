"""The benchmark of omega's step at tiny sizes."""

from conftest import is_spread


def test_selector(measured):
    results = measured("selector", "--rounds", 3, "--sizes", 1000, 5)
    assert results.keys() == {"1000 adam", "1000 sgd", "5 adam", "5 sgd"}
    for entry in results.values():
        for found in (*entry["seconds"].values(), entry["ratio_to_floor"],
                      entry["ratio_to_optimizer"]):
            is_spread(found)
