"""Training of small models: losses, optimiser, steps and what to train on, as pure functions."""

from specjax.train.agreement import ranks_of_choice, ranks_of_tokens
from specjax.train.boost import Lesson, answers_covered, make_lesson_step, matched, spans
from specjax.train.calibration import best_factor, cross_entropies, scale_logits
from specjax.train.checkpoint import restore_latest, save_checkpoint
from specjax.train.heads import eagle_loss, make_eagle_step, make_medusa_step, medusa_loss, shifted
from specjax.train.loss import causal_logits, causal_pass, imitation_loss, next_token_loss
from specjax.train.optimizer import make_optimizer
from specjax.train.start import embedding_from
from specjax.train.step import TrainState, cast_matrices, init_train_state, make_train_step, make_update

__all__ = [
    "Lesson",
    "TrainState",
    "answers_covered",
    "best_factor",
    "cast_matrices",
    "causal_logits",
    "causal_pass",
    "cross_entropies",
    "eagle_loss",
    "embedding_from",
    "imitation_loss",
    "init_train_state",
    "make_eagle_step",
    "make_lesson_step",
    "make_medusa_step",
    "make_optimizer",
    "make_train_step",
    "make_update",
    "matched",
    "medusa_loss",
    "next_token_loss",
    "ranks_of_choice",
    "ranks_of_tokens",
    "restore_latest",
    "save_checkpoint",
    "scale_logits",
    "shifted",
    "spans",
]
