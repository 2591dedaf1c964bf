"""``python -m token_id_capture`` is the command ``tokcap``."""

from __future__ import annotations

from token_id_capture.cli.main import main

if __name__ == "__main__":
    main()
