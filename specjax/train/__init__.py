"""Training of small models: loss, optimiser and one step, as pure functions."""

from specjax.train.agreement import ranks_of_choice
from specjax.train.checkpoint import restore_latest, save_checkpoint
from specjax.train.heads import eagle_loss, make_eagle_step, make_medusa_step, medusa_loss, shifted
from specjax.train.loss import causal_logits, causal_pass, next_token_loss
from specjax.train.optimizer import make_optimizer
from specjax.train.start import embedding_from
from specjax.train.step import TrainState, cast_matrices, init_train_state, make_train_step, make_update

__all__ = [
    "TrainState",
    "cast_matrices",
    "causal_logits",
    "causal_pass",
    "eagle_loss",
    "embedding_from",
    "init_train_state",
    "make_eagle_step",
    "make_medusa_step",
    "make_optimizer",
    "make_train_step",
    "make_update",
    "medusa_loss",
    "next_token_loss",
    "ranks_of_choice",
    "restore_latest",
    "save_checkpoint",
    "shifted",
]
