"""One compute thread: tests share the cores with other tests. test_cuda.py needs a CUDA device and is not collected
without one."""

import torch

torch.set_num_threads(1)
collect_ignore = [] if torch.cuda.is_available() else ["test_cuda.py"]
