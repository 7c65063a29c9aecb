"""One compute thread: tests share the cores with other tests."""

import torch

torch.set_num_threads(1)
