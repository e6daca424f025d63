"""Runs as TensorBoard event files."""

import pytest
from conftest import read_rows
from fabricated import fabricate

import eval as front
import utils


def test_tensorboard_without_the_library_is_one_line(tmp_path, monkeypatch, refused):
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    run = fabricate(tmp_path / "run")
    line = refused(lambda: front.main(["tensorboard", str(run)]))
    assert "pip install tensorboard" in line and not (run / "tensorboard").exists()


def test_tensorboard_holds_every_metric(tmp_path, refused):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = fabricate(tmp_path / "run")
    front.main(["tensorboard", str(run)])
    events = EventAccumulator(str(run / "tensorboard"), {"histograms": 0})
    events.Reload()
    rows = read_rows(run / "metrics.jsonl")
    found = [(e.step, e.value) for e in events.Scalars("upper_loss")]
    assert found == [(r["step"], pytest.approx(r["upper_loss"])) for r in rows]
    assert len(events.Histograms("weights")) == 2
    times = [e.wall_time for e in events.Scalars("upper_loss")]
    assert times[-1] - times[0] == pytest.approx(0.5 * (len(rows) - 1), abs=1e-3)
    assert "holds files already" in refused(lambda: front.main(["tensorboard", str(run)]))
    assert utils.read_jsonl(run / "metrics.jsonl") == rows
