"""What every test relies on."""

import torch

torch.set_num_threads(1)
