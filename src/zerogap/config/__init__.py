"""The typed recipe: every key of a run, with what follows from its value. Importable without torch."""

from zerogap.config.evaluation import Evaluation
from zerogap.config.learner import Learner
from zerogap.config.load import RecipeError, dump_recipe, load_recipe, parse_recipe
from zerogap.config.model import Arithmetic, CreateModel, Model, RopeScaling
from zerogap.config.recipe import Audit, Checkpoint, Logging, Recipe, Runtime, Train
from zerogap.config.rollout import Rollout
from zerogap.config.section import Section
from zerogap.config.task import Task, WarmStart

__all__ = [
    "Arithmetic",
    "Audit",
    "Checkpoint",
    "CreateModel",
    "Evaluation",
    "Learner",
    "Logging",
    "Model",
    "Recipe",
    "RecipeError",
    "Rollout",
    "RopeScaling",
    "Runtime",
    "Section",
    "Task",
    "Train",
    "WarmStart",
    "dump_recipe",
    "load_recipe",
    "parse_recipe",
]
