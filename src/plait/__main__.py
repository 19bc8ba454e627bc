"""``python -m plait``."""

from plait.cli import main

main()
