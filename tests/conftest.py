"""Settings of all tests: one thread for each rank, so that worlds of threads do not fight over the cores; and nothing
of Hugging Face's packages in the user's folders or from a network, here and in the commands that tests start.
"""

import atexit
import os
import shutil
import tempfile

import torch

torch.set_num_threads(1)
_hub = tempfile.mkdtemp(prefix="dlion-hub-")
atexit.register(shutil.rmtree, _hub, ignore_errors=True)
os.environ |= {"HF_HOME": _hub, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
