"""Make a Megatron distributed checkpoint of a Hugging Face directory.

    python tools/convert_from_hf.py SRC DST

The same as `megatron-logra convert from-hf`.
"""

import sys

from megatron_logra.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "from-hf", *sys.argv[1:]]))
