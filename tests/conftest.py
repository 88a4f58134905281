"""One thread unless a test says otherwise: two cores are shared, and bits must not depend on it anyway."""

import torch

torch.set_num_threads(1)
