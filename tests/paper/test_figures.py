"""Figures: every panel is drawn, every seed a dot, the mean a line."""

from matplotlib.figure import Figure

from paper import figures


def test_panels_and_lines_hold_every_seed_and_the_mean(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append((figure, path)))
    figures.panels_figure(tmp_path / "new" / "p.png", "loss", {
        name: {"a": [1.0, 3.0], "b": [2.0, 2.0]} for name in "wxyz"}, chance=0.5)
    figures.line_figure(tmp_path / "l.png", "epoch", "length", {"BDS": [(1, [4.0, 6.0]),
                                                                        (2, [5.0, 9.0])]})
    panels = [axis for axis in drawn[0][0].axes if axis.get_visible()]
    assert [axis.get_title() for axis in panels] == list("wxyz")
    lines = [list(line.get_ydata()) for line in panels[0].lines]
    assert lines == [[1.0, 3.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [0.5, 0.5]]
    (axis,) = drawn[1][0].axes
    assert [list(line.get_ydata()) for line in axis.lines] == [[5.0, 7.0], [4.0, 6.0], [5.0, 9.0]]
    assert drawn[0][1].parent.is_dir()
