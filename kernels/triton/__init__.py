"""The operations as Triton kernels: what a GPU runs. Without a GPU Triton's interpreter runs them on a CPU.

Scalars that a kernel needs in full precision are annotated `tl.float64` (a plain float argument would arrive
as float32) and turned into tensors by `tl.full`, as the interpreter hands them over as Python floats.
"""

import os
import sys

import torch

if not os.environ.get("TRITON_INTERPRET") and not torch.cuda.is_available():
    if "triton.language" in sys.modules:
        raise RuntimeError(
            "there is no GPU, and Triton was imported before as a compiler: to run its kernels on a CPU "
            "set TRITON_INTERPRET=1 before Python starts"
        )
    os.environ["TRITON_INTERPRET"] = "1"
