"""Realised over predicted KL by layout, precision and estimator, as a table in Markdown.

    python tests/kl_table.py [--draws 3] [--layouts one tp2 …]

Medians of first steps of a tiny model (`kl_runs`) at three budgets. In bf16, behind each: what is
realised along the prediction, and not by rounding; and the prediction over that of fp32 for the
same weights and direction. The bounds on all of these are in `test_predicted_kl.py`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kl_runs import BUDGETS, Row, table
from ranks import Ranks
from reference import make_checkpoint
from test_layouts import LAYOUTS

ESTIMATORS = {"forward_ad": "forward mode", "finite_difference": "differences"}


def cells(draws: Sequence[Sequence[Row]], estimator: str, bf16: bool) -> list[str]:
    """Of one estimator, for each budget and then, in bf16, over fp32's prediction."""
    found = []
    for rows in zip(*draws, strict=True):
        # The step was taken by what forward mode predicted.
        predicted = [r.scaled * r.predicted[estimator] / r.predicted["forward_ad"] for r in rows]
        pairs = list(zip(rows, predicted, strict=True))
        whole = statistics.median(row.realised / kl for row, kl in pairs)
        along = statistics.median(row.along / kl for row, kl in pairs)
        found.append(f"{whole:.2f} ({along:.2f})" if bf16 else f"{whole:.3f}")
    exact = [r.predicted[estimator] / r.in_fp32 for rows in draws for r in rows if r.in_fp32]
    return [*found, f"{statistics.median(exact):.3f}" if exact else ""]


def main() -> None:
    """Measure, and print a row at a time."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--draws", type=int, default=3)
    layouts: dict[str, tuple[int, dict[str, Any]]] = {"one": (1, {}), **LAYOUTS}
    parser.add_argument("--layouts", nargs="+", choices=layouts, default=list(layouts))
    args = parser.parse_args()
    header = ["layout", "precision", "estimator", *(f"{b:g}" for b in BUDGETS), "over fp32's"]
    print("|", " | ".join(header), "|")
    print("|", " | ".join("---" for _ in header), "|")
    ranks = Ranks()
    with tempfile.TemporaryDirectory() as directory:
        make_checkpoint(Path(directory), "qwen3", False, layers=4)
        for layout in args.layouts:
            size, parallel = layouts[layout]
            for precision in ("fp32", "bf16"):
                train = {"precision": precision, "micro_batch_size": 2}
                sections: dict[str, Any] = {"parallel": parallel, "train": train}
                found = [
                    ranks.run(size, table, Path(directory), sections, seed)[0]
                    for seed in range(args.draws)
                ]
                for estimator, name in ESTIMATORS.items():
                    row = [layout, precision, name, *cells(found, estimator, precision == "bf16")]
                    print("|", " | ".join(row), "|", flush=True)
    ranks.close()


if __name__ == "__main__":
    main()
