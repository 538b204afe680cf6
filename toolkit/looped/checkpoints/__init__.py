"""Published checkpoints become looped models: names of tensors, configurations, weights."""

from toolkit.looped.checkpoints.hub import checkpoint_folder
from toolkit.looped.checkpoints.load import load_checkpoint
from toolkit.looped.checkpoints.weights import load_layer
from toolkit.looped.checkpoints.write import save_checkpoint

__all__ = ["checkpoint_folder", "load_checkpoint", "load_layer", "save_checkpoint"]
