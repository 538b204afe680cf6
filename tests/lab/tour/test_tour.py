"""The tour: one page with everything on it, resumed when interrupted, refused when foreign."""

import re

import pytest

from toolkit.lab.tour import tour
from toolkit.looped import LoopedConfig, parameter_count

SMALL = {"width": 32, "feed_forward": 32}


@pytest.fixture
def small_tour(monkeypatch):
    """Models, contexts and samples small enough for a test; everything else as it is."""
    models = {
        "plain": LoopedConfig.tiny("full", 1, **SMALL),
        "looped": LoopedConfig.tiny("full", 2, **SMALL),
        "hybrid": LoopedConfig.tiny("gdn", 2, **SMALL),
    }
    monkeypatch.setattr(tour, "contenders", lambda: models)
    monkeypatch.setattr(tour, "SAMPLE_LENGTH", 16)
    monkeypatch.setattr(tour, "LENGTHS", {"prefill": (64, 128), "decode": (64, 128)})


def test_the_three_models_have_matched_parameters():
    counts = [parameter_count(config) for config in tour.contenders().values()]
    assert max(counts) / min(counts) < 1.01


@pytest.mark.nightly
def test_tour_writes_one_page_resumes_and_refuses_other_settings(
    small_tour, tmp_path, capsys, monkeypatch
):
    calls = []
    measure = tour.measure_costs

    def interrupted_once():
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return measure()

    monkeypatch.setattr(tour, "measure_costs", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        tour.run_tour(tmp_path / "tour", steps=10)
    assert not (tmp_path / "tour/index.html").exists()

    page = tour.run_tour(tmp_path / "tour", steps=10)
    assert "already done: sample.json" in capsys.readouterr().out
    text = page.read_text()
    assert text.count("<svg") == 3
    assert not re.search(r'(src|href)="https?:', text), "the page fetches nothing"
    for words in ("measured here", "modelled", "all-gather", "reduce-scatter", "jax", "sha256"):
        assert words in text
    assert str(tmp_path) not in text.replace(f"{tmp_path}/tour/hybrid", "")

    with pytest.raises(ValueError, match="--fresh"):
        tour.run_tour(tmp_path / "tour", steps=20)


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="no tour"):
        tour.run_tour(tmp_path, steps=10, fresh=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_stage_that_was_edited_or_damaged_is_refused(tmp_path):
    stage = tmp_path / "costs.json"
    assert tour._once(stage, lambda: {"loss": 0.5}) == tour._once(stage, None) == {"loss": 0.5}
    for content in (stage.read_text().replace("0.5", "0.4"), '{"loss": 0.5}', "[" * 100_000):
        stage.write_text(content)
        with pytest.raises(ValueError, match=r"costs\.json (is damaged or|has no checksum)"):
            tour._once(stage, None)
