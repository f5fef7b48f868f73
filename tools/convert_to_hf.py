"""Make a Hugging Face directory of a checkpoint's weights.

    python tools/convert_to_hf.py SRC DST [--like DIR] [--dtype T] [--shard-gb GB]

The same as `megatron-logra convert to-hf`.
"""

import sys

from megatron_logra.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-hf", *sys.argv[1:]]))
