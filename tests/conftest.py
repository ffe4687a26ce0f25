"""Settings of all tests: one thread for each rank, so that worlds of threads do not fight over the cores."""

import torch

torch.set_num_threads(1)
