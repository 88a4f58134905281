"""Every arithmetic step of a forward pass, twice: `aligned` (ours) and `standard` (stock torch)."""

from zerogap.kernels.interface import Kernels, get_kernels
from zerogap.kernels.rows import AttentionShape, RowBatch
from zerogap.kernels.weight import Weight

__all__ = ["AttentionShape", "Kernels", "RowBatch", "Weight", "get_kernels"]
