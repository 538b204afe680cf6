"""The page about many hosts: its recipes for metrics run as they stand."""

import sys
import types
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/many_hosts.md"
written_scalars = []
ROWS = [{"step": 10, "loss": 2.5}, {"step": 20, "loss": 2.0}]


class Writer:
    """What `tensorboardX.SummaryWriter` does, as far as the page needs it."""

    def __init__(self, folder):
        self.folder = folder

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def add_scalar(self, name, value, step):
        written_scalars.append((name, value, step))


def test_recipes_hand_every_row_on(monkeypatch):
    logged = []
    wandb = types.SimpleNamespace(
        init=lambda **how: None, finish=lambda: None, log=lambda row, step: logged.append(step)
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Writer))

    def train_language_model(run, directory, callback):
        for row in ROWS:
            callback(row)

    blocks = [part.split("```")[0] for part in PAGE.read_text().split("```python\n")[1:]]
    recipes = [block for block in blocks if "callback=" in block]
    assert len(recipes) == 2
    for block in recipes:
        exec(block, {"train_language_model": train_language_model, "run": None})
    assert logged == [10, 20]
    assert written_scalars == [(n, row[n], row["step"]) for row in ROWS for n in row]
