"""Write docs/deviations.md from the list that the tests hold both loaders to.

python tools/deviations_page.py            # writes the page
python tools/deviations_page.py --check    # fails when it is stale
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "deviations.md"

HEAD = """# Deviations from stock

With default options, batches, their order, random draws in every process, exceptions and their texts, warnings, worker
counts and names, and the moment at which workers end are those of `torch.utils.data.DataLoader`. A differential suite
runs every scenario on both and compares all that can be seen.

What differs on purpose is this list, and nothing else. Each entry has a test that shows both sides. Processes, queues
and pools have [a list of their own](guide/processes.md#what-differs-from-stock).

"""


def page() -> str:
    """The page's text."""
    sys.path.insert(0, str(ROOT))
    from tests.data.deviations import DEVIATIONS

    entries = (
        f"## {d.name[0].upper()}{d.name[1:]}\n\n* **Stock:** {d.stock}\n* **Here:** {d.ours}\n* **Why:** {d.why}\n"
        for d in DEVIATIONS
    )
    return HEAD + "\n".join(entries)


def main() -> None:
    """Write or check the page."""
    text = page()
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text() == text else f"{PAGE.name} is stale: run python tools/deviations_page.py")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
