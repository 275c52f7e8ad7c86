"""Training of small models: loss, optimiser and one step, as pure functions."""

from specjax.train.agreement import ranks_of_choice
from specjax.train.checkpoint import restore_latest, save_checkpoint
from specjax.train.loss import causal_logits, next_token_loss
from specjax.train.optimizer import make_optimizer
from specjax.train.start import embedding_from
from specjax.train.step import TrainState, init_train_state, make_train_step

__all__ = [
    "TrainState",
    "causal_logits",
    "embedding_from",
    "init_train_state",
    "make_optimizer",
    "make_train_step",
    "next_token_loss",
    "ranks_of_choice",
    "restore_latest",
    "save_checkpoint",
]
