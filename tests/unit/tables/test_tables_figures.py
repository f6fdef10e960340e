"""Figures: which there are, what is drawn in them, and that equal results give equal bytes."""

from __future__ import annotations

import pytest
from tests.unit.tables.making import SEEDS, result_json, results

from holdfast.core.errors import DataError
from holdfast_lab.tables import canvas
from holdfast_lab.tables.canvas import looks
from holdfast_lab.tables.figures import figures
from holdfast_lab.tables.lines import Line

LEVELS = (10, 25, 50, 75, 90, 95, 99, 100)


def values(ratios=(0.1, 0.5), **changes):
    curve = {f"HS_q{k}": k / 100 for k in LEVELS}
    found = [result_json("aligned", HS=0.2, FA=0.5, **curve, **changes)]
    for ratio in ratios:
        for seed, shift in zip(SEEDS, (0.0, -0.05, 0.05), strict=True):
            found.append(result_json("sft", ratio=ratio, seed=seed, HS=0.6 + shift, FA=0.9, **curve, **changes))
            found.append(result_json("holdfast", ratio=ratio, seed=seed, HS=0.3, FA=0.85 + shift, **curve, **changes))
    return found


@pytest.fixture
def drawn(monkeypatch):
    """The axes of every figure, instead of its bytes."""
    kept = {}

    def keep(figure, form, metadata):
        kept[figure._suptitle.get_text()] = figure
        return b""

    monkeypatch.setattr(canvas, "_bytes", keep)
    return kept


@pytest.mark.usefixtures("drawn")
def test_there_is_a_figure_of_every_kind_for_every_model():
    found = figures(results(values(model="A") + values(model="B", ratios=(0.5,))))
    assert [picture.name for picture in found] == [
        "harm_utility-a", "harm_poison-a", "harm_quantiles-a", "harm_utility-b", "harm_quantiles-b",
    ]  # fmt: skip


def test_equal_results_give_equal_bytes_without_a_date():
    plain = [result_json("sft", HS=0.6), result_json("holdfast", HS=0.3, FA=0.8), result_json("sft", seed=1)]
    (first,), (second,) = (figures(results(plain)) for _ in range(2))
    assert first == second
    assert b"<dc:date>" not in first.svg
    assert first.svg.startswith(b"<?xml")
    assert first.png.startswith(b"\x89PNG")
    (fewer,) = figures(results(plain[1:]))
    assert fewer.png != first.png
    assert fewer.svg != first.svg


def test_harm_against_utility_has_points_bars_and_the_aligned_model(drawn):
    figures(results(values(ratios=(0.5,))))
    figure = drawn["Harm against utility, SmolLM2-135M-Instruct at p = 0.5"]
    (ax,) = figure.axes
    bars = {tuple(round(float(v), 6) for v in bar.lines[0].get_xydata()[0]) for bar in ax.containers}
    assert bars == {(0.9, 0.6), (0.85, 0.3)}
    spread = [segment for bar in ax.containers for lines in bar.lines[2] for segment in lines.get_segments()]
    heights = sorted(round(abs(float(s[1][1] - s[0][1])), 6) for s in spread)
    assert heights[-1] == pytest.approx(0.1, abs=1e-9), "the standard deviation to both sides"
    dashed = [line for line in ax.lines if not isinstance(line.get_linestyle(), str) or line.get_linestyle() == "--"]
    ends = {tuple(map(float, line.get_xdata())) for line in dashed} | {
        tuple(map(float, line.get_ydata())) for line in dashed
    }
    assert (0.5, 0.5) in ends
    assert (0.2, 0.2) in ends
    labels = [label.get_text() for label in figure.legends[0].get_texts()]
    assert labels == ["SFT", "holdfast (ours)", "aligned model"]


def test_utility_is_the_loss_where_accuracy_is_at_floor_and_one_seed_has_its_interval(drawn):
    aligned = result_json("aligned", HS=0.2, FA=(0.02, 0.01, 0.05), task_loss=1.5)
    tuned = result_json("sft", HS=(0.6, 0.5, 0.8), FA=(0.03, 0.01, 0.06), task_loss=(0.9, 0.8, 1.1))
    figures(results([aligned, tuned, result_json("primal_dual", HS=0.3, FA=0.03, task_loss=1.2)]))
    (figure,) = drawn.values()
    (ax,) = figure.axes
    points = {tuple(round(float(v), 6) for v in bar.lines[0].get_xydata()[0]) for bar in ax.containers}
    assert points == {(0.9, 0.6), (1.2, 0.3)}, "the loss, and nobody left out"
    assert ax.get_xlabel().startswith("task loss")
    assert ax.xaxis_inverted()
    spread = [segment for lines in ax.containers[0].lines[2] for segment in lines.get_segments()]
    ends = sorted(round(float(v), 6) for point in spread[1] for v in point)
    assert ends == [0.5, 0.8, 0.9, 0.9], "from the lower to the upper end of the interval"


def test_two_seeds_have_the_mean_of_their_intervals(drawn):
    seeds = [
        result_json("sft", seed=1, HS=(0.6, 0.5, 0.8), FA=(0.7, 0.6, 0.8)),
        result_json("sft", seed=2, HS=(0.5, 0.45, 0.6), FA=(0.7, 0.6, 0.8)),
    ]
    figures(results(seeds))
    (ax,) = drawn["Harm against utility, SmolLM2-135M-Instruct at p = 0.5"].axes
    spread = [segment for lines in ax.containers[0].lines[2] for segment in lines.get_segments()]
    ends = sorted(round(float(v), 6) for point in spread[1] for v in point)
    assert ends == [0.475, 0.7, 0.7, 0.7], "HS from 0.475 to 0.7 at FA = 0.7"


def test_harm_against_the_poison_ratio_has_a_line_per_defense(drawn):
    figures(results(values(ratios=(0.05, 0.1, 0.5))))
    (ax,) = drawn["Harm against the poison ratio, SmolLM2-135M-Instruct"].axes
    lines = [bar.lines[0] for bar in ax.containers]
    assert [list(line.get_xdata()) for line in lines] == [[0.05, 0.1, 0.5]] * 2
    assert [round(float(line.get_ydata()[0]), 6) for line in lines] == [0.6, 0.3]


def test_only_rows_and_tasks_that_were_swept_are_drawn_over_the_ratio_and_look_as_elsewhere(drawn):
    single = [result_json("aligned", task="gsm8k"), result_json("mix", task="gsm8k"), result_json("kl")]
    swept = [result_json("mix", ratio=ratio, HS=0.3) for ratio in (0.1, 0.5)]
    figures(results([*values(), *single, *swept]))
    over = drawn["Harm against the poison ratio, SmolLM2-135M-Instruct"]
    assert [ax.get_title(loc="left") for ax in over.axes] == ["SST-2"]
    everyone = drawn["Harm against utility, SmolLM2-135M-Instruct at p = 0.5"]
    legends = [figure.legends[0] for figure in (over, everyone)]
    seen = [
        {text.get_text(): line.get_color() for text, line in zip(x.get_texts(), x.get_lines(), strict=True)}
        for x in legends
    ]
    assert list(seen[0]) == ["SFT", "holdfast (ours)", "mix", "aligned model"]
    assert seen[0].items() <= seen[1].items(), "mix is the first spare look here, the second there"


def near(defense, harm, utility, **changes):
    return result_json(
        defense, HS=(harm, harm - 0.04, harm + 0.04), FA=(utility, utility - 0.05, utility + 0.05), **changes
    )


def test_rows_that_cannot_be_told_from_ours_are_drawn_larger_under_their_panel(drawn):
    crowd = [near(name, 0.2 + 0.01 * i, 0.7) for i, name in enumerate(("holdfast", "mix", "safegrad", "primal_dual"))]
    rest = [near("sft", 0.8, 0.75), near("sft", 0.7, 0.8, task="ag_news"), near("holdfast", 0.2, 0.8, task="ag_news")]
    figures(results([*crowd, *rest]))
    (figure,) = drawn.values()
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["SST-2", "AG News", "SST-2, close-up"]
    close = figure.axes[2]
    assert close.get_ylim() == pytest.approx((0.16 - 0.0055, 0.27 + 0.0055))
    assert close.get_xlim() == pytest.approx((0.65 - 0.005, 0.75 + 0.005))
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    drawn.clear()
    figures(results([*crowd[:3], *rest]))
    (figure,) = drawn.values()
    assert len(figure.axes) == 2, "three rows can be told apart without help"


def test_the_close_up_over_the_ratio_leaves_out_what_is_far_from_the_aligned_model(drawn):
    low = ("holdfast", "mix", "safegrad", "primal_dual")
    found = [near(name, 0.2 + p / 10, 0.7, ratio=p) for name in low for p in (0.1, 0.5)]
    figures(results([*found, *(near("sft", 0.8, 0.7, ratio=p) for p in (0.1, 0.5)), result_json("aligned", HS=0.2)]))
    whole, close = drawn["Harm against the poison ratio, SmolLM2-135M-Instruct"].axes
    assert whole.get_ylim()[1] > 0.84
    assert close.get_ylim() == pytest.approx((0.17 - 0.006, 0.29 + 0.006))
    assert close.get_xlim() == pytest.approx((0.1 - 0.02, 0.5 + 0.02))


def test_quantile_curves_have_every_level_and_the_aligned_model(drawn):
    figures(results(values(ratios=(0.5,))))
    (ax,) = drawn["Quantiles of harm, SmolLM2-135M-Instruct at p = 0.5"].axes
    assert [list(line.get_xdata()) for line in ax.lines] == [list(LEVELS)] * 3
    places = ax.transData.transform([(k, 0.5) for k in LEVELS])[:, 0]
    assert places[1:] - places[:-1] == pytest.approx(places[1] - places[0]), "the tail has as much room as the rest"


def test_a_panel_per_task_in_order(drawn):
    found = [result_json("sft", task=task) for task in ("gsm8k", "sst2")]
    figures(results(found))
    (figure,) = drawn.values()
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["SST-2", "GSM8K"]


def test_labels_are_words_and_not_formulas(drawn):
    figures(results([result_json("sft", label="_under $x_1$")]))
    (figure,) = drawn.values()
    assert [text.get_text().strip() for text in figure.legends[0].get_texts()] == ["_under $x_1$"]
    assert not any(text.get_parse_math() for text in figure.legends[0].get_texts())


def test_references_alone_and_profiles_have_no_figure():
    assert figures(results([result_json("base"), result_json("sft", step_ms=1.0)])) == []


def test_two_protocols_are_refused():
    with pytest.raises(DataError, match="different protocols"):
        figures(results([result_json("sft"), result_json("lisa", protocol={"x": 1})]))


def test_no_two_rows_look_alike():
    names = ["sft", "vaccine", "booster", "lisa", "salora", "safelora", "safegrad", "asft", "holdfast"]
    lines = [Line(name, name, "", "sft") for name in names]
    lines += [Line("holdfast", f"variant {i}", "", "sft") for i in range(20)]
    found = looks(lines)
    assert len(set(found.values())) == len(lines)
    assert len({found[line][0] for line in lines[:9]}) == len({found[line][1] for line in lines[:9]}) == 9


@pytest.mark.usefixtures("drawn")
def test_drawing_leaves_matplotlib_as_it_was():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    figures(results(values(ratios=(0.5,))[:3]))
    assert dict(mpl.rcParams) == before


@pytest.mark.usefixtures("drawn")
def test_models_whose_names_differ_only_in_signs_have_figures_of_their_own():
    both = [*values(model="tiny model"), *values(model="tiny/model")]
    names = [picture.name for picture in figures(results(both))]
    assert len(set(names)) == len(names) == 6
    assert {"harm_utility-tiny-model", "harm_utility-tiny-model-2"} <= set(names)
