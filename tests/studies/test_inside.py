"""The picture of what happens inside a model: a cell for each norm and token, and its file."""

import matplotlib.image
import pytest
import torch

from model.inspect import inspect
from studies.inside import LEGENDS, grid, main


@pytest.mark.parametrize("show", LEGENDS)
def test_a_cell_of_the_grid_is_a_norm_and_a_token_and_the_legend_is_in_words(make_decoder, show):
    inside = inspect(make_decoder(), [3, 1, 4, 1, 5])
    axes, legend = grid(inside, ["a", "$b", "c$", "_", "\\n"], show).axes
    assert torch.equal(torch.tensor(axes.images[0].get_array().data), getattr(inside, show))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "$b", "c$", "_", "\\n"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [*inside.norms] and not axes.yaxis_inverted()
    assert legend.get_xlabel() == LEGENDS[show].format(chance=0.115)  # sqrt(2 / (48 pi))


def test_the_command_draws_a_text_or_how_the_stream_grows(stories260k_directory, tmp_path, capsys):
    main(stories260k_directory, "Once upon a time", out=tmp_path / "grid.png")
    main(stories260k_directory, out=tmp_path / "stream.png")
    shapes = [matplotlib.image.imread(tmp_path / name).shape for name in ("grid.png", "stream.png")]
    assert shapes[0][1] > 300 and shapes[1][:2] == (374, 594)
    assert capsys.readouterr().out.count("divided by the norm 1.000") == 1
