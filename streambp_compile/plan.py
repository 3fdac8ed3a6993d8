"""``python -m streambp_compile.plan``: see ``--help`` and docs/plan.md."""

from __future__ import annotations

import sys

from .tools.plan.commands import main

if __name__ == "__main__":
    sys.exit(main())
