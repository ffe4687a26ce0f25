"""torchtitan's debug run of Llama, sharded within replicas, trained by votes of one bit per parameter between them.

In a clone of torchtitan, where its text and its tokenizer are (on one line):

PYTHONPATH=path/to/examples torchrun --nproc-per-node 4 -m torchtitan.train
    --module with_torchtitan --config llama3_by_votes --parallelism.data_parallel_replicate_degree 2
"""

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from dlion.integrations.torchtitan import local_gradients, voting


def llama3_by_votes() -> Trainer.Config:
    config = llama3_debugmodel()
    config.optimizer = voting(lr=1e-4, weight_decay=0.5)
    config.parallelism.data_parallel_replicate_degree = 2
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint.enable = True
    config.checkpoint.interval = 5
    config.checkpoint.last_save_model_only = False  # or there is nothing to go on from
    return local_gradients(config)
