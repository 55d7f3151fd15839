"""The counts of the catalogue's models, kept in the package so that `dlojz models` need not load torch to tell them.

    python benchmarks/count_models.py

Run it anew when a model is added or changed: a test counts every model again (`tests/models/test_summary.py`).
"""

from __future__ import annotations

import json

from dlojz.models.summary import KEPT, count, usual_sizes


def main() -> None:
    """Count every model in its usual sizes, and write the counts into the package, a line each."""
    rows = []
    for sizes in usual_sizes():
        told = count(sizes)
        counted = [told.parameters, told.active_parameters, told.flops, told.blocks]
        rows.append(json.dumps({"sizes": list(sizes), "counted": counted}))
    KEPT.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
    print(f"{len(rows)} counts in {KEPT}")


if __name__ == "__main__":
    main()
