"""One model cut over ranks: process groups, megatron-core models, micro-batches, weights in and out."""

import warnings

from rolemesh.parallel import plain_imports

# Without them torch's own optimizer and norms are used, which `rolemesh doctor` reports; megatron-core says
# so in every process at import.
warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed")

plain_imports.install()
