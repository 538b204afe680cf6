"""`toolkit train`: options from presets, files, --set and flags, and what it prints of them."""

import sys
import tomllib
from contextlib import suppress

import pytest

from toolkit.cli import commands as cli
from toolkit.cli.options import merged, parsed_settings
from toolkit.training import OPTIMIZERS


@pytest.fixture
def printed(monkeypatch, capsys, tmp_path):
    """The options that `toolkit train ... --print-config` prints: (table, text, errors)."""
    monkeypatch.setattr(cli, "_enable_compilation_cache", lambda: None)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        words = ["toolkit", "train", "run", *map(str, arguments), "--print-config"]
        monkeypatch.setattr(sys, "argv", words)
        with suppress(SystemExit):
            cli.main()
        out, err = capsys.readouterr()
        return tomllib.loads(out), out, err

    return run


def test_flags_override_set_which_overrides_the_file(printed, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'steps = 7\noptimizer = "lion"\nema = 0.9\nb2 = 0.9\n'
        '[looped]\npattern = "window full"\nwidth = 32\nwindow.sliding_window = 8\n'
    )
    table, out, _ = printed(
        "--config", file, "--set", "looped.width=64", "--set", "b2=0.5", "--b2", 0.0,
        "--ema", 0, "--set", "looped.feed_forward=96", "--no-decay", "vectors", "embedding",
    )  # fmt: skip
    assert (table["steps"], table["optimizer"]) == (7, "lion")
    assert (table["ema"], table["b2"]) == (0, 0)  # a flag that is 0 is given
    assert table["no_decay"] == ["vectors", "embedding"]
    assert table["looped"]["width"] == 64
    assert table["looped"]["feed_forward"] == 96
    assert table["looped"]["window"]["sliding_window"] == 8
    whole = tmp_path / "whole.toml"
    whole.write_text(out)
    assert printed("--config", whole)[1] == out
    module = tmp_path / "run.py"
    module.write_text(f"options = {table!r}")
    assert printed("--config", module)[1] == out


def test_without_options_it_is_the_documented_model(printed):
    table, _, _ = printed()
    assert table["looped"]["pattern"] == "gdn gdn gdn full"
    assert (table["looped"]["loops"], table["looped"]["width"], table["steps"]) == (2, 128, 1000)
    assert table["text"] == "prose"


def test_presets_and_own_modules(printed, tmp_path, monkeypatch):
    table, _, _ = printed("--preset", "lt2-hybrid-1.3b", "--set", "looped.remat=true")
    assert table["looped"]["vocabulary"] == 128_256
    assert table["looped"]["remat"]
    pattern = table["looped"]["pattern"]
    assert pattern != "gdn gdn gdn full"
    assert printed("--set", "preset=lt2-hybrid-1.3b")[0]["looped"]["pattern"] == pattern
    (tmp_path / "mine.py").write_text(
        "import optax\n"
        "from toolkit.training import OPTIMIZERS, OptimizerKind\n"
        "OPTIMIZERS['mine'] = OptimizerKind(lambda b1, b2, eps: optax.identity(), 0.0, 0.0, 'me')\n"
    )
    # What the module adds is taken back, and with it no other test sees a further optimiser.
    monkeypatch.setitem(OPTIMIZERS, "mine", None)
    assert printed("--import", "mine", "--optimizer", "mine")[0]["optimizer"] == "mine"


def test_plan_prints_the_commands_that_train_its_plan(printed, monkeypatch, capsys):
    """The printed line is run as it is, up to the training itself."""
    monkeypatch.setattr(
        sys, "argv", ["toolkit", "plan", "--model", "lt2-looped-tiny", "--chips", "h100:1",
                      "--batch", "2", "--sequence-length", "16"],
    )  # fmt: skip
    cli.main()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "Train it with" in line]
    first, second = line.partition("with:")[2].split("&&")
    monkeypatch.setattr(sys, "argv", first.split())
    cli.main()
    assert "toolkit train RUN --plan plan.json" in capsys.readouterr().out
    assert second.split()[:3] == ["toolkit", "train", "RUN"]
    table, _, _ = printed(*second.split()[3:])
    assert (table["batch"], table["sequence_length"], table["looped"]["loops"]) == (2, 16, 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "looped.feed_forwrd=3"], ["looped.feed_forwrd", "looped.feed_forward"]),
        (["--set", "looped.window.size=3"], ["looped.window.size", "head_size"]),
        (["--set", "pattern=full"], ["pattern", "such as looped.pattern\n"]),
        (["--set", "looped.steps=3"], ["looped.steps", "such as steps\n"]),
        (["--set", "optimiser=lion"], ["optimiser", "optimizer"]),
        (["--set", "steps"], ["set", "steps", "NAME=VALUE"]),
        (["--preset", "lt2-hybrid"], ["preset", "lt2-hybrid-tiny"]),
        (["--optimizer", "adam"], ["optimizer", "adamw"]),
        (["--extend", "9"], ["extend", "run.json"]),
        (["--dtype", "float16"], ["loss_scaling", "float16"]),
        (["--import", "nothing_of_this_name"], ["nothing_of_this_name"]),
        (["--config", "missing.toml"], ["missing.toml"]),
    ],
)
def test_a_wrong_option_is_one_line(printed, arguments, words):
    _, out, err = printed(*arguments)
    assert out == ""
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 2
    for word in words:
        assert word in err


def test_settings_are_numbers_lists_truths_or_strings():
    found = parsed_settings(("a.b=2", "a.c=[1, 2]", "d=true", "e=x y", "f=None"))
    assert found == {"a": {"b": 2, "c": [1, 2]}, "d": True, "e": "x y", "f": "None"}
    assert merged({"a": {"b": 1}, "c": 2}, {"a": {"d": 3}}) == {"a": {"b": 1, "d": 3}, "c": 2}
