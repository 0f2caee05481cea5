"""Training of draft heads: recipes, batches, losses, the loop. `train` is the whole of it."""

from medusa.training.loop import TrainingResult, train
from medusa.training.recipe import Recipe, load_recipe

__all__ = ["Recipe", "TrainingResult", "load_recipe", "train"]
