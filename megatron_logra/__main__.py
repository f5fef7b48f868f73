"""`python -m megatron_logra`: the command line."""

import sys

from megatron_logra.cli import main

# The guard matters: saving a checkpoint starts helper processes that import this module.
if __name__ == "__main__":
    sys.exit(main())
