"""Every arithmetic step of a forward pass, by family: `aligned` (ours), `standard` (stock torch), `int8` (engines)."""

from zerogap.kernels.interface import Kernels, get_kernels
from zerogap.kernels.rows import AttentionShape, RowBatch
from zerogap.kernels.weight import Weight

__all__ = ["AttentionShape", "Kernels", "RowBatch", "Weight", "get_kernels"]
